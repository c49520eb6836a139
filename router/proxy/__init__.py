"""`kvatlas router`: an OpenAI-compatible proxy in front of engines (extra `router`).

    ../proxy_service.py  the process: settings, connections, server, and how it drains
    request_router.py    the parts that route requests, for this server and for others
    application.py       the proxy's paths
    route_api.py         `/kvatlas/route`, `select` and `done` over `kvatlas_router.held_bookings`
    engine_call.py       finds the model that a request names
    json_body.py         reads a JSON body as engines do
    form_body.py         finds the model that a form names
    large_body.py        finds the model that a body names if it is too large to decode
    exchange.py          one request, from its arrival to its record: reads its prompt, and ends it if the client leaves
    worker_attempts.py   books workers for it, one after another, until the client gets something
    attempts.py          the state of its attempts
    continued_answer.py  its streamed answer, if another worker may continue it
    answer_relay.py      one attempt on one worker: sends the request and passes its answer on
    predicted_attempt.py how long an attempt should take
    client_request.py    the client's side: its request, the answers and errors sent to it, and its line in the access log
    reported_usage.py    an answer's usage and times
    headers.py           selects the headers to forward, and builds the decision header
    request_trace.py     continues the caller's trace
    counters.py          counters

The engine's side is in `upstream`; `ejection` and `progress` decide which workers to avoid. Until the first content of a
successful answer arrives, a client gets only comments, so its request can still go to another worker.
"""
