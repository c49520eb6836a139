"""The fleet records on which a router bases its decisions. They are read with a fleet reader and kept for a short
time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

from kvatlas.blocks.reuse import ReuseRules
from kvatlas.cost import CostProfile, EngineProfile
from kvatlas.fleet.records import EngineState, FleetRecord, Liveness
from kvatlas.store.deadline import READ_SHARE, STORE_FAILURES, Deadline
from kvatlas.telemetry import step_span
from router_client.learning.bound_shares import BoundShares
from router_client.pricing.pool import FetchKnowledge, Pool

MAX_AGE_MS = 200.0
EMPTY_GRACE_S = 60.0
LISTED_S = 1.0
"""Minimum interval between reads of the whole fleet for requests for a model without workers."""
BEHIND_S = 3.0
"""Maximum age of the pool if the store is far away, in which case it is read in the background."""


class FleetReader(Protocol):
    """Reads a pool's workers; `kvatlas.fleet_store.fleet_store.FleetStore` is one."""

    async def pool(self, pool_id: str) -> Mapping[str, FleetRecord]:
        """Every worker of a pool by id, including those that currently get no requests. Raises Unreachable."""

    async def all(self) -> Mapping[str, FleetRecord]:
        """Every worker of every pool by id, including those that currently get no requests. Raises Unreachable."""


class StaticFleet:
    """Fixed records, for an index in this process and for tests. `records` may be changed at any time."""

    def __init__(self, records: Mapping[str, FleetRecord]) -> None:
        self.records = dict(records)

    async def pool(self, pool_id: str) -> Mapping[str, FleetRecord]:
        """See `FleetReader`."""
        return {id: record for id, record in self.records.items() if record.endpoint.pool_id == pool_id}

    async def all(self) -> Mapping[str, FleetRecord]:
        """See `FleetReader`."""
        return self.records


def presume_alive(records: Mapping[str, FleetRecord]) -> Mapping[str, FleetRecord]:
    """The records, except that a pool's lost workers count as alive if none of its workers can get requests. Their engines
    were up when last heard from, and if all of them fall silent at the same time, it is NATS or the publishers that have
    failed, not the engines."""
    silent = {id: one for id, one in records.items() if one.liveness is Liveness.LOST and one.state is EngineState.UP}
    if silent:
        served = {record.endpoint.pool_id for record in records.values() if record.routable}
        silent = {id: record for id, record in silent.items() if record.endpoint.pool_id not in served}
    if not silent:
        return records
    return {**records, **{id: one.model_copy(update={"liveness": Liveness.ALIVE}) for id, one in silent.items()}}


