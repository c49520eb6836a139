"""From prospects to the ask of a booking: each worker's cost without load, and the prompt cut in steps."""

from collections import Counter
from collections.abc import Mapping, Sequence

from kvatlas.cost import CostProfile
from kvatlas.reservations import STEP_BLOCKS, Ask, Offer, OfferKind, StepChain
from kvatlas.reservations.weigh import worth_us
from router_client.chain import PromptChain
from router_client.limits import limits_of
from router_client.pool import Candidate
from router_client.prompt import Prompt
from router_client.ranking import Prospect
from router_client.settings import BookingSettings, RouterSettings

USUAL_BLOCK_SIZE = 16


def ask_of(
    prompt: Prompt,
    prospects: Sequence[Prospect],
    chains: Mapping[int, PromptChain],
    profile: CostProfile,
    settings: RouterSettings,
) -> Ask:
    """Offers in the order of `prospects`. `chains`: what was hashed so far, by block size; more is hashed as needed.

    Raises InvalidValue for a token id that is not one.
    """
    booking = settings.booking
    cut: dict[int, int] = {}
    steps: list[StepChain] = []
    if booking.reservations and booking.prefixes_in_flight:
        usual = _usual_block_size(prompt, prospects)
        for size in {p.candidate.block_size or usual for p in prospects}:
            if prompt.input_tokens >= size * STEP_BLOCKS:
                chain = chains.get(size) or PromptChain(prompt, size)
                made = StepChain.of(prompt.scope.scope_id, size, chain.whole())
                if made.hashes:
                    cut[size] = len(steps)
                    steps.append(made)
    else:
        usual = USUAL_BLOCK_SIZE
    offers = [_offer(prompt, p, p.candidate.block_size or usual, cut, profile, booking) for p in prospects]
    return Ask(offers, steps, booking.again_factor, limits=limits_of(prompt, prospects, settings.limits))


def _offer(
    prompt: Prompt,
    prospect: Prospect,
    block_size: int,
    cut: Mapping[int, int],
    profile: CostProfile,
    settings: BookingSettings,
) -> Offer:
    candidate, plan = prospect.candidate, prospect.plan
    prices, rule, base = profile.prices(plan), candidate.rule, prospect.base
    limit = prompt.input_tokens - rule.recomputed_tokens
    if rule.block_aligned:
        limit -= limit % block_size
    work_us: float
    if base.ttft_us is None:  # a profile that prices no time: its prompt tokens stand for it
        work_us = worth_us(prices, prompt.input_tokens) - worth_us(prices, prospect.cached_tokens)
    else:
        work_us = base.ttft_us
    silent = not candidate.endpoint.events
    return Offer(
        worker_id=prospect.id,
        kind=OfferKind(
            chain=cut.get(block_size),
            limit_tokens=max(0, limit),
            lost_tokens=rule.dropped_blocks * block_size,
            prices=prices,
            believed_us=round((settings.predicted_s if silent else settings.confirm_s) * 1e6),
            capacity_steps=_capacity_steps(candidate, settings) if silent else 0,
        ),
        held_steps=prospect.resident_tokens // (block_size * STEP_BLOCKS),
        cached_tokens=prospect.cached_tokens,
        base_us=base.score_us + prospect.surcharge_us,
        work_us=work_us,
    )


def _capacity_steps(candidate: Candidate, settings: BookingSettings) -> int:
    return max(1, (candidate.total_blocks or settings.predicted_capacity_blocks) // STEP_BLOCKS)


def _usual_block_size(prompt: Prompt, prospects: Sequence[Prospect]) -> int:
    """For workers that have announced nothing yet: what most of the pool has."""
    if prompt.block_size is not None:
        return prompt.block_size
    sizes = Counter(p.candidate.block_size for p in prospects if p.candidate.block_size)
    return min(sizes, key=lambda size: (-sizes[size], size), default=USUAL_BLOCK_SIZE)
