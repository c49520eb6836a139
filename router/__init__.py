"""The routers that serve requests: the OpenAI-compatible proxy (`proxy/`) and the endpoint picker for gateways (`gateway/`).

Both stand on the library `router_client`, which overlaps, prices, books and learns. Here is what only a server needs:

    proxy/            requests over HTTP: parse, route, send to an engine, relay the answer
    gateway/          the same decisions over gRPC, for Envoy and the Gateway API's inference extension
    queries/          the index for other people's routers: questions, and changes as they come
    prompts/          from requests to prompts in their scopes, and where these are looked up
    tokens/           from text to token ids
    admission/        a queue for requests that no worker has room for
    answers/          server-sent events, and errors in answers, read on their way
    engine_objects/   stored responses, files and the like: which worker keeps them
    upstream/         connections to engines, and what their answers say
    progress/         engines that compute nothing though they have work are found, probed and left alone
    outliers/         workers that fail too often are left alone for a while
    disaggregation/   a prefill worker and a decode worker for one request
    held_bookings.py  bookings for requests that other programs send
    litellm/          LiteLLM's Router and proxy choose their deployments by kvatlas
    status_page/      what `kvatlas router` shows of itself
"""
