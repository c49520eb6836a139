"""The router's interface is tested on the same store as the library that it builds on."""

from tests.router_client.conftest import store

__all__ = ["store"]
