"""The router's interface is tested on the same store as the library that it stands on."""

from tests.router_client.conftest import indexes, store

__all__ = ["indexes", "store"]
