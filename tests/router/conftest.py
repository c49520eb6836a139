"""The servers are tested on the same store, indexes and spans as the library that they build on."""

from tests.router_client.conftest import index, indexes, spans, store

__all__ = ["index", "indexes", "spans", "store"]
