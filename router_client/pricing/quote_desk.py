"""Quotes all candidates of a pool for one prompt. What they have in common is computed only once."""

from collections.abc import Mapping, Sequence

from router_client.pricing.candidates import Candidate
from router_client.pricing.copies import CopySources
from router_client.pricing.overlap import NOTHING_HELD, HeldPrefix
from router_client.pricing.pool import Pool
from router_client.pricing.quotes import KindQuote, Quote, in_tie_order
from router_client.prompt import Prompt


def quote_candidates(
    prompt: Prompt,
    pool: Pool,
    held: Mapping[str, HeldPrefix],
    *,
    fingerprint: bytes = b"",
    candidates: Sequence[Candidate] | None = None,
) -> list[Quote]:
    """A quote for every candidate (default: the pool's candidates), in the order in which ties are broken."""
    desk = QuoteDesk(prompt, pool, held)
    return desk.quote_all(pool.candidates if candidates is None else candidates, fingerprint)


class QuoteDesk:
    """Quotes workers of a pool for one prompt. What they have in common is computed only once."""

    def __init__(self, prompt: Prompt, pool: Pool, held: Mapping[str, HeldPrefix]) -> None:
        self._prompt = prompt
        self._profile = pool.profile
        self._held = held
        self._sources = CopySources(prompt, pool, held) if pool.sources or pool.stores else None
        self._kinds: dict[int, KindQuote] = {}

    def quote(self, candidate: Candidate, prefix: HeldPrefix) -> Quote:
        """Quote a candidate that holds this prefix."""
        for_kind = self._kinds.get(candidate.kind)
        if for_kind is None:
            for_kind = self._kinds[candidate.kind] = KindQuote.of(self._prompt, candidate, self._profile)
        quote = Quote(candidate, for_kind, prefix, *for_kind.price_prefix(prefix))
        return quote if self._sources is None else self._sources.add_best(quote)

    def quote_all(self, candidates: Sequence[Candidate], fingerprint: bytes) -> list[Quote]:
        """Quote all candidates, in tie-breaking order."""
        held = self._held
        return [self.quote(one, held.get(one.id, NOTHING_HELD)) for one in in_tie_order(candidates, fingerprint)]
