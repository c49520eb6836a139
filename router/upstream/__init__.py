"""Calls to engines (extra `router`).

engine_addresses.py   decides which addresses engines may have, and which of them get credentials
engine_client.py      the HTTP client for all calls to engines: opens and keeps connections
engine_connection.py  one HTTP/1.1 connection, from a request to the end of its answer
dns_cache.py          the addresses for engines' host names, cached for a moment
engine_answer.py      one request to an engine: its answer from the first byte on, or the reason why there is none
small_request.py      the small but real request that probes a doubtful engine
peer_timeouts.py      time limits that don't blame an engine for a busy router
status_verdict.py     what an HTTP status says about the request and the engine
model_lists.py        the models and adapters that each engine lists
"""
