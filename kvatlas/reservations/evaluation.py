"""Evaluates offers: finds the cheapest of the workers that offers are made to, by looking at every one of them.

The twin of this file in Lua is `functions/_evaluation.lua`. It finds the same worker without looking at all look-alikes
(`functions/_look_alikes.lua`). Both do the same operations in the same order, so their floats are equal.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from kvatlas.cost.protocol import Load, Prices, mean_load
from kvatlas.reservations.likeness import RING, place_on_ring
from kvatlas.reservations.lookup import LookupChain
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

    `rings`: ties go to the lowest place (see `_row_members`); -1 for an offer that names its worker. `held_tokens`: how much
    each of them holds, if that is looked up.
    """

    offers: Sequence[Offer]
    limits: Sequence[Limit]
    rings: Sequence[int]
    held_tokens: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        ask: Ask,
        members: Mapping[str, tuple[bytes, Limit]],
        depths: Mapping[LookupChain, Mapping[str, int]] = MappingProxyType({}),
    ) -> "Candidates":
        """Expand an ask. `members`: the likeness and the limit of every possible look-alike. `depths`: how many blocks of each
        chain of its lookup the workers hold. Raises LookAlikesUnknown."""
        offers, rings = list(ask.offers), [-1] * len(ask.offers)
        limits = [UNKNOWN_LIMIT] * len(offers) if ask.limits is None else list(ask.limits.of_offers)
        held_tokens: list[int] = []
        has_room = ask.limits is None or ask.limits.look_alikes_have_room
        for worker_id, row, ring in _row_members(ask, members):
            group = ask.look_alikes[row]
            if ask.lookup is None:
                offers.append(group.offer._replace(worker_id=worker_id))
            else:
                chain = ask.lookup.chains[row]
                held_tokens.append(0 if chain is None else depths[chain].get(worker_id, 0) * chain.tokens)
                offers.append(offer_holding(ask, row, worker_id, held_tokens[-1]))
            _, limit = members.get(worker_id, (b"", UNKNOWN_LIMIT))
            slots, kv_tokens = (0, 0) if has_room else (limit.slots, limit.kv_tokens)
            limits.append(Limit(slots, kv_tokens, group.decode_us))
            rings.append(ring)
        if not offers:
            raise LookAlikesUnknown("no look-alikes for an ask")
        return cls(offers, limits, rings, held_tokens)


def _row_members(ask: Ask, members: Mapping[str, tuple[bytes, Limit]]) -> Iterator[tuple[str, int, int]]:
    """The workers that get the offer made to a row of look-alikes, each with the number of that row and with its distance from
    the ask's place on the ring, or with its place among the workers that a lookup names. Raises LookAlikesUnknown."""
    if ask.lookup is not None and ask.lookup.named:
        for place, (worker_id, row) in enumerate(ask.lookup.named.items()):
            yield worker_id, row, place
        return
    others = {*(offer.worker_id for offer in ask.offers), *ask.skipped}
    likenesses = [each.likeness for each in ask.look_alikes]
    found = {id: likeness for id, (likeness, _) in members.items() if likeness in likenesses}
    if len(found) < ask.least_members:
        raise LookAlikesUnknown(f"{len(found)} look-alikes for an ask; expected at least {ask.least_members}")
    for worker_id, likeness in found.items():
        if worker_id not in others:
            lookup, first = ask.lookup, likenesses.index(likeness)
            row = first if lookup is None else lookup.row_of(worker_id, likeness, likenesses)
            yield worker_id, row, (place_on_ring(worker_id) - ask.ring) % RING


def offer_holding(ask: Ask, row: int, worker_id: str, held_tokens: int) -> Offer:
    """The offer to a worker that holds this much of the prompt, made from its row of look-alikes in an ask with a lookup."""
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


def evaluate(
    ask: Ask, candidates: Candidates, loads: Mapping[str, WorkerLoad], matches: Sequence[PrefixMatch], now_us: int
) -> Evaluation:
    """Choose the cheapest candidate, or the cheapest pair, as if no source were busy. `loads` lists every candidate."""
    offers = candidates.offers
    mean = mean_load([load for offer in offers if (load := loads[offer.worker_id].reported) is not None])
    kinds = {offer.worker_id: offer.kind for offer in offers}
    best: dict[str, UsablePrediction] = {}
    for one in matches:
        kind = kinds[one.worker_id]
        assert kind.chain is not None
        tokens = usable_tokens(kind, one.steps * ask.chains[kind.chain].step_tokens)
        known = best.get(one.worker_id)
        if known is None or (-tokens, one.ready_us) < (-known.tokens, known.ready_us):
            best[one.worker_id] = UsablePrediction(tokens, one.ready_us)
    in_flight = max((found.tokens for found in best.values() if found.ready_us > now_us), default=0)

    scores: list[tuple[int, float]] = []
    by_offer: list[OfferEvaluation] = []
    filters = ask.limits is not None and ask.limits.slo_filters
    for offer, limit in zip(offers, candidates.limits, strict=True):
        worker, prediction = loads[offer.worker_id], best.get(offer.worker_id)
        score, found = evaluate_offer(ask, offer, limit, worker, mean, prediction, in_flight, now_us)
        scores.append((level(found.over, slo_filters=filters), score))
        by_offer.append(found)
    if ask.pair_layout is not None:
        prefill, chosen = choose_pair(ask.pair_layout, scores)
    else:
        prefill, chosen = None, min(range(len(scores)), key=lambda i: (scores[i], candidates.rings[i]))
    source = next_source(offers[chosen if prefill is None else prefill].fetching, {}, now_us)
    looked_up = [] if ask.lookup is None else [offer.worker_id for offer in offers]
    return Evaluation(chosen, offers, by_offer, prefill, candidates.held_tokens, looked_up, source)


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
