"""`kvatlas router`: an OpenAI-compatible proxy in front of engines (extra `router`).

    service.py       the process: settings, connections, server
    application.py   its paths
    exchange.py      one request: tokens, worker, answer; another worker while nothing was sent yet
    upstream.py      one try on one engine
    event_stream.py  reads an answer's stream while it passes
    picking.py       what the proxy asks of the router client
    catalogue.py     which models the fleet serves, under which names
    held_routes.py   `/v1/route` and `/v1/done`, for routers in other languages
    headers.py       which headers go on, and what the decision header says
    tracing.py       the caller's trace, continued and handed on
    counters.py      what is counted

Nothing is sent to a client before the engine's first byte is there; until then a request may go to another worker.

Import its modules by name: `picking` and `held_routes` serve routers of other makes too, and need the plain install alone.
"""
