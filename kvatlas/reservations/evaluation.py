"""Evaluates offers: what each costs under load, and which is the cheapest. `search` decides which look-alikes need it.

The Lua twin is `functions/_evaluation.lua`. Both compute with the same operations in the same order, so their floats are
equal.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from kvatlas.cost.protocol import Load, Prices
from kvatlas.reservations.likeness import RING, place_on_ring
from kvatlas.reservations.lookup import Lookup, LookupChain
from kvatlas.reservations.pair_choice import choose_pair
from kvatlas.reservations.protocol import (
    Ask,
    Evaluation,
    Fetching,
    LookAlikesUnknown,
    Offer,
    OfferEvaluation,
    OfferKind,
)
from kvatlas.reservations.room_and_slo import UNKNOWN_LIMIT, Limit, Limits, Over, level

HeldTokens = Mapping[LookupChain, Mapping[str, int]]
"""How many tokens of each chain of a lookup workers hold."""


class WorkerLoad(NamedTuple):
    """A worker's `reported` load, None if it is unknown, and the load that has been `booked` since."""

    reported: Load | None
    booked: Load


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prediction that a worker with an offer holds `steps` steps of the prompt, from `ready_us` on."""

    worker_id: str
    steps: int
    ready_us: int


class UsablePrediction(NamedTuple):
    """What a prediction is worth to its worker: the `tokens` that its engine would use, from `ready_us` on."""

    tokens: int
    ready_us: int


class Candidates(NamedTuple):
    """Every worker that an ask may choose: its `offers`, then one for each look-alike; `limits` are in the same order.

    `rings`: ties go to the lowest place: that among the workers that a lookup names, or the distance from the ask's place on
    the ring; -1 for an offer that names its worker. `held_tokens`: what each holds, if that is looked up.
    """

    offers: Sequence[Offer]
    limits: Sequence[Limit]
    rings: Sequence[int]
    held_tokens: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        ask: Ask,
        rows: Mapping[str, int] = MappingProxyType({}),
        limits: Mapping[str, Limit] = MappingProxyType({}),
        held: HeldTokens = MappingProxyType({}),
    ) -> "Candidates":
        """The ask's offers, and those to the workers of `rows` (see `rows_of`), whose limits and held tokens are given."""
        offers, rings = list(ask.offers), [-1] * len(ask.offers)
        each = [UNKNOWN_LIMIT] * len(offers) if ask.limits is None else list(ask.limits.of_offers)
        held_tokens: list[int] = []
        has_room = ask.limits is None or ask.limits.look_alikes_have_room
        places = None if ask.lookup is None else {id: place for place, id in enumerate(ask.lookup.named)}
        for worker_id, row in rows.items():
            group = ask.look_alikes[row]
            if ask.lookup is None:
                offers.append(group.offer._replace(worker_id=worker_id))
            else:
                held_tokens.append(held_by(ask.lookup, row, worker_id, held))
                offers.append(offer_holding(ask, row, worker_id, held_tokens[-1]))
            slots, kv_tokens, _ = UNKNOWN_LIMIT if has_room else limits.get(worker_id, UNKNOWN_LIMIT)
            each.append(Limit(slots, kv_tokens, group.decode_us))
            rings.append(places[worker_id] if places else (place_on_ring(worker_id) - ask.ring) % RING)
        return cls(offers, each, rings, held_tokens)


def rows_of(ask: Ask, likenesses: Mapping[str, bytes]) -> dict[str, int]:
    """The workers that get the offer of a row of look-alikes, each with the number of that row. `likenesses`: those of all
    workers that are known. Raises LookAlikesUnknown."""
    lookup = ask.lookup
    if lookup is not None and lookup.named:
        return dict(lookup.named)
    first: dict[bytes, int] = {}
    for number, each in enumerate(ask.look_alikes):
        first.setdefault(each.likeness, number)
    rows = {id: first[likeness] for id, likeness in likenesses.items() if likeness in first}
    if len(rows) < ask.least_members:
        raise LookAlikesUnknown(f"{len(rows)} look-alikes for an ask; expected at least {ask.least_members}")
    for id, row in ({} if lookup is None else lookup.odd).items():
        if id in rows and likenesses[id] == ask.look_alikes[row].likeness:
            rows[id] = row
    for id in (*(offer.worker_id for offer in ask.offers), *ask.skipped):
        rows.pop(id, None)
    return rows


def held_by(lookup: Lookup, row: int, worker_id: str, held: HeldTokens) -> int:
    """The tokens that a worker of a row holds."""
    chain = lookup.chains[row]
    return 0 if chain is None else held[chain].get(worker_id, 0)


