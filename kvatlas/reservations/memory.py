"""Reservations in the memory of a process: the reference model, and the choice for a single router without a store.

`memory_pool` keeps the state of a pool, and stays fast however much has been booked.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.cost.regression import Evidence
from kvatlas.reservations.evaluation import HeldTokens, PrefixMatch, next_source, ready_us
from kvatlas.reservations.lookup import LookupChain, NotInHbm
from kvatlas.reservations.memory_pool import BookedRequest, MemoryPool, PoolWorker, PredictedPrefix
from kvatlas.reservations.protocol import (
    ARRIVAL_US,
    Ask,
    Booking,
    BookingEnd,
    Evaluation,
    Offer,
    Outcome,
    WorkerReport,
)
from kvatlas.reservations.room_and_slo import NO_ROOM
from kvatlas.reservations.search import Search
from kvatlas.reservations.waiting_request import MustWait, Turns, WaitingRequest, WaitReason

if TYPE_CHECKING:
    from kvatlas.index.protocol import ResidencyIndex


class Held(NamedTuple):
    """For each chain of a lookup: how many of its tokens workers hold, and which of them hold some of these only in tiers other
    than HBM."""

    tokens: HeldTokens
    elsewhere: Mapping[LookupChain, Collection[str]]


NOTHING_LOOKED_UP = Held(MappingProxyType({}), MappingProxyType({}))

CALLED_OFF_US = 30_000_000
CLOCK_SLACK_US = 1_000_000


class MemoryReservations:
    """See `Reservations`. `clock_us` returns microseconds. `index`: read for asks with a lookup."""

    fed_by_indexer = False
    search: ClassVar[type[Search]] = Search

    def __init__(
        self, clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000, index: "ResidencyIndex | None" = None
    ) -> None:
        self._clock_us = clock_us
        self._index = index
        self._pools: dict[str, MemoryPool] = {}
        self._order = count()

    @property
    def look_up(self) -> bool:
        return self._index is not None

    async def evaluate(self, pool_id: str, ask: Ask) -> Evaluation:
        return self.evaluate_now(pool_id, ask, await self._look_up(ask))

    async def book(self, pool_id: str, booking: Booking) -> Evaluation | None:
        return self.book_now(pool_id, booking, await self._look_up(booking.ask))

    async def turns(
        self, pool_id: str, router_id: str, left: Collection[bytes], waiting: Sequence[WaitingRequest]
    ) -> Turns:
        return self.turns_now(pool_id, router_id, left, waiting)

    async def record_first_token(self, pool_id: str, id: bytes) -> bool:
        pool, now = self._pool(pool_id), self._clock_us()
        reservation = pool.booked.get(id)
        if reservation is None or not reservation.prefilling:
            return False
        pool.end_prefill(id)
        self._settle_prediction(pool, id, now)
        return True

    async def release(self, pool_id: str, id: bytes, outcome: Outcome, output_tokens: int | None = None) -> bool:
        return self.release_now(pool_id, id, outcome, output_tokens)

    async def record_ends(self, pool_id: str, ends: Sequence[BookingEnd]) -> None:
        for id, outcome, output_tokens in ends:
            if outcome is None:
                await self.record_first_token(pool_id, id)
            else:
                self.release_now(pool_id, id, outcome, output_tokens)

    async def find_booked(self, pool_id: str, ids: Sequence[bytes]) -> set[bytes]:
        return self._pool(pool_id).booked.keys() & set(ids)

    async def renew_lease(self, pool_id: str, router_id: str, lease_us: int) -> bool:
        pool, now = self._purge(pool_id)
        lived = router_id in pool.routers
        pool.routers[router_id] = now + lease_us
        return lived

    async def end_lease(self, pool_id: str, router_id: str) -> None:
        self._drop_router(self._pool(pool_id), router_id, self._clock_us())

    async def report(self, pool_id: str, reports: Mapping[str, WorkerReport]) -> None:
        self.report_now(pool_id, reports)

    async def forget(self, pool_id: str, worker_id: str) -> None:
        self._forget(pool_id, worker_id)

    async def add_evidence(self, pool_id: str, evidence: Mapping[str, Evidence]) -> None:
        pool = self._pool(pool_id)
        for worker_id, newer in evidence.items():
            if worker_id in pool.workers:
                both = pool.rates.get(worker_id, Evidence()).followed_by(newer)
                pool.rates[worker_id] = Evidence(both.requests, sums=both.sums)

    async def read_evidence(self, pool_id: str) -> Mapping[str, Evidence]:
        return dict(self._pool(pool_id).rates)

    # ------------------------------------------------------------ the same calls without waiting

    def evaluate_now(self, pool_id: str, ask: Ask, held: Held = NOTHING_LOOKED_UP) -> Evaluation:
        """`evaluate`, without waiting."""
        return self._evaluate(self._pool(pool_id), ask, self._clock_us(), held)[0]

    def book_now(self, pool_id: str, booking: Booking, held: Held = NOTHING_LOOKED_UP) -> Evaluation | None:
        """`book`, without waiting."""
        pool, now = self._purge(pool_id)
        pool.routers[booking.router_id] = now + booking.lease_us
        ids = [id for id in (booking.id, booking.prefill_id) if id is not None]
        for id in ids:
            if id not in pool.called_off:
                self._drop_reservation(pool, id, Outcome.FAILED, now)
                pool.remove_prediction(id)
        if any(id in pool.called_off for id in ids):
            return None
        blocked = self._take_turn(pool, booking, now)
        found, matches = self._evaluate(pool, booking.ask, now, held)
        if booking.waiting is not None and booking.waiting.may_wait:
            self._check_room(pool, booking.router_id, booking.waiting, found, blocked, now)
        source_known = found.source in pool.workers
        self._reserve(pool, booking.id, booking, found, found.chosen, matches, now)
        if found.prefill is not None and booking.prefill_id is not None:
            self._reserve(pool, booking.prefill_id, booking, found, found.prefill, matches, now)
        fetching = found.offers[found.computing].fetching
        if fetching is not None and found.source is not None and source_known:
            pool.busy_until_us[found.source] = max(now, pool.busy_until_us.get(found.source, 0)) + fetching.us
        if booking.waiting is not None:
            cached = found.by_offer[found.computing].predicted_tokens or found.offers[found.computing].cached_tokens
            uncached = max(0, booking.input_tokens - cached)
            pool.queue.record_booked(booking.waiting, booking.id, uncached, cached, now)
        return found

    def wait_without_room(self, pool_id: str, router_id: str, waiting: WaitingRequest, found: Evaluation) -> None:
        """Make a request wait unless the workers that were chosen without bookings have room. Raises MustWait or
        QueueIsFull."""
        pool, now = self._purge(pool_id)
        self._check_room(pool, router_id, waiting, found, frozenset(), now)

    def turns_now(
        self, pool_id: str, router_id: str, left: Collection[bytes], waiting: Sequence[WaitingRequest]
    ) -> Turns:
        """Call `turns` without waiting."""
        pool, now = self._purge(pool_id)
        return pool.queue.turns(router_id, left, waiting, now)

    def release_now(self, pool_id: str, id: bytes, outcome: Outcome, output_tokens: int | None = None) -> bool:
        """Call `release` without waiting."""
        pool, now = self._pool(pool_id), self._clock_us()
        if id in pool.booked:
            pool.queue.record_end(id, output_tokens, called_off=outcome is Outcome.CALLED_OFF)
        if outcome is Outcome.CALLED_OFF:
            pool.called_off.add(now + CALLED_OFF_US, id)
        return self._drop_reservation(pool, id, outcome, now)

    def report_now(self, pool_id: str, reports: Mapping[str, WorkerReport]) -> None:
        """Call `report` without waiting."""
        pool, now = self._purge(pool_id)
        for worker_id, report in reports.items():
            worker = pool.workers.setdefault(worker_id, PoolWorker())
            if worker.sampled_us > now + CLOCK_SLACK_US:
                self._pools[pool_id] = pool = MemoryPool(pool.rates)
                worker = pool.workers.setdefault(worker_id, PoolWorker())
            if worker.incarnation is not None and report.incarnation < worker.incarnation:
                continue
            if worker.incarnation != report.incarnation:
                if worker.incarnation is not None:
                    self._drop_settled_predictions(pool, worker_id)
                worker.incarnation = report.incarnation
            worker.likeness, worker.limit = report.likeness, report.limit
            sample = report.sample
            if sample is not None and now - sample.age_us >= worker.sampled_us:
                worker.reported, worker.sampled_us = sample.load, now - sample.age_us
                if sample.covers:
                    worker.reported = pool.cover(worker, worker.sampled_us - ARRIVAL_US, sample)

    def forget_others(self, pool_id: str, worker_ids: Collection[str]) -> None:
        """`forget` every worker but these."""
        for worker_id in [id for id in self._pool(pool_id).workers if id not in worker_ids]:
            self._forget(pool_id, worker_id)

    def knows_a_load(self, pool_id: str, worker_ids: Collection[str]) -> bool:
        """True if the reported load of one of these workers is known, and not too old."""
        workers, now = self._pool(pool_id).workers, self._clock_us()
        return any((worker := workers.get(id)) is not None and worker.load_at(now) is not None for id in worker_ids)

    def predicted_steps(self, pool_id: str, worker_id: str) -> int:
        """The number of steps that a worker is predicted to hold."""
        return self._pool(pool_id).predicted_steps(worker_id)

    # ------------------------------------------------------------ pieces

    def _forget(self, pool_id: str, worker_id: str) -> None:
        pool = self._pool(pool_id)
        self._drop_worker(pool, worker_id, self._clock_us())
        pool.workers.pop(worker_id, None)
        pool.rates.pop(worker_id, None)
        pool.busy_until_us.pop(worker_id, None)

    async def _look_up(self, ask: Ask) -> Held:
        """What each worker holds of the chains of an ask's lookup."""
        if ask.lookup is None:
            return NOTHING_LOOKED_UP
        assert self._index is not None
        tokens: dict[LookupChain, Mapping[str, int]] = {}
        elsewhere: dict[LookupChain, Collection[str]] = {}
        for chain in ask.lookup.distinct_chains:
            runs = (await self._index.overlap(ask.lookup.scope, chain.hashes)).runs_by_worker()
            tokens[chain] = {id: sum(length for length, _ in of) * chain.tokens for id, of in runs.items()}
            elsewhere[chain] = {id for id, of in runs.items() if not all(flags & Tier.HBM.flag for _, flags in of)}
        return Held(tokens, elsewhere)

    def _evaluate(self, pool: MemoryPool, ask: Ask, now: int, held: Held) -> tuple[Evaluation, dict[bytes, int]]:
        """The evaluation, and for each prediction that shares a prefix with the prompt the steps held with it."""
        search = self.search(ask, pool.workers, held.tokens, now)
        matches: dict[bytes, int] = {}
        for number, chain in enumerate(ask.chains):
            for other in pool.predictions_along(chain.hashes):
                prediction = pool.predictions[other]
                if search.chain_of(prediction.worker_id) == number and prediction.ends_us > now:
                    common = _common_steps(chain.hashes[prediction.first * HASH_BYTES :], prediction.hashes)
                    matches[other] = prediction.first + common
        predicted = [
            PrefixMatch(pool.predictions[other].worker_id, steps, pool.predictions[other].ready_us)
            for other, steps in matches.items()
        ]
        found = search.choose(predicted)
        if ask.lookup is not None:
            looked_up = ask.lookup.chains[search.rows[found.worker_id]]
            if looked_up is not None and found.worker_id in held.elsewhere[looked_up]:
                raise NotInHbm(f"worker {found.worker_id} holds blocks in other tiers")
        source = next_source(found.offers[found.computing].fetching, pool.busy_until_us, now)
        return replace(found, source=source), matches

    def _take_turn(self, pool: MemoryPool, booking: Booking, now: int) -> frozenset[str]:
        """The workers that a request must leave to others. Raises MustWait (also if it is not the request's turn) or
        QueueIsFull."""
        waiting, queue = booking.waiting, pool.queue
        if waiting is None or not waiting.may_wait or not queue:
            return frozenset()
        queue.enter(waiting, booking.router_id, now)
        if (blocked := queue.blocked_for(waiting.id)) is None:
            raise MustWait(queue.place_of(waiting.id, WaitReason.TURN))
        return blocked

    def _check_room(
        self,
        pool: MemoryPool,
        router_id: str,
        waiting: WaitingRequest,
        found: Evaluation,
        blocked: frozenset[str],
        now: int,
    ) -> None:
        """Make a request wait unless its workers have room. Raises MustWait or QueueIsFull."""
        queue = pool.queue
        chosen = {found.chosen, found.computing}
        full = any(found.by_offer[number].over & NO_ROOM for number in chosen)
        if not (full or any(found.offers[number].worker_id in blocked for number in chosen)):
            return
        queue.enter(waiting, router_id, now)
        if full:
            queue.narrow(waiting.id)
        raise MustWait(queue.place_of(waiting.id, WaitReason.FULL if full else WaitReason.TURN))

    def _reserve(
        self,
        pool: MemoryPool,
        id: bytes,
        booking: Booking,
        evaluation: Evaluation,
        chosen: int,
        matches: Mapping[bytes, int],
        now: int,
    ) -> None:
        ask = booking.ask
        offer, found = evaluation.offers[chosen], evaluation.by_offer[chosen]
        new_tokens = booking.input_tokens - (found.predicted_tokens or offer.cached_tokens)
        ends_us = now + booking.longest_us
        pool.add_booking(
            id, BookedRequest(offer.worker_id, booking.router_id, now, ends_us, new_tokens, booking.input_tokens)
        )
        kind = offer.kind
        if kind.chain is None:
            return
        mine = {
            other: steps for other, steps in matches.items() if pool.predictions[other].worker_id == offer.worker_id
        }
        first = max([offer.held_steps, *mine.values()])
        for other in sorted(mine, key=lambda other: pool.predictions[other].first):
            self._use_prediction(pool, offer, other, mine[other], now)
        hashes = ask.chains[kind.chain].hashes[first * HASH_BYTES :]
        if not hashes:
            return
        ready = ready_us(offer, found, now)
        ends, capacity = ready + kind.believed_us, kind.capacity_steps
        pool.put_prediction(
            id,
            PredictedPrefix(offer.worker_id, ready, ends, kind.believed_us, first, capacity, hashes, (now, id)),
        )
        while capacity and pool.predicted_steps(offer.worker_id) > capacity:
            of_worker = pool.predicted_for(offer.worker_id)
            pool.remove_prediction(min(of_worker, key=lambda other: pool.predictions[other].used))

    def _use_prediction(self, pool: MemoryPool, offer: Offer, id: bytes, steps: int, now: int) -> None:
        prediction = pool.predictions[id]
        if prediction.capacity_steps:
            ends = max(prediction.ends_us, now + prediction.believed_us)
            pool.put_prediction(id, replace(prediction, ends_us=ends, used=(now, id)))
        elif steps == prediction.first + prediction.steps <= offer.held_steps:
            pool.remove_prediction(id)

    def _settle_prediction(self, pool: MemoryPool, id: bytes, now: int) -> None:
        if (prediction := pool.predictions.get(id)) is not None:
            ready = min(prediction.ready_us, now)
            pool.put_prediction(id, replace(prediction, ready_us=ready, ends_us=now + prediction.believed_us))

    def _drop_reservation(self, pool: MemoryPool, id: bytes, outcome: Outcome, now: int) -> bool:
        reservation = pool.remove_booking(id)
        if reservation is None:
            return False
        pool.queue.record_end(id)
        if reservation.prefilling and outcome is Outcome.FINISHED:
            self._settle_prediction(pool, id, now)
        elif reservation.prefilling or outcome is Outcome.BROKEN:
            pool.remove_prediction(id)
        return True

    def _drop_router(self, pool: MemoryPool, router_id: str, now: int) -> None:
        pool.routers.pop(router_id, None)
        for id in pool.booked_by(router_id):
            self._drop_reservation(pool, id, Outcome.FAILED, now)

    def _drop_worker(self, pool: MemoryPool, worker_id: str, now: int) -> None:
        if (worker := pool.workers.get(worker_id)) is not None:
            for id in list(worker.booked):
                self._drop_reservation(pool, id, Outcome.FAILED, now)
        for id in pool.predicted_for(worker_id):
            pool.remove_prediction(id)

    def _drop_settled_predictions(self, pool: MemoryPool, worker_id: str) -> None:
        """Drop a worker's predictions, except for prompts that it is still computing."""
        for id in pool.predicted_for(worker_id):
            reservation = pool.booked.get(id)
            if reservation is None or not reservation.prefilling:
                pool.remove_prediction(id)

    def _pool(self, pool_id: str) -> MemoryPool:
        return self._pools.setdefault(pool_id, MemoryPool())

    def _purge(self, pool_id: str) -> tuple[MemoryPool, int]:
        """End everything in the pool that has expired. Returns the pool and the time."""
        pool, now = self._pool(pool_id), self._clock_us()
        for id in pool.prediction_ends.take_due(now):
            pool.remove_prediction(id)
        for id in pool.ends.take_due(now):
            self._drop_reservation(pool, id, Outcome.FAILED, now)
        pool.called_off.take_due(now)
        pool.queue.purge(now)
        for router_id in [router_id for router_id, ends_us in pool.routers.items() if ends_us <= now]:
            self._drop_router(pool, router_id, now)
        return pool, now


def _common_steps(mine: bytes, theirs: bytes) -> int:
    """The number of leading steps that are equal."""
    common = 0
    for at in range(0, min(len(mine), len(theirs)), HASH_BYTES):
        if mine[at : at + HASH_BYTES] != theirs[at : at + HASH_BYTES]:
            break
        common += 1
    return common
