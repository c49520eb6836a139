"""From quotes to the ask of a booking: each worker's cost without load, and the prompt cut into steps."""

from collections import Counter
from collections.abc import Mapping, Sequence

from kvatlas.reservations import STEP_BLOCKS, Ask, Offer, OfferKind, StepChain
from router_client.pricing.pool import Candidate
from router_client.pricing.quotes import KindQuote, Quote
from router_client.pricing.slo import build_limits
from router_client.prompt import Prompt
from router_client.prompt_chain import PromptChain
from router_client.settings import BookingSettings, RouterSettings

DEFAULT_BLOCK_SIZE = 16


def build_ask(
    prompt: Prompt, quotes: Sequence[Quote], chains: Mapping[int, PromptChain], settings: RouterSettings
) -> Ask:
    """Offers in the order of `quotes`. `chains`: by block size, as far as hashed; more is hashed as needed.

    Raises InvalidValue for a token id that is out of range.
    """
    booking = settings.booking
    step_chains: list[StepChain] = []
    numbers: dict[int, int] = {}  # of the step chains, by block size
    predicts = booking.reservations and booking.prefixes_in_flight
    usual_size = _usual_block_size(prompt, quotes) if predicts else DEFAULT_BLOCK_SIZE
    kinds: dict[KindQuote, tuple[OfferKind, int]] = {}
    offers = []
    for quote in quotes:
        for_kind = quote.for_kind
        if for_kind not in kinds:
            size = for_kind.block_size or usual_size
            if predicts and size not in numbers and prompt.input_tokens >= size * STEP_BLOCKS:
                hashes = (chains.get(size) or PromptChain(prompt, size)).all_hashes()
                step_chain = StepChain.of(prompt.scope.scope_id, size, hashes)
                if step_chain.hashes:
                    numbers[size] = len(step_chains)
                    step_chains.append(step_chain)
            kinds[for_kind] = _offer_kind(for_kind, size, numbers.get(size), booking), size * STEP_BLOCKS
        kind, step_tokens = kinds[for_kind]
        offers.append(
            Offer(
                quote.id,
                kind,
                quote.held.tokens // step_tokens,
                quote.cached_tokens,
                quote.base_us + quote.surcharge_us,
                quote.work_us,
            )
        )
    return Ask(offers, step_chains, booking.again_factor, limits=build_limits(prompt, quotes, settings.limits))


def _offer_kind(for_kind: KindQuote, block_size: int, chain: int | None, settings: BookingSettings) -> OfferKind:
    rule, eventless = for_kind.example.rule, not for_kind.example.endpoint.events
    limit = for_kind.prompt.input_tokens - rule.recomputed_tokens
    if rule.block_aligned:
        limit -= limit % block_size
    return OfferKind(
        chain=chain,
        limit_tokens=max(0, limit),
        lost_tokens=rule.dropped_blocks * block_size,
        prices=for_kind.prices,
        believed_us=round((settings.predicted_s if eventless else settings.confirm_s) * 1e6),
        capacity_steps=_capacity_steps(for_kind.example, settings) if eventless else 0,
    )


def _capacity_steps(candidate: Candidate, settings: BookingSettings) -> int:
    return max(1, (candidate.total_blocks or settings.predicted_capacity_blocks) // STEP_BLOCKS)


def _usual_block_size(prompt: Prompt, quotes: Sequence[Quote]) -> int:
    """For workers that have announced no block yet: the size that most of the pool has."""
    if prompt.block_size is not None:
        return prompt.block_size
    sizes = Counter(quote.candidate.block_size for quote in quotes if quote.candidate.block_size)
    return min(sizes, key=lambda size: (-sizes[size], size), default=DEFAULT_BLOCK_SIZE)
