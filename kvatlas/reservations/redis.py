"""Reservations in the store: every router of a pool books in the same place, in one call each."""

from collections.abc import Mapping, Sequence
from itertools import chain
from struct import Struct
from typing import Any, overload

import msgpack

from kvatlas.cost.protocol import Load
from kvatlas.cost.regression import ERRORS, FORM, Evidence
from kvatlas.reservations.limits import Limits
from kvatlas.reservations.memory import CALLED_OFF_US
from kvatlas.reservations.protocol import ARRIVAL_US, Ask, Booking, Outcome, Weighed, Weighing, WorkerReport
from kvatlas.reservations.redis_calls import call_pool, call_pool_ro
from kvatlas.reservations.weigh import Busy, judge
from kvatlas.store.connection import Store

_WORKER = Struct(">9d")
"""The start of a worker's record, see `functions/_pool.lua`."""

WORKERS_A_CALL = 100
"""Evidence is added up for so many at once, so that others wait for a millisecond at most."""


class RedisReservations:
    """See `Reservations`. The functions are loaded where the store does not have them."""

    hears_fleet = True

    def __init__(self, store: Store) -> None:
        self._store = store

    async def look(self, pool_id: str, ask: Ask) -> Weighing:
        weighing = _weighing(ask, await call_pool_ro(self._store, "look", pool_id, [_packed_ask(ask)]))
        assert weighing is not None
        return weighing

    async def book(self, pool_id: str, booking: Booking) -> Weighing | None:
        args = [
            booking.id,
            booking.router_id,
            booking.lease_us,
            booking.longest_us,
            booking.input_tokens,
            _packed_ask(booking.ask),
            *(() if booking.prefill_id is None else (booking.prefill_id,)),
        ]
        return _weighing(booking.ask, await call_pool(self._store, "book", pool_id, args))

    async def prefilled(self, pool_id: str, id: bytes) -> bool:
        return bool(await call_pool(self._store, "prefilled", pool_id, [id]))

    async def release(self, pool_id: str, id: bytes, outcome: Outcome) -> bool:
        return bool(await call_pool(self._store, "release", pool_id, [id, outcome.value, CALLED_OFF_US]))

    async def beat(self, pool_id: str, router_id: str, lease_us: int) -> bool:
        return bool(await call_pool(self._store, "beat", pool_id, [router_id, lease_us]))

    async def leave(self, pool_id: str, router_id: str) -> None:
        await call_pool(self._store, "leave", pool_id, [router_id])

    async def report(self, pool_id: str, reports: Mapping[str, WorkerReport]) -> None:
        await write_reports(self._store, pool_id, {worker_id: (b"", report) for worker_id, report in reports.items()})

    async def forget(self, pool_id: str, worker_id: str) -> None:
        await call_pool(self._store, "forget", pool_id, [worker_id])

    async def learn(self, pool_id: str, evidence: Mapping[str, Evidence]) -> None:
        told = [(id, e.requests, e.keep, e.errors_keep, e.sums) for id, e in evidence.items()]
        for first in range(0, len(told), WORKERS_A_CALL):
            await call_pool(
                self._store, "learn", pool_id, [_pack((FORM, *told[first : first + WORKERS_A_CALL])), ERRORS]
            )

    async def learned(self, pool_id: str) -> Mapping[str, Evidence]:
        flat = await call_pool_ro(self._store, "learned", pool_id, [])
        found = {}
        for worker_id, packed in zip(flat[::2], flat[1::2], strict=True):
            form, requests, sums = msgpack.unpackb(packed)
            if form == FORM:  # that of another version says nothing here
                found[worker_id.decode()] = Evidence(requests, sums=tuple(map(float, sums)))
        return found


async def write_reports(store: Store, pool_id: str, reports: Mapping[str, tuple[bytes, WorkerReport]]) -> None:
    """Tell of workers; with each its packed fleet record, empty to leave that as it is. Raises Unreachable."""
    told = []
    for worker_id, (record, report) in reports.items():
        sample = report.sample
        if sample is None:
            told.append((worker_id, record, str(report.incarnation), 0, 0, -1, 0, 0, 0, 0))
            continue
        load = sample.load
        covered_age = sample.age_us + ARRIVAL_US if sample.covers else -1
        told.append(
            (
                worker_id,
                record,
                str(report.incarnation),
                1,
                sample.age_us,
                covered_age,
                load.queued_prefill_tokens,
                load.running_decodes,
                load.waiting_requests,
                load.kv_tokens,
            )
        )
    await call_pool(store, "report", pool_id, [_pack(told)])


def _pack(value: Any) -> bytes:
    # the store's Lua reads byte strings only in msgpack's older form, where text and bytes are one type
    packed: bytes = msgpack.packb(value, use_bin_type=False)
    return packed


def _packed_ask(ask: Ask) -> bytes:
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
    told: list[Any] = [ask.stale_us, ask.again_factor, chains, kinds, offers]
    if ask.limits is not None or ask.pairing is not None:
        told.append(0 if ask.limits is None else _packed_limits(ask.limits))
    if (pairing := ask.pairing) is not None:
        told.append((pairing.prefills, pairing.decodes, pairing.groups, pairing.transfers_us))
    return _pack(told)


def _packed_limits(limits: Limits) -> tuple[Any, ...]:
    each = list(chain.from_iterable(limits.of_offers))
    filters = int(limits.slo_filters)
    return (limits.ttft_us, limits.decode_us, limits.slo_factor, filters, limits.input_tokens, each)


class _Rows(Sequence[Weighed]):
    """What each offer was judged by, worked out as the store did when somebody looks at it: a router reads one of hundreds.

    `records`: each offer's worker as the store keeps it (`_pool.lua`).
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
    def __getitem__(self, index: int) -> Weighed: ...
    @overload
    def __getitem__(self, index: slice) -> list[Weighed]: ...
    def __getitem__(self, index: int | slice) -> Weighed | list[Weighed]:
        numbers = range(len(self))[index]
        return self._row(numbers) if isinstance(numbers, int) else [self._row(number) for number in numbers]

    def __len__(self) -> int:
        return len(self._records)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def _row(self, number: int) -> Weighed:
        sampled_us, _, queued, running, waiting, kv, more_queued, more_running, more_kv = map(
            int, _WORKER.unpack_from(self._records[number])
        )
        known = self._now_us - sampled_us < self._ask.stale_us
        busy = Busy(Load(running, queued, waiting, kv) if known else None, Load(more_running, more_queued, 0, more_kv))
        prediction = self._best.get(self._ask.offers[number].worker_id)
        return judge(self._ask, number, busy, self._mean, prediction, self._in_flight, self._now_us)[1]


def _weighing(ask: Ask, answer: bytes) -> Weighing | None:
    chosen, *rest = msgpack.unpackb(answer, raw=True)
    if not chosen:
        return None
    prefill, now_us, mean, in_flight, predictions, records = rest
    queued, running, waiting, kv_tokens = mean or (0, 0, 0, 0)
    best = {worker_id.decode(): (tokens, ready_us) for worker_id, tokens, ready_us in predictions}
    rows = _Rows(ask, now_us, Load(running, queued, waiting, kv_tokens), in_flight, best, records)
    return Weighing(chosen - 1, rows, prefill - 1 if prefill else None)
