"""Finds the cheapest worker of an ask in process, and evaluates only few of its look-alikes.

What a look-alike costs is known from its row, from what it holds, and from its load; a missed SLO adds to it, and a prediction
may lower it. So there is a lower bound for each without a prediction. Those with a prediction are evaluated, then the one with
the lowest bound, then all others whose bounds are no higher than the cheapest of these.

`functions/_lookup.lua` does the same in the store, where not even all loads are read.
"""

from collections.abc import Mapping, Sequence

from kvatlas.cost.protocol import Load, mean_load
from kvatlas.reservations.evaluation import (
    Candidates,
    HeldTokens,
    Predictions,
    PrefixMatch,
    Weighed,
    WorkerLoad,
    offer_holding,
    rows_of,
    worth_us,
)
from kvatlas.reservations.memory_pool import PoolWorker
from kvatlas.reservations.protocol import Ask, Evaluation, LookAlikesUnknown, OfferKind
from kvatlas.reservations.room_and_slo import FULL

FEW = 16
"""So many look-alikes are all evaluated."""
NEARLY_US = 0.001
"""Sums of the same numbers in another order differ by less."""


class Search:
    """The search for the cheapest worker of one ask, now."""

    def __init__(self, ask: Ask, workers: Mapping[str, PoolWorker], held: HeldTokens, now_us: int) -> None:
        """`workers`: all that were reported. `held`: what they hold, for an ask with a lookup. Raises LookAlikesUnknown."""
        self._ask = ask
        self._workers = workers
        self._held = held
        self._now_us = now_us
        self._kinds = {offer.worker_id: offer.kind for offer in ask.offers}
        self.rows: Mapping[str, int] = {}
        """The number of each look-alike's row."""
        if ask.look_alikes:
            self.rows = rows_of(ask, {id: worker.likeness for id, worker in workers.items()})
        if not (ask.offers or self.rows):
            raise LookAlikesUnknown("no look-alikes for an ask")

    def chain_of(self, worker_id: str) -> int | None:
        """The number of the chain by which predictions for a worker are found; None: it has no offer, or there are none."""
        kind = self._kind_of(worker_id)
        return None if kind is None else kind.chain

    def choose(self, matches: Sequence[PrefixMatch]) -> Evaluation:
        """The cheapest worker, or pair. `matches`: all predictions for these workers that share a prefix with the prompt."""
        mean = self._mean()
        predictions = Predictions.of(self._ask, self._kind_of, matches, self._now_us)
        return self._weigh_cheapest(predictions, mean).choose()

    def _kind_of(self, worker_id: str) -> OfferKind | None:
        row = self.rows.get(worker_id)
        return self._kinds.get(worker_id) if row is None else self._ask.look_alikes[row].offer.kind

    def _weigh_cheapest(self, predictions: Predictions, mean: Load) -> Weighed:
        rows, lookup = self.rows, self._ask.lookup
        if len(rows) <= FEW or (lookup is not None and lookup.named):
            return self._weigh(rows, predictions, mean)
        bounds = self._bounds(predictions.in_flight, mean)
        first = {min(bounds)[2], *predictions.best}
        if lookup is not None and lookup.home is not None:
            first.add(lookup.home)
        weighed = self._weigh({id: rows[id] for id in first if id in rows}, predictions, mean)
        level, least_us = min(weighed.scores)
        most_us = least_us + NEARLY_US + abs(least_us) * 1e-12
        others = [id for bound, us, id in bounds if bound < level or (bound == level and not us > most_us)]
        if first.issuperset(others):
            return weighed
        return self._weigh({id: rows[id] for id in first.union(others) if id in rows}, predictions, mean)

    def _weigh(self, rows: Mapping[str, int], predictions: Predictions, mean: Load) -> Weighed:
        """The ask's offers and those to the workers of these rows."""
        limits = {id: worker.limit for id in rows if (worker := self._workers.get(id)) is not None}
        candidates = Candidates.of(self._ask, rows, limits, self._held)
        return Weighed.of(self._ask, candidates, self._load_of, predictions, mean, self._now_us)

    def _load_of(self, worker_id: str) -> WorkerLoad:
        if (worker := self._workers.get(worker_id)) is None:
            return WorkerLoad(None, Load())
        return WorkerLoad(worker.load_at(self._now_us), worker.load_booked)

    def _mean(self) -> Load:
        """The mean load of all candidates whose load is known; idle if there is no other, because it stands in for none."""
        ids = (*(offer.worker_id for offer in self._ask.offers), *self.rows)
        some = [self._workers[id] for id in ids if id in self._workers]
        known = [load for worker in some if (load := worker.load_at(self._now_us)) is not None]
        return mean_load(known) if len(known) < len(ids) else Load()

    def _bounds(self, in_flight: int, mean: Load) -> list[tuple[int, float, str]]:
        """For each look-alike the lowest level that it may have, and the least that it costs at that level unless it has a
        prediction or a session."""
        ask, workers, now_us = self._ask, self._workers, self._now_us
        limits = ask.limits
        checks_room = limits is not None and not limits.look_alikes_have_room
        input_tokens = 0 if limits is None else limits.input_tokens
        chains = [None] * len(ask.look_alikes) if ask.lookup is None else ask.lookup.chains
        held_by_row: list[Mapping[str, int]] = [{} if chain is None else self._held[chain] for chain in chains]
        costs: dict[tuple[int, int], tuple[float, float, float, float, int, int]] = {}
        bounds = []
        for id, row in self.rows.items():
            worker = workers[id]
            place = row, held_by_row[row].get(id, 0)
            if (cost := costs.get(place)) is None:
                cost = costs[place] = self._cost_of(*place, in_flight)
            base_us, queued_us, running_us, kv_us, waiting_tokens, cached = cost
            known = worker.load_at(now_us)
            running, queued, waiting, kv_tokens = mean if known is None else known
            running += worker.running
            queued += worker.queued_tokens
            load_us = queued_us * (queued + waiting * waiting_tokens) + running_us * running
            level = 0
            if checks_room and known is not None:
                slots, most_kv_tokens, _ = worker.limit
                if 0 < slots <= running or 0 < most_kv_tokens < kv_tokens + queued + input_tokens - cached:
                    level = FULL
            bounds.append((level, base_us + load_us + kv_us * (kv_tokens + worker.kv_tokens), id))
        return bounds

    def _cost_of(self, row: int, held_tokens: int, in_flight: int) -> tuple[float, float, float, float, int, int]:
        """What a look-alike of a row that holds this much costs without load; what each queued token, running request and
        token of KV adds to that; the tokens that a waiting request stands for; and the tokens that it does not compute."""
        ask = self._ask
        offer = ask.look_alikes[row].offer if ask.lookup is None else offer_holding(ask, row, "", held_tokens)
        kind, base_us, cached = offer.kind, offer.base_us, offer.cached_tokens
        prices = kind.prices
        if in_flight > cached:
            base_us += ask.again_factor * (worth_us(prices, in_flight) - worth_us(prices, cached))
        running_us = prices.running_us + kind.interference * max(0.0, offer.work_us)
        return base_us, prices.queued_us, running_us, prices.kv_us, prices.waiting_tokens, cached
