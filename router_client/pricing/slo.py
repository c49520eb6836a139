"""What limits a request meets on each worker: room as the engine tells it, and the request's SLO as the settings say."""

from collections.abc import Sequence
from enum import StrEnum

from kvatlas.request import SelectionResult, Slo
from kvatlas.reservations.limits import UNKNOWN_LIMIT, Limit, Limits
from router_client.pricing.quotes import Prospect
from router_client.prompt import Prompt
from router_client.settings import LimitSettings, SloMode


def limits_of(prompt: Prompt, found: Sequence[Prospect], settings: LimitSettings) -> Limits | None:
    """Of prospects in their order; None where there is nothing to look at.

    A profile that predicts no time knows of no SLO.
    """
    each = [p.candidate.limit for p in found] if settings.room else [UNKNOWN_LIMIT] * len(found)
    if settings.slo is SloMode.TOLD or not found or found[0].quote.nothing.ttft_us is None:
        return Limits(each, prompt.input_tokens) if each.count(UNKNOWN_LIMIT) < len(each) else None
    return Limits(
        [
            Limit(one.slots, one.kv_tokens, prompt.output_tokens * (p.quote.nothing.tpot_us or 0))
            for one, p in zip(each, found, strict=True)
        ],
        prompt.input_tokens,
        prompt.slo.ttft_ms * 1_000,
        prompt.output_tokens * prompt.slo.tpot_ms * 1_000,
        settings.slo_factor if settings.slo is SloMode.PENALTY else 0.0,
        settings.slo is SloMode.FILTER,
    )


class Advice(StrEnum):
    """What to do with a request. `GO`: send it. `QUEUE`: every worker has no room or misses the SLO: hold it back, or send
    it and expect it to wait. `SHED`: the best one misses it by far: refuse the request, others gain more."""

    GO = "go"
    QUEUE = "queue"
    SHED = "shed"


def advise(results: Sequence[SelectionResult], slo: Slo, shed_factor: float) -> Advice:
    """By every candidate. To be shed: the earliest first token takes more than `shed_factor` times what the SLO allows."""
    if results and not (results[0].over and all(result.over for result in results)):
        return Advice.GO
    earliest_us = earliest_ttft_us(results)
    if earliest_us is None:
        return Advice.QUEUE if results else Advice.SHED
    return Advice.SHED if earliest_us > shed_factor * slo.ttft_ms * 1_000 else Advice.QUEUE


def earliest_ttft_us(results: Sequence[SelectionResult]) -> int | None:
    """The earliest first token of all candidates; None where the profile does not predict it."""
    return min((result.cost.ttft_us for result in results if result.cost.ttft_us is not None), default=None)
