"""Quotes for a large pool without a quote for every worker: workers that stand out are named, and the others are
look-alikes.

A worker stands out if it holds a different part of the prompt than most workers of its likeness, or is of a different kind
(its learned rates differ). The store finds the cheapest of the rest by their load
(`kvatlas.reservations.protocol.LookAlikes`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from xxhash import xxh3_64_intdigest

from kvatlas.dataclass import dataclass
from kvatlas.reservations import Evaluation, OfferEvaluation
from kvatlas.reservations.protocol import MOST_LIKENESSES, MOST_OFFERS
from router_client.pricing.candidates import Candidate, Group
from router_client.pricing.overlap import NOTHING_HELD, HeldPrefix
from router_client.pricing.pool import Pool
from router_client.pricing.quote_desk import QuoteDesk
from router_client.pricing.quotes import Quote
from router_client.prompt import Prompt

LEAST_CANDIDATES = 17
"""In smaller pools, every worker is named."""
MOST_NAMED = 128
KNOWN_SHARE = 0.875
"""The store should know at least this share of the candidates; its records may be a heartbeat older or newer than ours."""


@dataclass(frozen=True, slots=True)
class LookAlikeQuotes:
    """`named`: quotes for named workers, in tie-breaking order. `look_alikes`: a quote for each likeness; its candidate
    is any worker of that likeness.

    `ring`: the prompt's place on the ring of equals (`kvatlas.reservations.likeness`).
    """

    pool: Pool
    named: Sequence[Quote]
    look_alikes: Mapping[bytes, Quote]
    ring: int

    def for_pool(self, pool: Pool) -> "LookAlikeQuotes":
        """The same quotes, for a later read of the pool."""
        return replace(self, pool=pool)

    def match(self, evaluation: Evaluation) -> tuple[list[Quote], Sequence[OfferEvaluation], int | None]:
        """Match an evaluation's offers with quotes. Returns the quotes, the evaluations of the offers, and the position
        of the chosen one.

        Workers that this reading of the pool does not have yet are left out; None: the chosen worker is one of them.
        """
        quotes, first = list(self.named), len(self.named)
        kept = list(range(first))
        for number in range(first, len(evaluation.offers)):
            candidate = self.pool.candidate_of.get(evaluation.offers[number].worker_id)
            quote = self.look_alikes.get(candidate.likeness) if candidate is not None else None
            if candidate is not None and quote is not None:
                quotes.append(quote._replace(candidate=candidate))
                kept.append(number)
        return quotes, *keep_offers(evaluation, kept)


def keep_offers(evaluation: Evaluation, kept: Sequence[int]) -> tuple[Sequence[OfferEvaluation], int | None]:
    """The evaluations of the offers with these numbers, and the position of the chosen one among them (None: it is not
    among them)."""
    by_offer, chosen = evaluation.by_offer, kept.index(evaluation.chosen) if evaluation.chosen in kept else None
    return by_offer if len(kept) == len(by_offer) else [by_offer[number] for number in kept], chosen


def least_members(pool: Pool) -> int:
    """Minimum number of a pool's look-alikes that the store should know."""
    return int(KNOWN_SHARE * sum(group.size for group in pool.groups))


def quote_look_alikes(
    prompt: Prompt, pool: Pool, held: Mapping[str, HeldPrefix], fingerprint: bytes, *, named: Sequence[str] = ()
) -> LookAlikeQuotes | None:
    """Quotes for a large pool; None if the pool is small or has many likenesses, or if too many workers stand out. `named`:
    candidates to name in any case."""
    if not 0 < len(pool.groups) <= MOST_LIKENESSES or len(pool.candidates) < LEAST_CANDIDATES:
        return None
    desk = QuoteDesk(prompt, pool, held)
    apart: dict[str, Candidate] = {id: pool.candidate_of[id] for id in named}
    look_alikes: dict[bytes, Quote] = {}
    holders: dict[bytes, list[str]] = {}
    for id in held:
        if (candidate := pool.candidate_of.get(id)) is not None:
            holders.setdefault(candidate.likeness, []).append(id)
    for group in pool.groups:
        usual, other = _usual_prefix(group, held, holders.get(group.likeness, ()))
        look_alikes[group.likeness] = desk.quote(group.example, usual)
        for id in (*other, *group.odd):
            if (candidate := pool.candidate_of.get(id)) is not None:
                apart[id] = candidate
        if len(apart) > MOST_NAMED:
            return None
    if len(apart) + len(look_alikes) > MOST_OFFERS:
        return None
    ring = xxh3_64_intdigest(fingerprint) >> 32
    return LookAlikeQuotes(pool, desk.quote_all(list(apart.values()), fingerprint), look_alikes, ring)


def _usual_prefix(
    group: Group, held: Mapping[str, HeldPrefix], holders: Sequence[str]
) -> tuple[HeldPrefix, Sequence[str]]:
    """The prefix that most workers of a group hold, and the workers that hold a different one."""
    if 2 * len(holders) <= len(group.ids):
        return NOTHING_HELD, holders
    ((usual, count),) = Counter(held[id] for id in holders).most_common(1)
    if 2 * count <= len(group.ids):
        return NOTHING_HELD, holders
    other = [id for id in holders if held[id] != usual]
    return usual, [*other, *(group.ids - set(holders))]
