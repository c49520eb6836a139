"""The routers that serve requests: the OpenAI-compatible proxy (`proxy/`) and the endpoint picker for gateways (`gateway/`).

Both build on the library `router_client`, which looks up overlaps, prices, books and learns. This package has what only a
server needs:

    proxy/            requests over HTTP: parse, route, send to an engine, relay the answer
    gateway/          the same decisions over gRPC, for Envoy and the Gateway API's inference extension
    queries/          the index for other routers: queries, and a stream of changes
    prompts/          turns requests into prompts in their scopes, and finds the catalogue to look them up in
    tokens/           turns text into token ids
    admission/        a queue for requests while all workers are full
    answers/          reads server-sent events, and errors in answers, as they pass
    engine_objects/   finds the worker that keeps stored responses, files and the like
    upstream/         connects to engines, and judges their answers
    progress/         finds, probes and avoids engines that have work but compute nothing
    ejection/         temporarily avoids workers that fail too often
    disaggregation/   splits a request between a prefill worker and a decode worker
    held_bookings.py  bookings for requests that other programs send
    litellm/          lets LiteLLM's Router choose deployments through kvatlas
    status_page/      the status page of `kvatlas router`
"""
