"""The effect on the data of a failover to a replica that is behind."""

from kvatlas.store.connection import Store


async def dump_all(store: Store) -> dict[bytes, bytes]:
    return {key: await store.client.dump(key) for key in await store.client.keys("*")}


async def restore(store: Store, dump: dict[bytes, bytes]) -> None:
    """Replace everything in the store except its functions by the dump."""
    await store.client.flushall()
    for key, value in dump.items():
        await store.client.restore(key, 0, value)
