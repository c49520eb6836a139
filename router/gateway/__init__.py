"""`kvatlas epp`: an endpoint picker that gateways call over Envoy's external processing (extra `gateway`).

    service.py            the process: settings, connections, both gRPC servers, drain
    server.py             gRPC: the external processor, its health service, TLS (certificate.py)
    processor.py          one stream: asks the picker, follows the answer
    ext_proc/             Envoy's messages, and when each may be sent on a stream; pure
    answer_reader.py      reads usage and times from an answer while it passes
    picker.py             the interface between a stream and the decision
    fleet_picker.py       the decision by `RouterClient`, over the fleet's workers
    unpublished_pods.py   the decision over pods without a publisher
    booked_request.py     one booked request, from its choice to its end
    worker_addresses.py   a worker's ip:port
    pool_pods.py          the pods of a pool, found by name or through Kubernetes
    asked_request.py      a request, as read by the picker
    extension_objects.py  priorities and model rewrites, from Kubernetes
    kubernetes_api.py     reads objects of the pod's namespace
    counters.py           counters
    field_metrics.py      metrics under the names that common dashboards use

The gateway opens a stream for each request and sends the request and its answer through it. Anything not sent back never
reaches the engine or the client. If the stream ends with an error, the client gets a 500.
"""
