"""From prospects to the ask of a booking: each worker's cost without load, and the prompt cut in steps."""

from collections import Counter
from collections.abc import Mapping, Sequence

from kvatlas.reservations import STEP_BLOCKS, Ask, Offer, OfferKind, StepChain
from router_client.pricing.pool import Candidate
from router_client.pricing.quotes import Prospect, Quote
from router_client.pricing.slo import limits_of
from router_client.prompt import Prompt
from router_client.prompt_chain import PromptChain
from router_client.settings import BookingSettings, RouterSettings

USUAL_BLOCK_SIZE = 16


def ask_of(
    prompt: Prompt, prospects: Sequence[Prospect], chains: Mapping[int, PromptChain], settings: RouterSettings
) -> Ask:
    """Offers in the order of `prospects`. `chains`: what was hashed so far, by block size; more is hashed as needed.

    Raises InvalidValue for a token id that is not one.
    """
    booking = settings.booking
    cut: dict[int, int] = {}
    steps: list[StepChain] = []
    predicts = booking.reservations and booking.prefixes_in_flight
    usual = _usual_block_size(prompt, prospects) if predicts else USUAL_BLOCK_SIZE
    kinds: dict[Quote, tuple[OfferKind, int]] = {}
    offers = []
    for prospect in prospects:
        quote = prospect.quote
        if quote not in kinds:
            size = quote.block_size or usual
            if predicts and size not in cut and prompt.input_tokens >= size * STEP_BLOCKS:
                made = StepChain.of(
                    prompt.scope.scope_id, size, (chains.get(size) or PromptChain(prompt, size)).whole()
                )
                if made.hashes:
                    cut[size] = len(steps)
                    steps.append(made)
            kinds[quote] = _kind(quote, size, cut.get(size), booking), size * STEP_BLOCKS
        kind, step_tokens = kinds[quote]
        offers.append(
            Offer(
                prospect.candidate.id,
                kind,
                prospect.own.tokens // step_tokens,
                prospect.cached_tokens,
                prospect.base_us + prospect.surcharge_us,
                prospect.work_us,
            )
        )
    return Ask(offers, steps, booking.again_factor, limits=limits_of(prompt, prospects, settings.limits))


def _kind(quote: Quote, block_size: int, chain: int | None, settings: BookingSettings) -> OfferKind:
    rule, silent = quote.example.rule, not quote.example.endpoint.events
    limit = quote.prompt.input_tokens - rule.recomputed_tokens
    if rule.block_aligned:
        limit -= limit % block_size
    return OfferKind(
        chain=chain,
        limit_tokens=max(0, limit),
        lost_tokens=rule.dropped_blocks * block_size,
        prices=quote.prices,
        believed_us=round((settings.predicted_s if silent else settings.confirm_s) * 1e6),
        capacity_steps=_capacity_steps(quote.example, settings) if silent else 0,
    )


def _capacity_steps(candidate: Candidate, settings: BookingSettings) -> int:
    return max(1, (candidate.total_blocks or settings.predicted_capacity_blocks) // STEP_BLOCKS)


def _usual_block_size(prompt: Prompt, prospects: Sequence[Prospect]) -> int:
    """For workers that have announced nothing yet: what most of the pool has."""
    if prompt.block_size is not None:
        return prompt.block_size
    sizes = Counter(p.candidate.block_size for p in prospects if p.candidate.block_size)
    return min(sizes, key=lambda size: (-sizes[size], size), default=USUAL_BLOCK_SIZE)