class LastKnownRecords:
    """The fleet records that were read last, as `presume_alive` returns them. A pool that is missing from what is read
    keeps its records for EMPTY_GRACE_S from the first read without it, because a store that has come back without its data
    lacks them until the indexers have written again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.records: Mapping[str, FleetRecord] = {}
        self._clock = clock
        self._missing_since: dict[str, float] = {}

    def update(self, read: Mapping[str, FleetRecord]) -> Mapping[str, FleetRecord]:
        """The records to use now, after this read."""
        now = self._clock()
        pools = {record.endpoint.pool_id for record in read.values()}
        missing = {record.endpoint.pool_id for record in self.records.values()} - pools
        self._missing_since = {id: self._missing_since.get(id, now) for id in missing}
        kept = {id for id, since in self._missing_since.items() if now - since <= EMPTY_GRACE_S}
        known = {id: record for id, record in self.records.items() if record.endpoint.pool_id in kept}
        self.records = presume_alive({**known, **read} if known else read)
        return self.records


class FleetCache:
    """Keeps a pool for `max_age_ms`: records change once a second, and unpacking hundreds of them takes milliseconds.

    Callers that find an expired copy share one read, which continues even if they stop waiting for it.
    """

    def __init__(
        self,
        reader: FleetReader,
        max_age_ms: float = MAX_AGE_MS,
        rules: BoundShares | None = None,
        clock: Callable[[], float] = time.monotonic,
        profile: Callable[[str], Awaitable[CostProfile]] | None = None,
        fetches: FetchKnowledge | None = None,
    ) -> None:
        """`profile`: returns the prices of a pool's workers; called while the records are being read. `fetches`: see
        `Pool`."""
        self._reader = reader
        self._rules = rules or BoundShares(ReuseRules())
        self._made_with: dict[str, int] = {}
        self._max_age_s = max_age_ms / 1_000
        self._clock = clock
        self._fetches = fetches
        self._profile = profile or _default_profile
        self._kept: dict[str, tuple[float, Pool]] = {}
        self._reads: dict[str, asyncio.Task[Pool]] = {}
        self._last: dict[str, LastKnownRecords] = {}
        self._models: list[tuple[str, str]] = []
        self._listed_at = float("-inf")

    async def read_pool(self, pool_id: str) -> Pool:
        """The pool, at most `max_age_ms` old. Raises Unreachable."""
        fresh = self._fresh(pool_id)
        return fresh if fresh is not None else await asyncio.shield(self._start_read(pool_id))

    def read_behind(self, pool_id: str) -> Pool | None:
        """The pool, without waiting. If it is older than `max_age_ms`, it is refreshed in the background. None if it is older
        than BEHIND_S."""
        kept = self._kept.get(pool_id)
        age_s = self._clock() - kept[0] if kept is not None else float("inf")
        if age_s >= self._max_age_s:
            self._start_read(pool_id)
        return kept[1] if kept is not None and age_s < BEHIND_S else None

    async def read_again(self, pool_id: str) -> Pool:
        """The pool, read now. Raises Unreachable."""
        kept = self._kept.get(pool_id)
        if kept is not None:
            self._kept[pool_id] = (float("-inf"), kept[1])
        return await self.read_pool(pool_id)

    async def read_pool_in_time(self, pool_id: str, deadline: Deadline, *, call_store: bool) -> tuple[Pool, str]:
        """The pool, read within READ_SHARE of the deadline, and ''. If that fails, the pool that was read last, and the
        reason. If `call_store` is False, the pool that was read last.

        Waits for a pool that has never been read, because nothing can be decided without it; raises Unreachable if that
        fails.
        """
        if (fresh := self._fresh(pool_id)) is not None:
            return fresh, ""
        known = self.last_known(pool_id)
        if known is None:
            return await self.read_pool(pool_id), ""
        if not call_store:
            return known, ""
        try:
            return await deadline.wait_for(self.read_pool(pool_id), READ_SHARE), ""
        except STORE_FAILURES as error:
            return self.last_known(pool_id) or known, f"fleet: {deadline.describe(error)}"

    def last_known(self, pool_id: str) -> Pool | None:
        """The pool that was read last, however old it is; None if it has never been read."""
        kept = self._kept.get(pool_id)
        return kept[1] if kept is not None else None

    def known_pools(self) -> Collection[str]:
        """Pools in which workers have ever been found."""
        return list(self._kept)

    async def models(self) -> Sequence[tuple[str, str]]:
        """The models that have workers, and their tokenizers, listed at most once every LISTED_S. Raises
        Unreachable."""
        if self._clock() - self._listed_at >= LISTED_S:
            self._listed_at = self._clock()
            endpoints = [record.endpoint for record in (await self._reader.all()).values()]
            self._models = sorted({(endpoint.model_id, endpoint.tokenizer_id) for endpoint in endpoints})
        return self._models

    async def close(self) -> None:
        """Stop reading."""
        reads = list(self._reads.values())
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    def _fresh(self, pool_id: str) -> Pool | None:
        """The pool, unless it was read too long ago."""
        kept = self._kept.get(pool_id)
        return kept[1] if kept is not None and self._clock() - kept[0] < self._max_age_s else None

    def _start_read(self, pool_id: str) -> "asyncio.Task[Pool]":
        """Start a read unless one is already running."""
        read = self._reads.get(pool_id)
        if read is None:
            read = self._reads[pool_id] = asyncio.create_task(self._read(pool_id), name="kvatlas fleet records")
            read.add_done_callback(lambda done: self._discard(pool_id, done))
        return read

    async def _read(self, pool_id: str) -> Pool:
        with step_span("read pool"):
            return await self._read_store(pool_id)

    async def _read_store(self, pool_id: str) -> Pool:
        began = self._clock()
        read = await self._reader.pool(pool_id)
        if not read and pool_id not in self._last:
            return Pool.of({}, self._rules)  # nothing is kept or learned for a pool that does not exist
        records = self._last.setdefault(pool_id, LastKnownRecords(self._clock)).update(read)
        profile = await self._profile(pool_id)
        known, version, pool = self.last_known(pool_id), self._rules.version, None
        if known is not None and known.profile is profile and self._made_with.get(pool_id) == version:
            pool = known.read_again(records)
        if pool is None:
            pool = Pool.of(records, self._rules, profile, self._fetches)
            self._made_with[pool_id] = version
        self._kept[pool_id] = (began, pool)
        return pool

    def _discard(self, pool_id: str, read: asyncio.Task[Pool]) -> None:
        del self._reads[pool_id]
        if not read.cancelled():
            read.exception()  # retrieve the error; otherwise asyncio logs that it was never retrieved


async def _default_profile(pool_id: str) -> CostProfile:
    return EngineProfile()
