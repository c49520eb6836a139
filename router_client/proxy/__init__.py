"""`kvatlas router`: an OpenAI-compatible proxy in front of engines (extra `router`).

    service.py         the process: settings, connections, server
    application.py     its paths; `/v1/route` and `/v1/done` over `router_client.held_bookings`
    exchange.py        one request: its prompt, a booked worker; another worker while nothing was sent to the client yet
    answer_relay.py    one try on one worker: the request sent, its answer passed on
    client_request.py  the client's side: its request, answers and errors to it
    upstream.py        the engine's side: a request to it, its answer or why there is none
    event_stream.py    reads the usage from an answer's stream while it passes
    request_reader.py  from a body to a prompt in its scope
    catalogue.py       which models the fleet serves, under which names
    headers.py         which headers are forwarded, and the decision header
    tracing.py         continues the caller's trace
    counters.py        counters

Nothing is sent to a client before the engine's first byte is there; until then a request may go to another worker.
"""
