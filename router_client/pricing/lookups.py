"""Quotes for a choice that itself looks up workers' blocks: a cold quote for each kind of worker.

A cold quote is lowered by what a worker holds (`kvatlas.reservations.lookup`). So a choice waits neither for a lookup nor for a
quote for every worker, whatever the workers hold and however fast they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import overload

from xxhash import xxh3_64_intdigest

from kvatlas.blocks.hashing import thin
from kvatlas.blocks.tiers import Tier
from kvatlas.dataclass import dataclass
from kvatlas.reservations import Ask, Evaluation, Lookup, LookupChain, OfferEvaluation, Reuse
from kvatlas.reservations.lookup import MOST_LOOKED_UP, MOST_LOOKED_UP_CHAINS, MOST_ODD_BYTES
from kvatlas.reservations.memory import Held
from kvatlas.reservations.protocol import MOST_LIKENESSES
from kvatlas.reservations.room_and_slo import UNKNOWN_LIMIT, Limit
from router_client.pricing.candidates import BlockShape, Candidate
from router_client.pricing.look_alikes import LEAST_CANDIDATES, keep_offers
from router_client.pricing.overlap import NOTHING_HELD, HeldPrefix, PromptLookup, Run, chain_for
from router_client.pricing.pool import Pool
from router_client.pricing.quotes import KindQuote, Quote, in_tie_order
from router_client.pricing.surcharges import away_from_session
from router_client.prompt import Prompt


@dataclass(frozen=True, slots=True)
class LookupQuotes:
    """`kinds`: maps the number of a kind to what its workers share. `rows`: likeness and quote for each row of look-alikes;
    the quote's candidate is any worker of that row. `empty`: the prompt's chains, with nothing looked up yet.

    `ring`: the prompt's place on the ring of equals (`kvatlas.reservations.likeness`). In a small pool the lookup names the
    candidates in tie-breaking order instead.
    """

    prompt: Prompt
    pool: Pool
    kinds: Mapping[int, KindQuote]
    rows: Sequence[tuple[bytes, Quote]]
    lookup: Lookup
    empty: PromptLookup
    ring: int

    def for_pool(self, pool: Pool) -> "LookupQuotes":
        """The same quotes, for a later read of the pool in which the kinds are numbered differently."""
        return replace(self, pool=pool, kinds=_quote_kinds(self.prompt, pool))

    def match(self, evaluation: Evaluation) -> tuple[Sequence[Quote], Sequence[OfferEvaluation], int | None]:
        """Match an evaluation's offers with quotes. Returns the quotes, the evaluations of the offers, and the position
        of the chosen one.

        Workers that this reading of the pool does not have yet are left out; None: the chosen worker is one of them.
        """
        known, kept, members = self.pool.candidate_of, [], []
        for number, worker_id in enumerate(evaluation.worker_ids):
            candidate = known.get(worker_id)
            if candidate is not None and candidate.kind in self.kinds:
                kept.append(number)
                members.append((candidate, evaluation.held_tokens[number]))
        return MemberQuotes(self, members), *keep_offers(evaluation, kept)

    def including(self, worker_id: str) -> "LookupQuotes":
        """The quotes if the lookup names this worker, otherwise the quote for this worker alone."""
        if worker_id in self.lookup.named:
            return self
        candidate = self.pool.candidate_of[worker_id]
        return replace(self, lookup=replace(self.lookup, named={worker_id: self._row_of(candidate)}))

    def held_in(self, lookup: PromptLookup) -> Held:
        """What workers hold of the prompt's chains. A worker is compared with only one of these."""
        tokens = {id: prefix.tokens for id, prefix in lookup.held.items()}
        elsewhere = {id for id, prefix in lookup.held.items() if not prefix.in_hbm}
        chains = self.lookup.distinct_chains
        return Held(dict.fromkeys(chains, tokens), dict.fromkeys(chains, elsewhere))

    def limit_of(self, worker_id: str, ask: Ask) -> Limit:
        """The limit of a worker, which the ask offers to its row."""
        if ask.limits is None:
            return UNKNOWN_LIMIT
        candidate = self.pool.candidate_of[worker_id]
        slots, kv_tokens, _ = UNKNOWN_LIMIT if ask.limits.look_alikes_have_room else candidate.limit
        return Limit(slots, kv_tokens, ask.look_alikes[self._row_of(candidate)].decode_us)

    def _row_of(self, candidate: Candidate) -> int:
        return self.pool.kind_rows.numbers[candidate.likeness, candidate.kind]

    def quote(self, candidate: Candidate, held_tokens: int) -> Quote:
        """A worker's quote, surcharges included."""
        for_kind = self.kinds[candidate.kind]
        prefix = _in_hbm(held_tokens) if held_tokens else NOTHING_HELD
        quote = Quote(candidate, for_kind, prefix, *for_kind.price_prefix(prefix))
        home = self.lookup.home
        return quote if home in (None, candidate.id) else away_from_session(quote, self.lookup.home_us)


