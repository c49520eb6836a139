"""Turns quotes into the ask for a booking: each worker's cost without load, and the prompt, cut into steps."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.reservations import STEP_BLOCKS, Ask, LookAlikes, Lookup, Offer, OfferKind, StepChain
from kvatlas.reservations.protocol import MOST_STEPS
from kvatlas.reservations.room_and_slo import UNKNOWN_LIMIT, Limit
from router_client.pricing.candidates import Candidate
from router_client.pricing.quotes import KindQuote, Quote
from router_client.pricing.slo import build_limits, decode_us
from router_client.prompt import Prompt
from router_client.prompt_chain import PromptChain
from router_client.settings import BookingSettings, RouterSettings

DEFAULT_BLOCK_SIZE = 16


def build_ask(
    prompt: Prompt,
    quotes: Sequence[Quote],
    chains: Mapping[int, PromptChain],
    settings: RouterSettings,
    usual_block_size: int | None,
    look_alikes: Sequence[tuple[bytes, Quote]] = (),
    *,
    skipped: Collection[str] = (),
    least_members: int = 0,
    ring: int = 0,
    lookup: Lookup | None = None,
) -> Ask:
    """Return offers in the order of `quotes`, then offers for look-alikes with their likeness. `chains`: maps a block
    size to its chain, which is hashed further as needed; workers with other block sizes get no prediction.
    `usual_block_size`: the pool's usual block size, used for workers that have not announced a block yet. The other
    arguments: see `Ask`.

    Raises InvalidValue for an out-of-range token id.
    """
    booking = settings.booking
    step_chains: list[StepChain] = []
    numbers: dict[int, int] = {}  # numbers of the step chains, by block size
    predicts = booking.reservations and booking.prefixes_in_flight
    kinds: dict[KindQuote, tuple[OfferKind, int]] = {}

    def kind_of(for_kind: KindQuote) -> tuple[OfferKind, int]:
        known = kinds.get(for_kind)
        if known is None:
            size = for_kind.block_size or prompt.block_size or usual_block_size or DEFAULT_BLOCK_SIZE
            looked_up = size in chains or not for_kind.block_size
            if predicts and looked_up and size not in numbers and prompt.input_tokens >= size * STEP_BLOCKS:
                hashes = (chains.get(size) or PromptChain(prompt, size)).all_hashes()
                step_chain = StepChain.of(prompt.scope.scope_id, size, hashes)
                steps = sum(len(one.hashes) for one in (*step_chains, step_chain)) // HASH_BYTES
                if step_chain.hashes and steps <= MOST_STEPS:
                    numbers[size] = len(step_chains)
                    step_chains.append(step_chain)
            known = kinds[for_kind] = _offer_kind(for_kind, size, numbers.get(size), booking), size * STEP_BLOCKS
        return known

    def offer_of(quote: Quote, worker_id: str) -> Offer:
        kind, step_tokens = kind_of(quote.for_kind)
        base_us, held_steps = quote.offered_us, quote.held.tokens // step_tokens
        return Offer(worker_id, kind, held_steps, quote.cached_tokens, base_us, quote.work_us, quote.fetching)

    offers = [offer_of(quote, quote.id) for quote in quotes]
    limits = build_limits(prompt, quotes, settings.limits, [quote for _, quote in look_alikes])
    to_look_alikes = [
        LookAlikes(likeness, offer_of(quote, ""), 0.0 if limits is None else decode_us(prompt, quote))
        for likeness, quote in look_alikes
    ]
    return Ask(
        offers,
        step_chains,
        booking.again_factor,
        limits,
        None,
        to_look_alikes,
        skipped,
        least_members,
        ring,
        lookup,
    )


def ask_for_one(ask: Ask, offer: Offer, limit: Limit) -> Ask:
    """The ask with this offer only."""
    limits = None if ask.limits is None else replace(ask.limits, of_offers=[limit])
    return Ask([offer], ask.chains, ask.again_factor, limits)


def narrow_ask(ask: Ask, worker_id: str) -> Ask:
    """The ask with only its offer to this worker."""
    number = next(number for number, offer in enumerate(ask.offers) if offer.worker_id == worker_id)
    return ask_for_one(ask, ask.offers[number], UNKNOWN_LIMIT if ask.limits is None else ask.limits.of_offers[number])


def _offer_kind(for_kind: KindQuote, block_size: int, chain: int | None, settings: BookingSettings) -> OfferKind:
    rule, eventless = for_kind.example.rule, not for_kind.example.endpoint.events
    readable = for_kind.prompt.reading.readable_tokens(for_kind.example.endpoint.kind)
    limit = rule.limit_tokens(for_kind.prompt.input_tokens, readable)
    if rule.block_aligned:
        limit -= limit % block_size
    return OfferKind(
        # marks don't show yet where a prompt in flight can resume, so nothing is predicted for workers with marks
        chain=None if for_kind.example.endpoint.marks else chain,
        limit_tokens=max(0, limit),
        lost_tokens=rule.dropped_blocks * block_size,
        prices=for_kind.prices,
        believed_us=round((settings.predicted_s if eventless else settings.confirm_s) * 1e6),
        capacity_steps=_capacity_steps(for_kind.example, settings) if eventless else 0,
        interference=for_kind.interference(settings.interference_factor),
    )


def _capacity_steps(candidate: Candidate, settings: BookingSettings) -> int:
    return max(1, (candidate.total_blocks or settings.predicted_capacity_blocks) // STEP_BLOCKS)
