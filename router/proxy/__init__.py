"""`kvatlas router`: an OpenAI-compatible proxy in front of engines (extra `router`).

    ../proxy_service.py  the process: settings, connections, server, and how it drains
    request_router.py    the parts that route requests, for this and other servers
    application.py       the proxy's paths
    route_api.py         `/kvatlas/route`, `select` and `done` over `kvatlas_router.held_bookings`
    engine_call.py       finds the model that a request names
    json_body.py         a JSON body as engines read it
    form_body.py         the model that a form names
    large_body.py        the model that a body names if it is too large to decode
    exchange.py          one request, from its arrival to its record: reads the prompt, ends with the client
    worker_attempts.py   books a worker for it, then others until the client gets anything
    attempts.py          the state of its attempts
    continued_answer.py  its streamed answer, if another worker may continue it
    answer_relay.py      one attempt on one worker: sends the request, passes its answer on
    predicted_attempt.py how long an attempt should take
    client_request.py    the client's side: its request, answers and errors to it, and its line in the access log
    reported_usage.py    usage and times of an answer
    headers.py           which headers are forwarded, and the decision header
    request_trace.py     continues the caller's trace
    counters.py          counters

The engine's side is in `upstream`; `ejection` and `progress` decide which workers to avoid. Until the first content of a
successful answer arrives, a client gets only comments, so its request may still go to another worker.
"""
