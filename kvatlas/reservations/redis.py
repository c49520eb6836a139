"""Reservations in the store: every router of a pool books in the same place, in one call each."""

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, compress
from math import isfinite
from struct import Struct
from typing import Any, NamedTuple, Protocol, overload

import msgpack
from redis.exceptions import ResponseError

from kvatlas.cost.protocol import Load
from kvatlas.cost.regression import ERRORS, FORM, Evidence
from kvatlas.errors import DATA_ERRORS
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.reservations.evaluation import UsablePrediction, WorkerLoad, evaluate_offer, offer_holding
from kvatlas.reservations.lookup import IndexUnreadable, Lookup, LookupImpossible, NotInHbm, TooManyAlike
from kvatlas.reservations.memory import CALLED_OFF_US
from kvatlas.reservations.protocol import (
    ARRIVAL_US,
    STALE_US,
    Ask,
    Booking,
    BookingEnd,
    Evaluation,
    LookAlikes,
    LookAlikesUnknown,
    Offer,
    OfferEvaluation,
    OfferKind,
    Outcome,
    WorkerReport,
)
from kvatlas.reservations.redis_calls import call_pool, call_pool_ro
from kvatlas.reservations.room_and_slo import UNKNOWN_LIMIT, Limit, Limits
from kvatlas.reservations.waiting_request import (
    MustWait,
    Place,
    QueueIsFull,
    Turns,
    WaitingRequest,
    WaitReason,
    digest,
)
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.store.connection import Store

_WORKER = Struct(">12d")
"""The start of a worker's record, see `functions/_layout.lua`."""

WORKERS_A_CALL = 24
ENDS_A_CALL = 32
"""Limits of workers reported (or given evidence) and of bookings ended per call, so other calls wait only a millisecond or
two."""
IDS_A_CALL = 500
MOST_SLICES = 10_000
_NOT_IN_HBM, _TOO_MANY, _MUST_WAIT, _QUEUE_IS_FULL = -2, -3, -4, -5
_WAIT_REASONS = {1: WaitReason.FULL, 2: WaitReason.TURN}
WAITING_A_CALL, LEFT_A_CALL = 8, 16
"""Limits of waiting requests that one call adds, and removes."""
_INDEX = "INDEX "
_TOO_LARGE = ("ask of ", "arguments of ")
_DAMAGED = "DAMAGED "
"""Error of a read-only function that found a record it can't use."""

log = logging.getLogger("kvatlas.reservations")


class IndexPlace(Protocol):
    """The index of a store; `kvatlas.index.redis` has two."""

    @property
    def shard_keys(self) -> Sequence[ShardKeys]:
        """The keys of each shard of the layout that answers now."""


class PoolDamage(NamedTuple):
    """Number of repairs of a pool since its last report, and what was damaged the last time."""

    times: int
    what: str


class RedisReservations:
    """See `Reservations`. Loads the pool's functions if the store does not have them. `index`: the one in the same store, for
    asks with a lookup."""

    fed_by_indexer = True

    def __init__(self, store: Store, index: IndexPlace | None = None) -> None:
        self._store = store
        self._index = index
        self._log = RateLimitedLog(log)
        self._odd: tuple[Mapping[str, int], bytes] = {}, _pack_odd({})
        """The last ask's odd workers, and their packed form: they are the same for all prompts."""

    @property
    def look_up(self) -> bool:
        """Only if all that a call reads is in one server, and what workers hold in one place."""
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
        evaluation = _unpack_evaluation(ask, answer)
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
            *(() if booking.waiting is None else (_pack(_waiting_row(booking.waiting)),)),
        ]
        try:
            answer = await call_pool(self._store, "book", pool_id, args)
        except ResponseError as error:
            _check_lookup(booking.ask, error)
            raise
        return _unpack_evaluation(booking.ask, answer)

    async def turns(
        self, pool_id: str, router_id: str, left: Collection[bytes], waiting: Sequence[WaitingRequest]
    ) -> Turns:
        gone, rows = list(left), [_waiting_row(one) for one in waiting]
        refused: set[bytes] = set()
        while True:
            last = len(gone) <= LEFT_A_CALL and len(rows) <= WAITING_A_CALL
            args = [router_id, b"".join(gone[:LEFT_A_CALL]), _pack(rows[:WAITING_A_CALL]), int(last)]
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
            return _pack_ask(ask, _pack(0))
        assert self._index is not None
        shards = self._index.shard_keys
        if len(shards) != 1:  # since `look_up` was read
            raise LookupImpossible(f"the index has {len(shards)} shards; expected 1")
        odd = ask.lookup.odd
        if self._odd[0] is not odd:
            self._odd = odd, _pack_odd(odd)
        return _pack_ask(ask, _pack_lookup(ask.lookup, shards[0], self._odd[1]))

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
            args = [_pack((FORM, *rows[first : first + WORKERS_A_CALL])), ERRORS]
            await call_pool(self._store, "learn", pool_id, args)

    async def read_evidence(self, pool_id: str) -> Mapping[str, Evidence]:
        flat = await call_pool_ro(self._store, "learned", pool_id, [])
        found = {}
        for worker_id, packed in zip(flat[::2], flat[1::2], strict=True):
            try:
                form, requests, sums = msgpack.unpackb(packed)
                if form == FORM:  # evidence of another version has no meaning here
                    sums = tuple(map(float, sums))
                    if not all(map(isfinite, (requests, *sums))):
                        raise ValueError("a number is not finite")
                    found[worker_id.decode()] = Evidence(requests, sums=sums)
            except DATA_ERRORS as error:  # replaced by the next evidence
                name = worker_id.decode(errors="backslashreplace")
                self._log.report(name, f"worker {name:.64}: its learned rates in the store can't be read: {error}")
        return found


