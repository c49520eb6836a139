"""The engine's side of a request that is sent to it (extra `router`).

engine_addresses.py  where engines may be, and who of them gets credentials
engine_client.py     the HTTP client of all calls to engines
engine_answer.py     a request to an engine: its answer from the first byte on, or why there is none
patience.py          time limits that a busy router does not miss for an engine
status.py            what a status says about the request and about the engine
model_lists.py       the models and adapters that each engine lists
"""
