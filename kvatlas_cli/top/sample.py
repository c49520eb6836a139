"""Reads the data of `kvatlas top`: the store's records of workers, indexers and routers, and the workers' heartbeats."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvatlas.blocks.digest import WORDS, Digest
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.subjects import partition_of
from kvatlas.fleet.records import Diagnosis, FleetRecord, Heartbeat
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.protocol import WorkerRecord
from kvatlas.index.redis.index import RedisIndex
from kvatlas.predictions.accuracy import AnswerReport
from kvatlas.predictions.store import read_answer_reports
from kvatlas.store.clock import store_time_us
from kvatlas.store.connection import Store
from kvatlas_cli.doctor.indexers import read_indexers

READS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One worker. `blocks=None`: it has no active holder in the index. `behind`: messages in the stream that the index
    has not applied; None: unknown, or of another incarnation. `owner`: the indexer that follows it; empty without
    one."""

    record: FleetRecord
    blocks: Mapping[Tier, int] | None
    behind: int | None
    diagnoses: Sequence[Diagnosis]
    partition: int
    owner: str

    @property
    def held(self) -> int | None:
        return None if self.blocks is None else sum(self.blocks.values())


@dataclass(frozen=True, slots=True)
class RouterSample:
    """One router's answers in one pool since it started. `prompt_tokens`: of the answers that report cached tokens."""

    router_id: str
    model_id: str
    answers: int
    compared: int
    as_predicted: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class FleetSample:
    """The fleet at one time; `now_us`: since 1970. `owned`: number of partitions with an owner."""

    now_us: int
    workers: Mapping[str, WorkerSample] = field(default_factory=dict)
    members: Sequence[str] = ()
    partitions: int = 0
    owned: int = 0
    routers: Sequence[RouterSample] = ()


class FleetSampler:
    """Call `read` now and then. `heard`: the last heartbeats, updated in the meantime; empty without NATS."""

    def __init__(self, store: Store, index: RedisIndex, heard: Mapping[str, Heartbeat]) -> None:
        self._store = store
        self._index = index
        self._heard = heard
        self._fleet = FleetStore(store)

    async def read(self) -> FleetSample:
        """Read the fleet. Raises Unreachable."""
        store_us = await store_time_us(self._store)
        members, leases = await read_indexers(self._store, store_us, self._index.layout.number)
        records = await self._fleet.all()
        shards: Sequence[Sequence[WorkerRecord]] = [
            await self._index.records(shard) for shard in range(self._index.shards)
        ]
        of_index = {one.worker_id: one for shard in shards for one in shard}
        blocks = await self._read_blocks(list(records))
        workers: dict[str, WorkerSample] = {}
        for worker_id, record in records.items():
            partition = partition_of(worker_id, self._index.partitions)
            heard = self._heard.get(worker_id)
            workers[worker_id] = WorkerSample(
                record,
                blocks[worker_id],
                _count_behind(heard, of_index.get(worker_id)),
                heard.diagnoses if heard is not None else (),
                partition,
                leases.get(partition, ""),
            )
        models = {record.endpoint.pool_id: record.endpoint.model_id for record in records.values()}
        routers = [
            one for pool_id, model_id in models.items() for one in await self._routers(pool_id, model_id, store_us)
        ]
        now_us = time.time_ns() // 1_000
        return FleetSample(now_us, workers, members, self._index.partitions, len(leases), routers)

    async def _read_blocks(self, worker_ids: Sequence[str]) -> dict[str, Mapping[Tier, int] | None]:
        found: dict[str, Mapping[Tier, int] | None] = {}
        for first in range(0, len(worker_ids), READS_AT_ONCE):
            some = worker_ids[first : first + READS_AT_ONCE]
            for worker_id, words in zip(some, await asyncio.gather(*map(self._index.digest, some)), strict=True):
                if words is None:
                    found[worker_id] = None
                    continue
                digest = Digest(list(words[:WORDS]))
                found[worker_id] = {tier: count for tier in Tier if (count := digest.count(tier))}
        return found

    async def _routers(self, pool_id: str, model_id: str, store_us: int) -> list[RouterSample]:
        reports = await read_answer_reports(self._store, pool_id, store_us)
        return [_router_of(router_id, model_id, report) for router_id, report in sorted(reports.items())]


def _count_behind(heard: Heartbeat | None, record: WorkerRecord | None) -> int | None:
    if heard is None or record is None or heard.incarnation != record.incarnation:
        return None
    return max(0, heard.acked_seq - record.seq)


def _router_of(router_id: str, model_id: str, report: AnswerReport) -> RouterSample:
    counts = report.counts
    compared = counts.cached_equal + sum(counts.by_deviation.values())
    answers = counts.prompts_equal + counts.prompts_differ
    return RouterSample(
        router_id, model_id, answers, compared, counts.cached_equal, report.prompt_tokens, counts.cached_tokens
    )
