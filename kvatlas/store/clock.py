"""The store's own clock, which all processes of a fleet share."""

from kvatlas.store.connection import Store


async def store_time_us(store: Store) -> int:
    """The store's time in microseconds since 1970. Raises Unreachable."""
    where = {"target_nodes": store.client.get_primaries()[0]} if store.is_cluster else {}
    seconds, microseconds = await store.ask(store.client.execute_command("TIME", **where))
    return int(seconds) * 1_000_000 + int(microseconds)
