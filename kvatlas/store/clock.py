"""The store's own clock, which all processes of a fleet share."""

from kvatlas.store.connection import Store


async def store_time_us(store: Store) -> int:
    """The store's time, in microseconds since 1970. Raises Unreachable."""
    seconds, microseconds = await store.ask_any("TIME")
    return int(seconds) * 1_000_000 + int(microseconds)
