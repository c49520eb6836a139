"""Reservations in the store: all routers of a pool book in the same place, with one call each."""

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, compress
from math import isfinite
from typing import Any, NamedTuple, Protocol

import msgpack
from redis.exceptions import ResponseError

from kvatlas.cost.protocol import Load
from kvatlas.cost.regression import ERRORS, FORM, Evidence
from kvatlas.errors import DATA_ERRORS
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.reservations.lookup import IndexUnreadable, LookupImpossible
from kvatlas.reservations.memory import CALLED_OFF_US
from kvatlas.reservations.packed_ask import flat_rows, pack, pack_ask, pack_lookup, waiting_row
from kvatlas.reservations.packed_evaluation import unpack_evaluation
from kvatlas.reservations.protocol import ARRIVAL_US, Ask, Booking, BookingEnd, Evaluation, Outcome, WorkerReport
from kvatlas.reservations.redis_calls import call_pool, call_pool_ro
from kvatlas.reservations.waiting_request import Turns, WaitingRequest
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.store.connection import Store

WORKERS_A_CALL = 24
ENDS_A_CALL = 32
"""Limits per call on how many workers are reported (or given evidence) and how many bookings are ended, so that other calls
wait for only a millisecond or two."""
IDS_A_CALL = 500
MOST_SLICES = 10_000
WAITING_A_CALL, LEFT_A_CALL = 8, 16
"""Limits on how many waiting requests one call adds, and removes."""
_INDEX = "INDEX "
_TOO_LARGE = ("ask of ", "arguments of ")
_DAMAGED = "DAMAGED "
"""The error of a read-only function that has found a record which it can't use."""

log = logging.getLogger("kvatlas.reservations")


class IndexPlace(Protocol):
    """The index in a store; `kvatlas.index.redis` has two implementations."""

    @property
    def shard_keys(self) -> Sequence[ShardKeys]:
        """The keys of each shard of the layout that currently answers."""


class PoolDamage(NamedTuple):
    """How often a pool has been repaired since its last report, and what was damaged the last time."""

    times: int
    what: str