def offer_holding(ask: Ask, row: int, worker_id: str, held_tokens: int) -> Offer:
    """The offer to a worker that holds this much of the prompt, built from its row of look-alikes; the ask has a lookup."""
    assert ask.lookup is not None
    row_offer = ask.look_alikes[row].offer
    kind, base_us, work_us = row_offer.kind, row_offer.base_us, row_offer.work_us
    cached = 0 if ask.lookup.chains[row] is None else ask.lookup.reuse[row].usable_tokens(held_tokens)
    saved = worth_us(kind.prices, cached)
    steps = 0 if kind.chain is None else held_tokens // ask.chains[kind.chain].step_tokens
    if worker_id == ask.lookup.home:
        base_us = base_us - ask.lookup.home_us
    return Offer(worker_id, kind, steps, cached, base_us - saved, work_us - saved)


def next_source(fetching: Fetching | None, busy_until_us: Mapping[str, int], now_us: int) -> str | None:
    """The first source that is free, otherwise the one that becomes free first; None if there are no sources."""
    if fetching is None:
        return None
    return min(fetching.sources, key=lambda source: max(now_us, busy_until_us.get(source, 0)))


class Predictions(NamedTuple):
    """What offered workers are predicted to hold of a prompt: the best prediction for each, and the most tokens that one of
    them is computing now."""

    best: Mapping[str, UsablePrediction] = MappingProxyType({})
    in_flight: int = 0

    @classmethod
    def of(
        cls, ask: Ask, kind_of: Callable[[str], OfferKind | None], matches: Sequence[PrefixMatch], now_us: int
    ) -> "Predictions":
        """The best of `matches`, all of which are about offered workers with a chain. `kind_of`: the kind of a worker's
        offer."""
        best: dict[str, UsablePrediction] = {}
        for one in matches:
            kind = kind_of(one.worker_id)
            assert kind is not None and kind.chain is not None
            tokens = usable_tokens(kind, one.steps * ask.chains[kind.chain].step_tokens)
            known = best.get(one.worker_id)
            if known is None or (-tokens, one.ready_us) < (-known.tokens, known.ready_us):
                best[one.worker_id] = UsablePrediction(tokens, one.ready_us)
        return cls(best, max((found.tokens for found in best.values() if found.ready_us > now_us), default=0))


NOTHING_PREDICTED = Predictions()


class Weighed(NamedTuple):
    """Candidates with the level and the score of each, in the same order; the lowest is the cheapest."""

    ask: Ask
    candidates: Candidates
    scores: Sequence[tuple[int, float]]
    by_offer: Sequence[OfferEvaluation]

    @classmethod
    def of(
        cls,
        ask: Ask,
        candidates: Candidates,
        load_of: Callable[[str], WorkerLoad],
        predictions: Predictions,
        mean: Load,
        now_us: int,
    ) -> "Weighed":
        """`mean` stands in for unknown loads."""
        scores: list[tuple[int, float]] = []
        by_offer: list[OfferEvaluation] = []
        filters = ask.limits is not None and ask.limits.slo_filters
        best, in_flight = predictions
        for offer, limit in zip(candidates.offers, candidates.limits, strict=True):
            id = offer.worker_id
            score, found = evaluate_offer(ask, offer, limit, load_of(id), mean, best.get(id), in_flight, now_us)
            scores.append((level(found.over, slo_filters=filters), score))
            by_offer.append(found)
        return cls(ask, candidates, scores, by_offer)

    def choose(self) -> Evaluation:
        """The cheapest candidate, or pair; no source is busy."""
        ask, (offers, _, rings, held_tokens) = self.ask, self.candidates
        if ask.pair_layout is not None:
            prefill, chosen = choose_pair(ask.pair_layout, self.scores)
        else:
            prefill, chosen = None, min(range(len(offers)), key=lambda i: (self.scores[i], rings[i]))
        source = next_source(offers[chosen if prefill is None else prefill].fetching, {}, 0)
        looked_up = [] if ask.lookup is None else [offer.worker_id for offer in offers]
        return Evaluation(chosen, offers, self.by_offer, prefill, held_tokens, looked_up, source)


def usable_tokens(kind: OfferKind, predicted_tokens: int) -> int:
    """How many tokens of a predicted prefix a worker's engine would reuse."""
    return max(0, min(predicted_tokens, kind.limit_tokens) - kind.lost_tokens)


