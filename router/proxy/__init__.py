"""`kvatlas router`: an OpenAI-compatible proxy in front of engines (extra `router`).

    ../proxy_service.py  the process: settings, connections, server, and how it drains
    request_router.py   the parts that route requests, for this and other servers
    application.py      its paths
    route_api.py        `/kvatlas/route`, `select` and `done` over `kvatlas_router.held_bookings`
    engine_call.py      from any request to the model that it names
    json_body.py        a JSON body as engines read it
    form_body.py        the model that a form names
    large_body.py       the model of a body that is too large to be decoded
    exchange.py         one request: its prompt, a booked worker; another worker while nothing was sent to the client yet
    answer_relay.py     one try on one worker: the request sent, its answer passed on
    predicted_try.py    what a try is expected to take
    client_request.py   the client's side: its request, answers and errors to it, and its line in the access log
    error_events.py     how a stream that has begun reports an error, in the words of its protocol
    answer_usage.py     usage and times of an answer
    headers.py          which headers are forwarded, and the decision header
    request_trace.py    continues the caller's trace
    counters.py         counters

The engine's side is in `upstream`; which workers are left alone in `outliers` and `progress`. Nothing is sent to a
client before the first content of a good answer is there, but comments: until then a request may go to another worker.
"""
