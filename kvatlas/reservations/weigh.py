"""Weighing: which of the offered workers is cheapest. The Lua twin of this file is `kvatlas/pool_functions/_weigh.lua`.

Both compute with the same operations in the same order, so that their floats are equal.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvatlas.cost.plan import Load, Prices, mean_load
from kvatlas.reservations.protocol import Ask, Offer, Weighed, Weighing


@dataclass(frozen=True, slots=True)
class Busy:
    """A worker's load: `reported` where it is known, and what was `booked` since."""

    reported: Load | None
    booked: Load


@dataclass(frozen=True, slots=True)
class Met:
    """A prediction that an offered worker holds `steps` steps of the prompt, from `ready_us` on."""

    worker_id: str
    steps: int
    ready_us: int


def weigh(ask: Ask, busy: Mapping[str, Busy], met: Sequence[Met], now_us: int) -> Weighing:
    """`busy` has every offered worker."""
    mean = mean_load([load for offer in ask.offers if (load := busy[offer.worker_id].reported) is not None])
    offers = {offer.worker_id: offer for offer in ask.offers}
    best: dict[str, tuple[int, int]] = {}
    for one in met:
        offer = offers[one.worker_id]
        assert offer.chain is not None
        tokens = usable_tokens(offer, one.steps * ask.chains[offer.chain].step_tokens)
        if one.worker_id not in best or (-tokens, one.ready_us) < (-best[one.worker_id][0], best[one.worker_id][1]):
            best[one.worker_id] = (tokens, one.ready_us)
    in_flight = max((tokens for tokens, ready_us in best.values() if ready_us > now_us), default=0)

    chosen, least = 0, math.inf
    weighed = []
    for i, offer in enumerate(ask.offers):
        now = busy[offer.worker_id]
        load = (mean if now.reported is None else now.reported) + now.booked
        score, seen = _score(ask, offer, load, best.get(offer.worker_id), in_flight, now_us)
        weighed.append(Weighed(load, now.reported is not None, seen.predicted_tokens, seen.wait_us, seen.again_tokens))
        if score < least:
            chosen, least = i, score
    return Weighing(chosen, weighed)


def usable_tokens(offer: Offer, predicted_tokens: int) -> int:
    """How many tokens of a predicted prefix the worker's engine would reuse."""
    return max(0, min(predicted_tokens, offer.limit_tokens) - offer.lost_tokens)


def worth_us(prices: Prices, tokens: int) -> float:
    """What holding so many tokens saves."""
    return prices.token_us * tokens + prices.token_squared_us * tokens * tokens


def backlog_us(prices: Prices, load: Load) -> float:
    """What the tokens queued before a request cost it."""
    return prices.queued_us * (load.queued_prefill_tokens + load.waiting_requests * prices.waiting_tokens)


def ready_us(offer: Offer, seen: Weighed, now_us: int) -> int:
    """When the prefill of a request should end that goes to the offered worker now."""
    cached = seen.predicted_tokens or offer.cached_tokens
    work_us = offer.work_us - (worth_us(offer.prices, cached) - worth_us(offer.prices, offer.cached_tokens))
    return now_us + math.ceil(backlog_us(offer.prices, seen.load) + seen.wait_us + max(0, work_us))


def _score(
    ask: Ask, offer: Offer, load: Load, prediction: tuple[int, int] | None, in_flight: int, now_us: int
) -> tuple[float, Weighed]:
    prices = offer.prices
    backlog = backlog_us(prices, load)
    score = offer.base_us + backlog + prices.running_us * load.running_decodes + prices.kv_us * load.kv_tokens
    cached, used, wait, again = offer.cached_tokens, 0, 0.0, 0
    if prediction is not None and prediction[0] > cached:
        later = max(0, prediction[1] - now_us - backlog)
        other = score - (worth_us(prices, prediction[0]) - worth_us(prices, cached)) + later
        if other < score:
            score, cached, used, wait = other, prediction[0], prediction[0], later
    if in_flight > cached:
        again = in_flight - cached
        score = score + ask.again_factor * (worth_us(prices, in_flight) - worth_us(prices, cached))
    return score, Weighed(load, True, used, wait, again)