async def write_reports(
    store: Store, pool_id: str, reports: Mapping[str, tuple[bytes, WorkerReport]]
) -> PoolDamage | None:
    """Report workers, each with its packed fleet record; an empty one leaves the stored record as it is. Returns the damage
    if the pool was repaired. Raises Unreachable."""
    rows = [_report_row(worker_id, record, report) for worker_id, (record, report) in reports.items()]
    damage = None
    for first in range(0, len(rows), WORKERS_A_CALL):
        found = await call_pool(store, "report", pool_id, [_pack(rows[first : first + WORKERS_A_CALL])])
        if found:
            times, what = found
            damage = PoolDamage(int(times) + (damage.times if damage else 0), what.decode(errors="backslashreplace"))
    return damage


def _report_row(worker_id: str, record: bytes, report: WorkerReport) -> tuple[Any, ...]:
    """A worker's report in the form of `functions/report.lua`."""
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
    """Raises IndexUnreadable if an ask's lookup failed, LookupImpossible if it made the ask too large."""
    if str(error).startswith(_INDEX):
        raise IndexUnreadable(str(error)) from error
    if ask.lookup is not None and str(error).removeprefix("ERR ").startswith(_TOO_LARGE):
        raise LookupImpossible(str(error)) from error


_packer = msgpack.Packer(use_bin_type=False)
"""In msgpack's older form, where text and bytes are one type: the store's Lua reads byte strings only in that."""


def _pack(value: Any) -> bytes:
    packed: bytes = _packer.pack(value)
    return packed


def _pack_fields(*values: Any) -> bytes:
    """The fields of a list of up to 15, without its head: several of these, joined behind one head, are one list."""
    return _pack(values)[1:]


def _head(fields: int) -> bytes:
    """The head of a list of up to 15 fields (msgpack's fixarray)."""
    return bytes([0x90 | fields])


def _pack_ask(ask: Ask, lookup: bytes) -> bytes:
    """An ask in the form of `functions/_evaluation.lua`. `lookup`: packed, in the form of `functions/_lookup.lua`."""
    chains = [(cut.step_tokens, cut.hashes) for cut in ask.chains]
    numbers: dict[int, int] = {}
    kinds: list[Any] = []
    offers: list[Any] = []
    look_alikes: list[Any] = []

    def number_of(kind: OfferKind) -> int:
        if (number := numbers.get(id(kind))) is None:
            number = numbers[id(kind)] = len(numbers)
            kinds.extend(_kind_fields(kind))
        return number

    for worker_id, kind, held_steps, cached_tokens, base_us, work_us, _ in ask.offers:
        offers += (worker_id, number_of(kind), held_steps, cached_tokens, base_us, work_us)
    for likeness, (_, kind, held_steps, cached_tokens, base_us, work_us, _), _ in ask.look_alikes:
        look_alikes += (likeness, number_of(kind), held_steps, cached_tokens, base_us, work_us)
    layout, skipped = ask.pair_layout, list(ask.skipped)
    if skipped and ask.offers:  # a worker with its own offer must not count twice
        skipped = list(set(skipped).difference(offer.worker_id for offer in ask.offers))
    before = _pack_fields(
        ask.again_factor,
        chains,
        kinds,
        offers,
        0 if ask.limits is None else _limit_fields(ask.limits, ask.look_alikes),
        0 if layout is None else (layout.prefills, layout.decodes, layout.groups, layout.transfers_us),
        look_alikes,
        skipped,
        ask.least_members,
        ask.ring,
    )
    return b"".join((_head(13), before, lookup, _pack_fields(*_fetch_fields(ask))))


