"""Evaluating offers: which of the offered workers is cheapest. The Lua twin of this file is `functions/_evaluation.lua`.

Both compute with the same operations in the same order, so that their floats are equal.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvatlas.cost.protocol import Load, Prices, mean_load
from kvatlas.reservations.limits import Limit, Limits, Over, level
from kvatlas.reservations.pair_choice import choose_pair
from kvatlas.reservations.protocol import Ask, Evaluation, Offer, OfferEvaluation, OfferKind


class WorkerLoad(NamedTuple):
    """A worker's `reported` load, None if it is unknown, and what was `booked` since."""

    reported: Load | None
    booked: Load


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prediction that an offered worker holds `steps` steps of the prompt, from `ready_us` on."""

    worker_id: str
    steps: int
    ready_us: int


def evaluate(ask: Ask, loads: Mapping[str, WorkerLoad], matches: Sequence[PrefixMatch], now_us: int) -> Evaluation:
    """`loads` has every offered worker."""
    mean = mean_load([load for offer in ask.offers if (load := loads[offer.worker_id].reported) is not None])
    offers = {offer.worker_id: offer for offer in ask.offers}
    best: dict[str, tuple[int, int]] = {}
    for one in matches:
        offer = offers[one.worker_id]
        assert offer.kind.chain is not None
        tokens = usable_tokens(offer.kind, one.steps * ask.chains[offer.kind.chain].step_tokens)
        if one.worker_id not in best or (-tokens, one.ready_us) < (-best[one.worker_id][0], best[one.worker_id][1]):
            best[one.worker_id] = (tokens, one.ready_us)
    in_flight = max((tokens for tokens, ready_us in best.values() if ready_us > now_us), default=0)

    scores: list[tuple[int, float]] = []
    by_offer: list[OfferEvaluation] = []
    for i, offer in enumerate(ask.offers):
        worker = loads[offer.worker_id]
        score, found = evaluate_offer(ask, i, worker, mean, best.get(offer.worker_id), in_flight, now_us)
        filters = ask.limits is not None and ask.limits.slo_filters
        scores.append((level(found.over, slo_filters=filters), score))
        by_offer.append(found)
    if ask.pair_layout is not None:
        prefill, chosen = choose_pair(ask.pair_layout, scores)
        return Evaluation(chosen, by_offer, prefill)
    return Evaluation(min(range(len(scores)), key=scores.__getitem__), by_offer)


def usable_tokens(kind: OfferKind, predicted_tokens: int) -> int:
    """How many of a predicted prefix's tokens a worker's engine would reuse."""
    return max(0, min(predicted_tokens, kind.limit_tokens) - kind.lost_tokens)


def worth_us(prices: Prices, tokens: int) -> float:
    """What holding these tokens saves."""
    us = prices.token_us * tokens + prices.token_squared_us * tokens * tokens
    return us - prices.hit_us if tokens > 0 else us


def backlog_us(prices: Prices, load: Load) -> float:
    """What a request pays for the tokens queued before it."""
    return prices.queued_us * (load.queued_prefill_tokens + load.waiting_requests * prices.waiting_tokens)


def ready_us(offer: Offer, found: OfferEvaluation, now_us: int) -> int:
    """When the prefill of a request should end if it goes to the offered worker now."""
    prices, cached = offer.kind.prices, found.predicted_tokens or offer.cached_tokens
    work_us = offer.work_us - (worth_us(prices, cached) - worth_us(prices, offer.cached_tokens))
    return now_us + math.ceil(backlog_us(prices, found.load) + found.wait_us + max(0, work_us))


def evaluate_offer(
    ask: Ask, i: int, worker: WorkerLoad, mean: Load, prediction: tuple[int, int] | None, in_flight: int, now_us: int
) -> tuple[float, OfferEvaluation]:
    """The cost of the i-th offer, and what it comes from.

    `mean` stands in for an unknown load. `prediction`: the best one of the offer's worker, as the tokens that it would use
    and when they are ready. `in_flight`: the most tokens that some offered worker is computing now.
    """
    offer = ask.offers[i]
    prices = offer.kind.prices
    load = (mean if worker.reported is None else worker.reported) + worker.booked
    backlog = backlog_us(prices, load)
    load_us = prices.running_us * load.running_decodes + prices.kv_us * load.kv_tokens
    score = offer.base_us + backlog + load_us
    cached, used, wait, again = offer.cached_tokens, 0, 0.0, 0
    if prediction is not None and prediction[0] > cached:
        later = max(0, prediction[1] - now_us - backlog)
        other = score - (worth_us(prices, prediction[0]) - worth_us(prices, cached)) + later
        if other < score:
            score, cached, used, wait = other, prediction[0], prediction[0], later
    if in_flight > cached:
        again = in_flight - cached
        score = score + ask.again_factor * (worth_us(prices, in_flight) - worth_us(prices, cached))
    over, missed = 0, 0.0
    if ask.limits is not None:
        ttft = offer.work_us - (worth_us(prices, cached) - worth_us(prices, offer.cached_tokens)) + backlog + wait
        over, missed = _check_slo(ask.limits, ask.limits.of_offers[i], ttft, load_us)
        if worker.reported is not None:
            over |= _check_room(ask.limits, ask.limits.of_offers[i], load, worker.reported.kv_tokens, cached)
        score = score + ask.limits.slo_factor * missed
    return score, OfferEvaluation(load, worker.reported is not None, used, wait, again, over, missed)


def _check_slo(limits: Limits, limit: Limit, ttft_us: float, load_us: float) -> tuple[int, float]:
    """Which parts of the SLO are missed, and by how much (us)."""
    over, missed = 0, 0.0
    if limits.ttft_us > 0 and ttft_us > limits.ttft_us:
        over, missed = over | Over.TTFT, ttft_us - limits.ttft_us
    if limits.decode_us > 0 and limit.decode_us + load_us > limits.decode_us:
        over, missed = over | Over.TPOT, missed + (limit.decode_us + load_us - limits.decode_us)
    return int(over), missed


def _check_room(limits: Limits, limit: Limit, load: Load, kv_tokens: int, cached: int) -> int:
    """What a worker of known load has no room for. What waits to be computed there will need its KV first."""
    over = 0
    if limit.slots > 0 and load.running_decodes >= limit.slots:
        over |= Over.SLOTS
    needed = limits.input_tokens - cached
    if limit.kv_tokens > 0 and kv_tokens + load.queued_prefill_tokens + needed > limit.kv_tokens:
        over |= Over.KV
    return int(over)
