"""One worker's publisher without sockets, connected directly to an index."""

from kvatlas.bus import wire
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.bus.subjects import partition_of
from kvatlas.fleet.records import EngineState, FleetRecord, Liveness
from kvatlas.identity import shard_of
from kvatlas.index.protocol import ResidencyIndex
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.engines import decode_batch
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.settings import PublisherSettings
from kvatlas_publishers.stream.changelog import Changelog, IncarnationReason
from router_client import Prompt, RouterClient
from tests.router_client.pools import CountingFleet


class SocketlessWorker:
    """A worker whose messages are applied to the index at once."""

    def __init__(self, settings: PublisherSettings, index: ResidencyIndex) -> None:
        self.settings = settings
        self.ledger = Ledger(settings.ledger)
        self.changelog = Changelog(settings.worker_id, self.ledger, PublisherCounters())
        self.changelog.require_incarnation(IncarnationReason.START)
        self.index = index
        self._now_us = 0

    @property
    def record(self) -> FleetRecord:
        endpoint = self.settings.endpoint(self.ledger.block_size, self.ledger.sizes, self.ledger.reuse)
        return FleetRecord(endpoint=endpoint, state=EngineState.UP, liveness=Liveness.ALIVE)

    async def take(self, payload: bytes) -> None:
        self.changelog.record(decode_batch(self.settings.engine, payload))
        self._now_us += 1_000_000
        self.changelog.publish(self.changelog.fold(), self._now_us, 0.0)
        await self.send()

    async def send(self) -> None:
        if self.changelog.incarnation_due is not None:
            self.changelog.begin_incarnation(self.changelog.next_incarnation(self._now_us), self._now_us)
        messages = []
        while (sent := self.changelog.outbox.take()) is not None:
            messages.append(wire.decode_raw(sent.payload))
            self.changelog.outbox.acknowledge(sent.round, sent.seq, sent.seq + 1)
        if messages:
            partition = partition_of(self.settings.worker_id, self.index.partitions)
            shard = shard_of(partition, self.index.shards)
            result = await self.index.apply(shard, [PartitionBatch(partition, messages)])
            assert (result.applied, result.failed_checks) == (len(messages), 0)

    async def check(self) -> None:
        """Check that the index has what the ledger has published."""
        self.changelog.checkpoint(self._now_us)
        await self.send()
        [record] = await self.index.records(0)
        assert not record.bad
        assert await self.index.digest(self.settings.worker_id) == self.ledger.digest_words

    async def usable_tokens(self, prompt: Prompt) -> int:
        """The number of the prompt's tokens that this worker's engine would reuse, as a router finds it."""
        if not self.ledger.block_size:
            return 0
        async with RouterClient(self.index, CountingFleet({self.settings.worker_id: self.record})) as router:
            found = (await router.overlap(prompt)).of(self.settings.worker_id)
        return found.usable_tokens if found is not None else 0
