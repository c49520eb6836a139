"""Which fleet a store and an event stream are of: parts of two fleets that meet must not take each other's workers.

    kva:{fleet}:identity   HASH  fleet -> id; store -> a random name of this store

The id is made at the first start of an indexer, and written into the store, and into the metadata of the event stream. The
indexers answer on `kvatlas.fleet.<id>` who they are, so that one that comes with an empty store learns if the fleet of its NATS
is alive and keeps another store, or has lost this one; and a publisher that was given its fleet's id learns whose NATS it uses.
"""

from secrets import token_hex

from kvatlas.fleet.fleet_identity import FleetIdentity
from kvatlas.store.connection import Store

IDENTITY = "kva:{fleet}:identity"


async def read_store_identity(store: Store) -> FleetIdentity | None:
    """None in a store that no fleet has. Raises Unreachable."""
    found = {key.decode(): value.decode() for key, value in (await store.ask(store.client.hgetall(IDENTITY))).items()}
    if "fleet" not in found or "store" not in found:
        return None
    return FleetIdentity(fleet=found["fleet"], store=found["store"], store_name=store.name)


async def write_store_identity(store: Store, fleet_id: str) -> FleetIdentity:
    """Give the store to this fleet, unless another has it: then the one that has it. Raises Unreachable."""
    await store.ask(store.client.hsetnx(IDENTITY, "store", token_hex(6)))
    await store.ask(store.client.hsetnx(IDENTITY, "fleet", fleet_id))
    found = await read_store_identity(store)
    return found or FleetIdentity(fleet=fleet_id, store="", store_name=store.name)
