"""The fleet that a store and an event stream belong to. When components of two fleets meet, they must not take over each
other's workers.

    kva:{fleet}:identity   HASH  fleet -> id; store -> a random name of this store

The first indexer to start creates the id and writes it into the store and into the event stream's metadata. Indexers report
their identity on `kvatlas.fleet.<id>`. In this way, an indexer with an empty store learns whether the fleet of its NATS is
alive with a different store or has lost this one, and a publisher that was configured with its fleet's id learns whose NATS it
uses.
"""

from secrets import token_hex

from kvatlas.fleet.fleet_identity import FleetIdentity
from kvatlas.store.connection import Store

IDENTITY = "kva:{fleet}:identity"


async def read_store_identity(store: Store) -> FleetIdentity | None:
    """The store's identity; None if no fleet has it. Raises Unreachable."""
    found = {key.decode(): value.decode() for key, value in (await store.ask(store.client.hgetall(IDENTITY))).items()}
    if "fleet" not in found or "store" not in found:
        return None
    return FleetIdentity(fleet=found["fleet"], store=found["store"], store_name=store.name)


async def write_store_identity(store: Store, fleet_id: str) -> FleetIdentity:
    """Give the store to this fleet unless another fleet has it. Returns the owner's identity. Raises Unreachable."""
    await store.ask(store.client.hsetnx(IDENTITY, "store", token_hex(6)))
    await store.ask(store.client.hsetnx(IDENTITY, "fleet", fleet_id))
    found = await read_store_identity(store)
    return found or FleetIdentity(fleet=fleet_id, store="", store_name=store.name)
