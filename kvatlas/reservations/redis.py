"""Reservations in the store: every router of a pool books in the same place, in one call each."""

from collections.abc import Mapping, Sequence
from itertools import chain
from struct import Struct
from typing import Any, overload

import msgpack

from kvatlas.cost.protocol import Load
from kvatlas.cost.regression import ERRORS, FORM, Evidence
from kvatlas.reservations.evaluation import WorkerLoad, evaluate_offer
from kvatlas.reservations.limits import Limits
from kvatlas.reservations.memory import CALLED_OFF_US
from kvatlas.reservations.protocol import (
    ARRIVAL_US,
    Ask,
    Booking,
    Evaluation,
    OfferEvaluation,
    Outcome,
    WorkerReport,
)
from kvatlas.reservations.redis_calls import call_pool, call_pool_ro
from kvatlas.store.connection import Store

_WORKER = Struct(">9d")
"""The start of a worker's record, see `functions/_pool.lua`."""

WORKERS_A_CALL = 100
"""Evidence of up to this many is added in one call, so that other calls wait for a millisecond at most."""


class RedisReservations:
    """See `Reservations`. Loads the pool's functions if the store does not have them."""

    fed_by_indexer = True

    def __init__(self, store: Store) -> None:
        self._store = store

    async def evaluate(self, pool_id: str, ask: Ask) -> Evaluation:
        found = _unpack_evaluation(ask, await call_pool_ro(self._store, "look", pool_id, [_pack_ask(ask)]))
        assert found is not None
        return found

    async def book(self, pool_id: str, booking: Booking) -> Evaluation | None:
        args = [
            booking.id,
            booking.router_id,
            booking.lease_us,
            booking.longest_us,
            booking.input_tokens,
            _pack_ask(booking.ask),
            *(() if booking.prefill_id is None else (booking.prefill_id,)),
        ]
        return _unpack_evaluation(booking.ask, await call_pool(self._store, "book", pool_id, args))

    async def record_first_token(self, pool_id: str, id: bytes) -> bool:
        return bool(await call_pool(self._store, "prefilled", pool_id, [id]))

    async def release(self, pool_id: str, id: bytes, outcome: Outcome) -> bool:
        return bool(await call_pool(self._store, "release", pool_id, [id, outcome.value, CALLED_OFF_US]))

    async def renew_lease(self, pool_id: str, router_id: str, lease_us: int) -> bool:
        return bool(await call_pool(self._store, "beat", pool_id, [router_id, lease_us]))

    async def end_lease(self, pool_id: str, router_id: str) -> None:
        await call_pool(self._store, "leave", pool_id, [router_id])

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
            form, requests, sums = msgpack.unpackb(packed)
            if form == FORM:  # another version's evidence has no meaning here
                found[worker_id.decode()] = Evidence(requests, sums=tuple(map(float, sums)))
        return found


async def write_reports(store: Store, pool_id: str, reports: Mapping[str, tuple[bytes, WorkerReport]]) -> None:
    """Report workers, each with its packed fleet record; an empty one leaves the stored record as it is. Raises
    Unreachable."""
    rows = [_report_row(worker_id, record, report) for worker_id, (record, report) in reports.items()]
    await call_pool(store, "report", pool_id, [_pack(rows)])


def _report_row(worker_id: str, record: bytes, report: WorkerReport) -> tuple[Any, ...]:
    """As `functions/report.lua` takes it."""
    sample, incarnation = report.sample, str(report.incarnation)
    if sample is None:
        return worker_id, record, incarnation, 0, 0, -1, 0, 0, 0, 0
    load = sample.load
    covered_age_us = sample.age_us + ARRIVAL_US if sample.covers else -1
    return (
        worker_id,
        record,
        incarnation,
        1,
        sample.age_us,
        covered_age_us,
        load.queued_prefill_tokens,
        load.running_decodes,
        load.waiting_requests,
        load.kv_tokens,
    )


def _pack(value: Any) -> bytes:
    # the store's Lua reads byte strings only in msgpack's older form, where text and bytes are one type
    packed: bytes = msgpack.packb(value, use_bin_type=False)
    return packed


def _pack_ask(ask: Ask) -> bytes:
    """As `functions/_evaluation.lua` takes it."""
    chains = [(cut.step_tokens, cut.hashes) for cut in ask.chains]
    numbers: dict[int, int] = {}
    kinds: list[Any] = []
    offers: list[Any] = []
    for worker_id, kind, held_steps, cached_tokens, base_us, work_us in ask.offers:
        if (number := numbers.get(id(kind))) is None:
            number = numbers[id(kind)] = len(numbers)
            prices = kind.prices
            kinds += (
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
            )
        offers += (worker_id, number, held_steps, cached_tokens, base_us, work_us)
    fields: list[Any] = [ask.stale_us, ask.again_factor, chains, kinds, offers]
    if ask.limits is not None or ask.pair_layout is not None:
        fields.append(0 if ask.limits is None else _limit_fields(ask.limits))
    if (layout := ask.pair_layout) is not None:
        fields.append((layout.prefills, layout.decodes, layout.groups, layout.transfers_us))
    return _pack(fields)


def _limit_fields(limits: Limits) -> tuple[Any, ...]:
    each = list(chain.from_iterable(limits.of_offers))
    filters = int(limits.slo_filters)
    return (limits.ttft_us, limits.decode_us, limits.slo_factor, filters, limits.input_tokens, each)


class _OfferEvaluations(Sequence[OfferEvaluation]):
    """Each offer's evaluation, computed again as in the store when it is read: a router reads one of hundreds.

    `records`: each offer's worker as the store keeps it (`functions/_pool.lua`).
    """

    def __init__(
        self,
        ask: Ask,
        now_us: int,
        mean: Load,
        in_flight: int,
        best: Mapping[str, tuple[int, int]],
        records: Sequence[bytes],
    ) -> None:
        self._ask = ask
        self._now_us = now_us
        self._mean = mean
        self._in_flight = in_flight
        self._best = best
        self._records = records

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
        sampled_us, _, queued, running, waiting, kv, more_queued, more_running, more_kv = map(
            int, _WORKER.unpack_from(self._records[number])
        )
        known = self._now_us - sampled_us < self._ask.stale_us
        reported = Load(running, queued, waiting, kv) if known else None
        load = WorkerLoad(reported, Load(more_running, more_queued, 0, more_kv))
        prediction = self._best.get(self._ask.offers[number].worker_id)
        return evaluate_offer(self._ask, number, load, self._mean, prediction, self._in_flight, self._now_us)[1]


def _unpack_evaluation(ask: Ask, answer: bytes) -> Evaluation | None:
    """As `functions/_evaluation.lua` returns it; None for a booking that was called off."""
    chosen, *rest = msgpack.unpackb(answer, raw=True)
    if not chosen:
        return None
    prefill, now_us, mean, in_flight, predictions, records = rest
    queued, running, waiting, kv_tokens = mean or (0, 0, 0, 0)
    best = {worker_id.decode(): (tokens, ready_us) for worker_id, tokens, ready_us in predictions}
    mean_load = Load(running, queued, waiting, kv_tokens)
    by_offer = _OfferEvaluations(ask, now_us, mean_load, in_flight, best, records)
    return Evaluation(chosen - 1, by_offer, prefill - 1 if prefill else None)