def _pack_lookup(lookup: Lookup, keys: ShardKeys, odd: bytes) -> bytes:
    """A lookup in the form of `functions/_lookup.lua`; `odd`: its odd workers, packed."""
    chains = lookup.distinct_chains
    numbers = {id(one): number for number, one in enumerate(chains, 1)}
    reuse: list[float] = []
    for one, (most, lost, loses_first, share, unit) in zip(lookup.chains, lookup.reuse, strict=True):
        reuse += (numbers.get(id(one), 0), most, lost, int(loses_first), share, unit)
    scope_id = lookup.scope.scope_id
    before = _pack_fields(
        *(keys.blocks(scope_id), keys.active, keys.workers, keys.held, scope_id),
        [(one.tokens, one.hashes) for one in chains],
        reuse,
    )
    return b"".join((_head(10), before, odd, _pack_fields(lookup.home or "", lookup.home_us)))


def _pack_odd(odd: Mapping[str, int]) -> bytes:
    return _pack(list(chain.from_iterable((worker_id, row + 1) for worker_id, row in odd.items())))


def _waiting_row(request: WaitingRequest) -> tuple[Any, ...]:
    """A request in the form of `functions/_queue.lua`."""
    return (
        request.id,
        digest(request.tenant),
        request.weight_milli,
        request.rank,
        digest(request.program) if request.program else "",
        request.input_tokens,
        request.output_tokens,
        max(0, request.age_us),
        max(0, request.left_us),
        request.lane,
        0 if request.workers is None else sorted(request.workers),
        *request.limits,
        int(request.may_wait),
    )


def _fetch_fields(ask: Ask) -> tuple[list[str], list[tuple[Any, ...]]]:
    """All sources, each once, and what offers, then look-alikes, would fetch: number of the row (from 1), us, numbers of its
    sources."""
    numbers: dict[str, int] = {}
    fetching = chain((one.fetching for one in ask.offers), (one.offer.fetching for one in ask.look_alikes))
    rows = [
        (row, one.us, *(numbers.setdefault(source, len(numbers) + 1) for source in one.sources))
        for row, one in enumerate(fetching, start=1)
        if one is not None
    ]
    return list(numbers), rows


def _kind_fields(kind: OfferKind) -> tuple[float, ...]:
    prices = kind.prices
    return (
        0 if kind.chain is None else kind.chain + 1,
        kind.limit_tokens,
        kind.lost_tokens,
        prices.queued_us,
        prices.running_us,
        prices.kv_us,
        prices.waiting_tokens,
        prices.token_us,
        prices.token_squared_us,
        prices.hit_us,
        kind.believed_us,
        kind.capacity_steps,
        kind.interference,
        kind.arrivals,
    )


def _limit_fields(limits: Limits, look_alikes: Sequence[LookAlikes]) -> tuple[Any, ...]:
    return (
        limits.ttft_us,
        limits.decode_us,
        limits.slo_factor,
        int(limits.slo_filters),
        limits.input_tokens,
        list(chain.from_iterable(limits.of_offers)),
        int(limits.look_alikes_have_room),
        [each.decode_us for each in look_alikes],
    )


