"""The routers that serve requests: the OpenAI-compatible proxy (`proxy/`) and the endpoint picker for gateways (`gateway/`).

Both build on the library `router_client`, which looks up overlaps, prices, books and learns. This package has what only a
server needs:

    proxy/            requests over HTTP: parse, route, send to an engine, relay the answer
    gateway/          the same decisions over gRPC, for Envoy and the Gateway API's inference extension
    queries/          the index for other routers: queries, and a stream of changes
    prompts/          turns requests into prompts in their scopes, and finds the catalogue to look them up in
    tokens/           turns text into token ids
    admission/        a queue for requests while all workers are full
    answers/          server-sent events, and errors in answers, read as they pass
    engine_objects/   which worker keeps stored responses, files and the like
    upstream/         connections to engines, and how their answers are judged
    progress/         finds engines that have work but compute nothing, probes and avoids them
    ejection/         avoids workers that fail too often, for a while
    disaggregation/   a prefill worker and a decode worker for one request
    held_bookings.py  bookings for requests that other programs send
    litellm/          lets LiteLLM's Router choose deployments by kvatlas
    status_page/      the status page of `kvatlas router`
"""
