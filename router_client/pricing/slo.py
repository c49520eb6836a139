"""What limits a request on each worker (the capacity it reports, and the SLO), and the resulting advice."""

from collections.abc import Sequence
from enum import StrEnum

from kvatlas.request import SelectionResult, Slo
from kvatlas.reservations.room_and_slo import UNKNOWN_LIMIT, Limit, Limits
from router_client.pricing.quotes import Quote
from router_client.prompt import Prompt
from router_client.settings import LimitSettings, SloMode


def build_limits(
    prompt: Prompt, quotes: Sequence[Quote], settings: LimitSettings, look_alikes: Sequence[Quote] = ()
) -> Limits | None:
    """The limits for quotes, in the same order; None if nothing has to be checked. `look_alikes`: the quotes for
    look-alikes.

    If the profile predicts no time, the SLO is not checked.
    """
    each = [_limit_after_transfer(quote) for quote in quotes] if settings.room else [UNKNOWN_LIMIT] * len(quotes)
    predicts_time = any(quote.for_kind.cold_cost.ttft_us is not None for quote in (*quotes[:1], *look_alikes[:1]))
    if settings.slo is SloMode.TOLD or not predicts_time:
        if (look_alikes and settings.room) or each.count(UNKNOWN_LIMIT) < len(each):
            return Limits(each, prompt.input_tokens, look_alikes_have_room=not settings.room)
        return None
    return Limits(
        [Limit(one.slots, one.kv_tokens, decode_us(prompt, quote)) for one, quote in zip(each, quotes, strict=True)],
        prompt.input_tokens,
        prompt.slo.ttft_ms * 1_000,
        prompt.output_tokens * prompt.slo.tpot_ms * 1_000,
        settings.slo_factor if settings.slo is SloMode.PENALTY else 0.0,
        settings.slo is SloMode.FILTER,
        not settings.room,
    )


def _limit_after_transfer(quote: Quote) -> Limit:
    """The worker's limit, minus the space for what it reads from elsewhere."""
    limit, tokens = quote.candidate.limit, quote.transferred_tokens
    return limit._replace(kv_tokens=max(1, limit.kv_tokens - tokens)) if tokens and limit.kv_tokens else limit


def decode_us(prompt: Prompt, quote: Quote) -> float:
    """The time for all tokens after the first, on a worker without load."""
    return prompt.output_tokens * (quote.for_kind.cold_cost.tpot_us or 0)


class Advice(StrEnum):
    """Advice for a request. `GO`: send it. `QUEUE`: every worker is full or misses the SLO, so hold the request back, or send
    it and expect it to wait. `SHED`: even the best worker misses the SLO by far, so refuse the request in favor of others."""

    GO = "go"
    QUEUE = "queue"
    SHED = "shed"


def advise(results: Sequence[SelectionResult], slo: Slo, shed_factor: float) -> Advice:
    """The advice, from every candidate. SHED if the earliest first token takes more than `shed_factor` times the SLO."""
    if results and not (results[0].over and all(result.over for result in results)):
        return Advice.GO
    earliest_us = earliest_ttft_us(results)
    if earliest_us is None:
        return Advice.QUEUE if results else Advice.SHED
    return Advice.SHED if earliest_us > shed_factor * slo.ttft_ms * 1_000 else Advice.QUEUE


def earliest_ttft_us(results: Sequence[SelectionResult]) -> int | None:
    """The shortest time to the first token among all candidates; None if the profile does not predict it."""
    return min((result.cost.ttft_us for result in results if result.cost.ttft_us is not None), default=None)