def worth_us(prices: Prices, tokens: int) -> float:
    """How much time it saves to hold these tokens."""
    us = prices.token_us * tokens + prices.token_squared_us * tokens * tokens
    return us - prices.hit_us if tokens > 0 else us


def backlog_us(prices: Prices, load: Load) -> float:
    """The cost of waiting for the tokens that are queued ahead of a request."""
    return prices.queued_us * (load.queued_prefill_tokens + load.waiting_requests * prices.waiting_tokens)


def left_us(prices: Prices, work_us: float, cached_tokens: int, tokens: int) -> float:
    """What remains of `work_us` if `tokens` instead of `cached_tokens` are cached. Rounding may make it slightly negative."""
    return work_us - (worth_us(prices, tokens) - worth_us(prices, cached_tokens))


def interference_us(interference: float, left_us: float, running: int) -> float:
    """The cost of delaying a worker's `running` requests. An engine computes prompt tokens in the same steps as its decodes
    (chunked prefill), so each open request waits for about as long as the prompt takes (Agrawal et al., Sarathi-Serve,
    2024)."""
    return interference * max(0.0, left_us) * running


def ready_us(offer: Offer, found: OfferEvaluation, now_us: int) -> int:
    """When the prefill of a request should end if the request goes to this offer's worker now."""
    prices, cached = offer.kind.prices, found.predicted_tokens or offer.cached_tokens
    work_us = left_us(prices, offer.work_us, offer.cached_tokens, cached)
    return now_us + math.ceil(backlog_us(prices, found.load) + found.wait_us + max(0, work_us))


def evaluate_offer(
    ask: Ask,
    offer: Offer,
    limit: Limit,
    worker: WorkerLoad,
    mean: Load,
    prediction: UsablePrediction | None,
    in_flight: int,
    now_us: int,
) -> tuple[float, OfferEvaluation]:
    """The cost of an offer, and its parts.

    `mean` stands in for an unknown load. `prediction`: the best prediction for the offer's worker. `in_flight`: the largest
    number of tokens that any worker with an offer is computing now.
    """
    prices = offer.kind.prices
    load = (mean if worker.reported is None else worker.reported) + worker.booked
    backlog = backlog_us(prices, load)
    load_us = prices.running_us * load.running_decodes + prices.kv_us * load.kv_tokens
    score = offer.base_us + backlog + load_us
    cached, used, wait, again = offer.cached_tokens, 0, 0.0, 0
    if prediction is not None and prediction.tokens > cached:
        later = max(0, prediction.ready_us - now_us - backlog)
        other = score - (worth_us(prices, prediction.tokens) - worth_us(prices, cached)) + later
        if other < score:
            score, cached, used, wait = other, prediction.tokens, prediction.tokens, later
    if in_flight > cached:
        again = in_flight - cached
        score = score + ask.again_factor * (worth_us(prices, in_flight) - worth_us(prices, cached))
    work = left_us(prices, offer.work_us, offer.cached_tokens, cached)
    score = score + interference_us(offer.kind.interference, work, load.running_decodes)
    over, missed = 0, 0.0
    if ask.limits is not None:
        over, missed = _check_slo(ask.limits, limit, work + backlog + wait, load_us)
        if worker.reported is not None:
            over |= _check_room(ask.limits, limit, load, worker.reported.kv_tokens, cached)
        score = score + ask.limits.slo_factor * missed
    return score, OfferEvaluation(load, worker.reported is not None, used, wait, again, over, missed)


def _check_slo(limits: Limits, limit: Limit, ttft_us: float, load_us: float) -> tuple[int, float]:
    """Which parts of the SLO would be missed, and by how much (us)."""
    over, missed = 0, 0.0
    if limits.ttft_us > 0 and ttft_us > limits.ttft_us:
        over, missed = over | Over.TTFT, ttft_us - limits.ttft_us
    if limits.decode_us > 0 and limit.decode_us + load_us > limits.decode_us:
        over, missed = over | Over.TPOT, missed + (limit.decode_us + load_us - limits.decode_us)
    return int(over), missed


def _check_room(limits: Limits, limit: Limit, load: Load, kv_tokens: int, cached: int) -> int:
    """The limits that a worker with a known load would exceed. KV for prompts that wait there counts as taken."""
    over = 0
    if limit.slots > 0 and load.running_decodes >= limit.slots:
        over |= Over.SLOTS
    needed = limits.input_tokens - cached
    if limit.kv_tokens > 0 and kv_tokens + load.queued_prefill_tokens + needed > limit.kv_tokens:
        over |= Over.KV
    return int(over)
