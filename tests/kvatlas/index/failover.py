"""What a failover to a replica that is behind does to the data."""

from kvatlas.store.connection import Store


async def dumped(store: Store) -> dict[bytes, bytes]:
    return {key: await store.client.dump(key) for key in await store.client.keys("*")}


async def restore(store: Store, dump: dict[bytes, bytes]) -> None:
    """This is all that the store has afterwards, besides its functions."""
    await store.client.flushall()
    for key, value in dump.items():
        await store.client.restore(key, 0, value)