class RedisReservations:
    """See `Reservations`. Loads the pool's functions if the store does not have them. `index`: the index in the same store, for
    asks with a lookup."""

    fed_by_indexer = True

    def __init__(self, store: Store, index: IndexPlace | None = None) -> None:
        self._store = store
        self._index = index
        self._log = RateLimitedLog(log)
        self._odd: tuple[Mapping[str, int], bytes] = {}, pack([])
        """The odd workers of the last ask, and their packed form, since they are the same for all prompts."""

    @property
    def look_up(self) -> bool:
        """True if everything that a call reads is on one server, and the index has one shard."""
        return self._index is not None and not self._store.is_cluster and len(self._index.shard_keys) == 1

    async def evaluate(self, pool_id: str, ask: Ask) -> Evaluation:
        args = [self._pack_ask(ask)]
        try:
            answer = await call_pool_ro(self._store, "look", pool_id, args)
        except ResponseError as error:
            _check_lookup(ask, error)
            if not str(error).startswith(_DAMAGED):
                raise
            await call_pool(self._store, "mend", pool_id, [str(error).removeprefix(_DAMAGED).partition(" script:")[0]])
            answer = await call_pool_ro(self._store, "look", pool_id, args)
        evaluation = unpack_evaluation(ask, answer)
        assert evaluation is not None
        return evaluation

    async def book(self, pool_id: str, booking: Booking) -> Evaluation | None:
        args = [
            booking.id,
            booking.router_id,
            booking.lease_us,
            booking.longest_us,
            booking.input_tokens,
            self._pack_ask(booking.ask),
            booking.prefill_id or b"",
            *(() if booking.waiting is None else (pack(waiting_row(booking.waiting)),)),
        ]
        try:
            answer = await call_pool(self._store, "book", pool_id, args)
        except ResponseError as error:
            _check_lookup(booking.ask, error)
            raise
        return unpack_evaluation(booking.ask, answer)

    async def turns(
        self, pool_id: str, router_id: str, left: Collection[bytes], waiting: Sequence[WaitingRequest]
    ) -> Turns:
        gone, rows = list(left), [waiting_row(one) for one in waiting]
        refused: set[bytes] = set()
        while True:
            last = len(gone) <= LEFT_A_CALL and len(rows) <= WAITING_A_CALL
            args = [router_id, b"".join(gone[:LEFT_A_CALL]), pack(rows[:WAITING_A_CALL]), int(last)]
            packed = await call_pool(self._store, "queue", pool_id, args)
            own, requests, tokens, refused_ids, near, ahead, flat = msgpack.unpackb(packed, raw=True)
            refused.update(refused_ids)
            del gone[:LEFT_A_CALL], rows[:WAITING_A_CALL]
            if not gone and not rows:
                break
        workers = [frozenset(msgpack.unpackb(lane) if lane else ()) for lane in ahead]
        turns = {
            id: frozenset[str]().union(*(lane for number, lane in enumerate(workers[:passed], 1) if number != own_lane))
            for id, passed, own_lane in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        }
        return Turns(own, requests, tokens, frozenset(refused), turns, bool(near))

    def _pack_ask(self, ask: Ask) -> bytes:
        if ask.lookup is None:
            return pack_ask(ask, pack(0))
        assert self._index is not None
        shards = self._index.shard_keys
        if len(shards) != 1:  # this has changed since `look_up` was read
            raise LookupImpossible(f"the index has {len(shards)} shards; expected 1")
        odd = ask.lookup.odd
        if self._odd[0] is not odd:
            self._odd = odd, pack(flat_rows(odd))
        return pack_ask(ask, pack_lookup(ask.lookup, shards[0], self._odd[1]))

    async def record_first_token(self, pool_id: str, id: bytes) -> bool:
        return (await self._end(pool_id, [BookingEnd(id, None)]))[0]

    async def release(self, pool_id: str, id: bytes, outcome: Outcome, output_tokens: int | None = None) -> bool:
        return (await self._end(pool_id, [BookingEnd(id, outcome, output_tokens)]))[0]

    async def record_ends(self, pool_id: str, ends: Sequence[BookingEnd]) -> None:
        for first in range(0, len(ends), ENDS_A_CALL):
            await self._end(pool_id, ends[first : first + ENDS_A_CALL])

    async def find_booked(self, pool_id: str, ids: Sequence[bytes]) -> set[bytes]:
        found: set[bytes] = set()
        for first in range(0, len(ids), IDS_A_CALL):
            some = ids[first : first + IDS_A_CALL]
            found.update(compress(some, await call_pool_ro(self._store, "booked", pool_id, some)))
        return found

    async def renew_lease(self, pool_id: str, router_id: str, lease_us: int) -> bool:
        return bool(await call_pool(self._store, "beat", pool_id, [router_id, lease_us]))

    async def end_lease(self, pool_id: str, router_id: str) -> None:
        for _ in range(MOST_SLICES):
            if not await call_pool(self._store, "leave", pool_id, [router_id]):
                return

    async def _end(self, pool_id: str, ends: Sequence[BookingEnd]) -> list[bool]:
        flat = chain.from_iterable(
            (id, "" if outcome is None else outcome.value, "" if tokens is None else tokens)
            for id, outcome, tokens in ends
        )
        return list(map(bool, await call_pool(self._store, "ends", pool_id, [CALLED_OFF_US, *flat])))

    async def report(self, pool_id: str, reports: Mapping[str, WorkerReport]) -> None:
        await write_reports(self._store, pool_id, {worker_id: (b"", report) for worker_id, report in reports.items()})

    async def forget(self, pool_id: str, worker_id: str) -> None:
        await call_pool(self._store, "forget", pool_id, [worker_id])

    async def add_evidence(self, pool_id: str, evidence: Mapping[str, Evidence]) -> None:
        rows = [(id, one.requests, one.keep, one.errors_keep, one.sums) for id, one in evidence.items()]
        for first in range(0, len(rows), WORKERS_A_CALL):
            args = [pack((FORM, *rows[first : first + WORKERS_A_CALL])), ERRORS]
            await call_pool(self._store, "learn", pool_id, args)

    async def read_evidence(self, pool_id: str) -> Mapping[str, Evidence]:
        flat = await call_pool_ro(self._store, "learned", pool_id, [])
        found = {}
        for worker_id, packed in zip(flat[::2], flat[1::2], strict=True):
            try:
                form, requests, sums = msgpack.unpackb(packed)
                if form == FORM:  # evidence of a different version has no meaning here
                    sums = tuple(map(float, sums))
                    if not all(map(isfinite, (requests, *sums))):
                        raise ValueError("a number is not finite")
                    found[worker_id.decode()] = Evidence(requests, sums=sums)
            except DATA_ERRORS as error:  # the next evidence replaces it
                name = worker_id.decode(errors="backslashreplace")
                self._log.report(name, f"worker {name:.64}: its learned rates in the store can't be read: {error}")
        return found


async def write_reports(
    store: Store, pool_id: str, reports: Mapping[str, tuple[bytes, WorkerReport]]
) -> PoolDamage | None:
    """Report workers, each with its packed fleet record; an empty one leaves the stored record as it is. Returns the damage if
    the pool was repaired. Raises Unreachable."""
    rows = [_report_row(worker_id, record, report) for worker_id, (record, report) in reports.items()]
    damage = None
    for first in range(0, len(rows), WORKERS_A_CALL):
        found = await call_pool(store, "report", pool_id, [pack(rows[first : first + WORKERS_A_CALL])])
        if found:
            times, what = found
            damage = PoolDamage(int(times) + (damage.times if damage else 0), what.decode(errors="backslashreplace"))
    return damage


def _report_row(worker_id: str, record: bytes, report: WorkerReport) -> tuple[Any, ...]:
    """A worker's report in the form that `functions/report.lua` reads."""
    sample, incarnation = report.sample, str(report.incarnation)
    known, age_us, covered_age_us, load, waiting = 0, 0, -1, Load(), 0
    if sample is not None:
        known, age_us, load, waiting = 1, sample.age_us, sample.load, sample.waiting
        covered_age_us = sample.age_us + ARRIVAL_US if sample.covers else -1
    return (
        worker_id,
        record,
        incarnation,
        known,
        age_us,
        covered_age_us,
        load.queued_prefill_tokens,
        load.running_decodes,
        load.waiting_requests,
        load.kv_tokens,
        report.likeness,
        report.limit.slots,
        report.limit.kv_tokens,
        waiting,
    )


def _check_lookup(ask: Ask, error: ResponseError) -> None:
    """Raises IndexUnreadable if an ask's lookup failed, or LookupImpossible if it made the ask too large."""
    if str(error).startswith(_INDEX):
        raise IndexUnreadable(str(error)) from error
    if ask.lookup is not None and str(error).removeprefix("ERR ").startswith(_TOO_LARGE):
        raise LookupImpossible(str(error)) from error
