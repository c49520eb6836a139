"""An indexer with an honest worker in its index, on servers with the users of `kvatlas auth`, or with none."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import time_ns

from kvatlas.bus.access import NatsAccess
from kvatlas.bus.connection import connect_nats
from kvatlas.embedded.nats import NatsProcess
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.fleet.records import FleetRecord
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import open_store
from kvatlas_indexer.indexer_process import Replica
from tests.eventually import until
from tests.indexer.bus_publisher import BusPublisher, has_applied_all, indexed, published
from tests.indexer.running_replica import running_replica
from tests.kvatlas_cli.auth.guarded_servers import guarded_servers

PUBLISHERS = """
[publishers.honest]
workers = ["victim"]

[publishers.rogue]
workers = ["rogue"]
"""


@dataclass(frozen=True, slots=True)
class AttackedServers:
    """Both servers. `folder`: where `kvatlas auth` wrote its files; None: they have no users. The store's own user may do
    everything."""

    nats: NatsProcess
    store: ValkeyProcess
    folder: Path | None

    def nats_url(self, user: str) -> str:
        return self.nats.url if self.folder is None else (self.folder / f"{user}.nats-url").read_text().strip()

    def store_url(self, user: str) -> str:
        return self.store.url if self.folder is None else (self.folder / f"{user}.redis-url").read_text().strip()


@contextmanager
def attacked_servers(folder: Path, *, users: bool) -> Iterator[AttackedServers]:
    if users:
        with guarded_servers(folder, PUBLISHERS) as servers:
            yield AttackedServers(servers.nats, servers.store, servers.folder)
    else:
        with NatsProcess() as nats, ValkeyProcess() as store:
            yield AttackedServers(nats, store, None)


@dataclass(frozen=True, slots=True)
class AttackedFleet:
    servers: AttackedServers
    replica: Replica
    victim: BusPublisher

    async def check(self) -> None:
        """Check that the honest worker's blocks and record are as it published them, and that what it publishes now is
        applied."""
        await self.victim.store_more()
        await self.victim.beat()
        store = await open_store(self.servers.store_url("indexer"), wait=False)
        try:
            index = await open_redis_index(store, writer=False)

            async def is_applied() -> bool:
                return await has_applied_all(index, self.victim)

            await until(is_applied, what="the victim's messages are applied")
            assert await indexed(index, self.victim) == published(self.victim)
            assert (await self._records(store)).keys() == {"victim"}
        finally:
            await store.close()

    async def _records(self, store: object) -> dict[str, FleetRecord]:
        found = await FleetStore(store).all()  # type: ignore[arg-type]
        return {worker: record for worker, record in found.items() if worker != "rogue"}


@asynccontextmanager
async def attacked_fleet(servers: AttackedServers, **settings: object) -> AsyncIterator[AttackedFleet]:
    """`settings`: of the indexer."""
    more = settings if servers.folder is None else {**settings, "identities": servers.folder / "identities.json"}
    honest = await connect_nats(NatsAccess(servers.nats_url("honest")), name="test", wait=False)
    try:
        async with running_replica(servers.nats_url("indexer"), servers.store_url("indexer"), **more) as replica:
            victim = BusPublisher(honest, "victim", time_ns())
            await victim.start()
            fleet = AttackedFleet(servers, replica, victim)
            await victim.beat()

            async def has_record() -> bool:
                store = await open_store(servers.store_url("indexer"), wait=False)
                try:
                    return "victim" in await fleet._records(store)
                finally:
                    await store.close()

            await until(has_record, what="the victim's record")
            await fleet.check()
            yield fleet
    finally:
        await honest.close()