class MemberQuotes(Sequence[Quote]):
    """Quotes that are built only when they are read, because a router reads just one of those that the store
    returned."""

    def __init__(self, quotes: LookupQuotes, held: Sequence[tuple[Candidate, int]]) -> None:
        self._quotes = quotes
        self._held = held

    @overload
    def __getitem__(self, index: int) -> Quote: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Quote]: ...
    def __getitem__(self, index: int | slice) -> Quote | Sequence[Quote]:
        if isinstance(index, slice):
            return MemberQuotes(self._quotes, self._held[index])
        return self._quotes.quote(*self._held[index])

    def __len__(self) -> int:
        return len(self._held)

    def number_of(self, worker_id: str) -> int | None:
        """The position of a worker's quote, without building the quote; None if there is none."""
        return next((i for i, (candidate, _) in enumerate(self._held) if candidate.id == worker_id), None)


def quote_lookup(
    prompt: Prompt,
    pool: Pool,
    seed: bytes,
    known: PromptLookup | None = None,
    *,
    home: str | None = None,
    session_us: float = 0.0,
    explain_all: bool = False,
) -> LookupQuotes | None:
    """The quotes; None if every worker has to be priced separately (`why_not_looked_up`). `known`: a lookup whose chains are
    used. `home`: the worker of the prompt's session; all others cost `session_us` more."""
    if why_not_looked_up(prompt, pool, explain_all=explain_all):
        return None
    empty = PromptLookup.empty(prompt, pool.block_shapes) if known is None else replace(known, held={})
    fingerprint = empty.fingerprint + seed
    looked_up: dict[BlockShape, LookupChain] = {}
    kinds = _quote_kinds(prompt, pool)
    rows: list[tuple[bytes, Quote]] = []
    chains: list[LookupChain | None] = []
    reuse: list[Reuse] = []
    for likeness, example in pool.kind_rows.rows:
        for_kind = kinds[example.kind]
        cold = Quote(example, for_kind, NOTHING_HELD, *for_kind.price_prefix(NOTHING_HELD))
        rows.append((likeness, cold if home is None else away_from_session(cold, session_us)))
        shape = example.shape
        if shape is not None and shape not in looked_up:
            hashes = thin(chain_for(prompt, shape, empty.chains).all_hashes(), shape.granularity)
            looked_up[shape] = LookupChain(shape.block_size * shape.granularity, hashes)
        chains.append(None if shape is None else looked_up[shape])
        readable = prompt.reading.readable_tokens(example.endpoint.kind)
        reuse.append(Reuse.of(example.rule, prompt.input_tokens, for_kind.block_tokens, readable))
    home_us = 0.0 if home is None else float(round(session_us))
    if len(pool.candidates) < LEAST_CANDIDATES:
        numbers = pool.kind_rows.numbers
        named = {one.id: numbers[one.likeness, one.kind] for one in in_tie_order(pool.candidates, fingerprint)}
        lookup, ring = Lookup(prompt.scope, chains, reuse, {}, home, home_us, named), 0
    else:
        lookup = Lookup(prompt.scope, chains, reuse, pool.kind_rows.odd, home, home_us)
        ring = xxh3_64_intdigest(fingerprint) >> 32
    return LookupQuotes(prompt, pool, kinds, rows, lookup, empty, ring)


def _quote_kinds(prompt: Prompt, pool: Pool) -> Mapping[int, KindQuote]:
    """What the workers of each kind share, by the number of the kind."""
    examples = {example.kind: example for _, example in pool.kind_rows.rows}
    return {kind: KindQuote.of(prompt, example, pool.profile) for kind, example in examples.items()}


def why_not_looked_up(prompt: Prompt, pool: Pool, *, explain_all: bool = False) -> str:
    """Why a choice first needs a lookup of its own, in a few words; empty if it does not."""
    if not pool.candidates:
        return "no worker can take the prompt"
    large = len(pool.candidates) >= LEAST_CANDIDATES
    if large and explain_all:
        return "every worker of a large pool is explained"
    if large and not pool.groups:
        return "too many workers are left out"
    if pool.sources or pool.stores:
        return "what workers read from elsewhere depends on what all of them hold"
    if pool.kind_rows.have_marks:
        return "marks are looked up separately"
    if len(pool.block_shapes) > MOST_LOOKED_UP_CHAINS:
        return "the workers' blocks have too many shapes for one call"
    blocks = sum(prompt.input_tokens // (shape.block_size * shape.granularity) for shape in pool.block_shapes)
    if blocks > MOST_LOOKED_UP:
        return "the prompt is too long for one call"
    too_many = len(pool.kind_rows.rows) > MOST_LIKENESSES or pool.kind_rows.odd_bytes > MOST_ODD_BYTES
    return "there are too many kinds of workers" if too_many else ""


@lru_cache(maxsize=16_384)
def _in_hbm(tokens: int) -> HeldPrefix:
    return HeldPrefix.of((Run(tokens, (Tier.HBM,)),))