class _OfferEvaluations(Sequence[OfferEvaluation]):
    """Each offer's evaluation, recomputed on access exactly as in the store: a router reads one of many.

    `records`: the stored record of each offer's worker (`functions/_layout.lua`).
    """

    def __init__(
        self,
        ask: Ask,
        offers: Sequence[Offer],
        records: Sequence[bytes],
        groups: Sequence[LookAlikes],
        now_us: int,
        mean: Load,
        in_flight: int,
        best: Mapping[str, UsablePrediction],
    ) -> None:
        """`groups`: the look-alikes whose offers follow the ask's own offers."""
        self._ask = ask
        self._offers = offers
        self._records = records
        self._groups = groups
        self._now_us = now_us
        self._mean = mean
        self._in_flight = in_flight
        self._best = best

    @overload
    def __getitem__(self, index: int) -> OfferEvaluation: ...
    @overload
    def __getitem__(self, index: slice) -> list[OfferEvaluation]: ...
    def __getitem__(self, index: int | slice) -> OfferEvaluation | list[OfferEvaluation]:
        numbers = range(len(self))[index]
        return self._evaluate(numbers) if isinstance(numbers, int) else [self._evaluate(number) for number in numbers]

    def __len__(self) -> int:
        return len(self._records)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def _evaluate(self, number: int) -> OfferEvaluation:
        ask, offer = self._ask, self._offers[number]
        fields = _WORKER.unpack_from(self._records[number])
        # the store refuses damaged records, but does not look at all of them for each choice
        if not isfinite(sum(fields)):
            fields = tuple(field if isfinite(field) else 0 for field in fields)
        sampled_us, _, queued, running, waiting, kv, more_queued, more_running, more_kv, _, slots, kv_limit = map(
            int, fields
        )
        limit, first_member = UNKNOWN_LIMIT, len(ask.offers)
        if ask.limits is not None:
            if number < first_member:
                limit = ask.limits.of_offers[number]
            else:
                room = (0, 0) if ask.limits.look_alikes_have_room else (slots, kv_limit)
                limit = Limit(*room, self._groups[number - first_member].decode_us)
        reported = Load(running, queued, waiting, kv) if self._now_us - sampled_us < STALE_US else None
        load = WorkerLoad(reported, Load(more_running, more_queued, 0, more_kv))
        prediction = self._best.get(offer.worker_id)
        return evaluate_offer(ask, offer, limit, load, self._mean, prediction, self._in_flight, self._now_us)[1]


class _MemberOffers(Sequence[Offer]):
    """The offers to look-alikes that were looked up, each made when it is read: a router reads one of them.

    `rows`: the numbers of their rows of look-alikes, from 1.
    """

    def __init__(self, ask: Ask, rows: Sequence[int], worker_ids: Sequence[str], held_tokens: Sequence[int]) -> None:
        self._ask = ask
        self._rows = rows
        self._worker_ids = worker_ids
        self._held_tokens = held_tokens

    @overload
    def __getitem__(self, index: int) -> Offer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Offer]: ...
    def __getitem__(self, index: int | slice) -> Offer | list[Offer]:
        numbers = range(len(self))[index]
        return self._offer(numbers) if isinstance(numbers, int) else [self._offer(number) for number in numbers]

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def _offer(self, number: int) -> Offer:
        return offer_holding(self._ask, self._rows[number] - 1, self._worker_ids[number], self._held_tokens[number])


def _unpack_evaluation(ask: Ask, answer: bytes) -> Evaluation | None:
    """Unpack the answer of `functions/_choice.lua` or `functions/book.lua`; None for a booking that was cancelled. Raises
    LookAlikesUnknown, MustWait and QueueIsFull."""
    chosen, *rest = msgpack.unpackb(answer, raw=True)
    if not chosen:
        return None
    if chosen == _MUST_WAIT:
        raise MustWait(Place(_WAIT_REASONS[rest[0]], *rest[1:]))
    if chosen == _QUEUE_IS_FULL:
        raise QueueIsFull(*rest)
    if chosen == _NOT_IN_HBM:
        raise NotInHbm("the cheapest worker holds blocks in other tiers")
    if chosen == _TOO_MANY:
        raise TooManyAlike("the cheapest worker was not among those that one call may read")
    if chosen < 0:
        raise LookAlikesUnknown(f"the store has fewer than {ask.least_members} look-alikes for an ask")
    prefill, now_us, mean, in_flight, predictions, records, members, source = rest
    queued, running, waiting, kv_tokens = mean or (0, 0, 0, 0)
    best = {worker_id.decode(): UsablePrediction(tokens, ready_us) for worker_id, tokens, ready_us in predictions}
    mean_load = Load(running, queued, waiting, kv_tokens)
    names, rows, member_records, depths = (members[at::4] for at in range(4))
    offers, groups, held_tokens = ask.offers, [ask.look_alikes[row - 1] for row in rows], []
    worker_ids = [name.decode() for name in names]
    if ask.lookup is not None:
        chains = ask.lookup.chains
        for depth, row in zip(depths, rows, strict=True):
            one = chains[row - 1]
            held_tokens.append(int(depth) * one.tokens if one else 0)
        offers, records = _MemberOffers(ask, rows, worker_ids, held_tokens), member_records
    elif members:
        more = [each.offer._replace(worker_id=id) for id, each in zip(worker_ids, groups, strict=True)]
        offers, records = [*offers, *more], [*records, *member_records]
    by_offer = _OfferEvaluations(ask, offers, records, groups, now_us, mean_load, in_flight, best)
    source_id = source.decode() or None
    looked_up = worker_ids if ask.lookup is not None else ()
    return Evaluation(chosen - 1, offers, by_offer, prefill - 1 if prefill else None, held_tokens, looked_up, source_id)
