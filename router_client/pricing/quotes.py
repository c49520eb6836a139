"""Prospects: what each worker of a pool would do for a request, priced without load.

A worker's plan: read what it holds and its engine can use, compute the rest. A copy held elsewhere counts only where the
candidate and its holder share a transfer group and a block size; then the deepest such copy is the plan's source, if that
is cheaper than computing.

Every choice prices every worker, so what is alike is worked out once a request: a quote for all workers of a kind, and in
it what holding so many tokens saves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvatlas.blocks.tiers import Tier
from kvatlas.cost.protocol import Cost, CostProfile, Load, Piece, Plan, Prices, TermKind
from kvatlas.fleet.records import EngineEndpoint
from kvatlas.reservations.evaluation import worth_us
from router_client.pricing.overlap import NOTHING, HeldPrefix, Run
from router_client.pricing.pool import Candidate, Pool
from router_client.prompt import Prompt


class Surcharge(NamedTuple):
    """What a router's policy adds to a worker's cost: see `router_client.pricing.surcharges`."""

    kind: TermKind
    us: int
    amount: int


@dataclass(frozen=True, slots=True, eq=False)
class Quote:
    """What a request costs, without load, on all workers of a kind (`Candidate.kind`) that hold nothing of it.

    `work_us` of `base_us` pass before the first token; of a profile that prices no time, what its prompt tokens cost stands
    for that. `block_size` 0: these workers have announced nothing yet.
    """

    prompt: Prompt
    example: Candidate
    profile: CostProfile
    nothing: Cost
    prices: Prices
    base_us: float
    work_us: float
    at_hand: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    """By tokens that are resident in HBM: how many are usable, base and work with them."""

    @classmethod
    def of(cls, prompt: Prompt, example: Candidate, profile: CostProfile) -> "Quote":
        """From any worker of the kind."""
        plan = Plan(example.id, prompt.input_tokens, prompt.output_tokens)
        nothing, prices = profile.price(plan), profile.prices(plan)
        whole_us = worth_us(prices, prompt.input_tokens) if nothing.ttft_us is None else nothing.ttft_us
        return cls(prompt, example, profile, nothing, prices, nothing.score_us, whole_us)

    @property
    def block_size(self) -> int:
        """In tokens."""
        return self.example.block_size

    @property
    def cut_tokens(self) -> int:
        """Tokens in which the prompt is cut for these workers."""
        return self.example.block_size or self.prompt.block_size or 1

    @property
    def required_blocks(self) -> int:
        """Full blocks of the prompt; 0 where their size is not known."""
        known = self.block_size or self.prompt.block_size
        return self.prompt.required_blocks(known) if known else 0

    def usable_tokens(self, resident_tokens: int) -> int:
        """Of so many tokens from the prompt's start, those that their engines would not compute again."""
        return self.example.rule.usable_tokens(resident_tokens, self.prompt.input_tokens, self.cut_tokens)

    def holding(self, own: HeldPrefix) -> tuple[int, float, float]:
        """On a worker that holds this: how many tokens are usable, base and work with them."""
        if not own.at_hand:
            usable = self.usable_tokens(own.tokens)
            return usable, *self.priced(self.pieces(own.runs, 0, usable))
        known = self.at_hand.get(own.tokens)
        if known is None:
            usable = self.usable_tokens(own.tokens)
            saved_us = worth_us(self.prices, usable)
            known = self.at_hand[own.tokens] = usable, self.base_us - saved_us, self.work_us - saved_us
        return known

    def priced(self, pieces: Sequence[Piece]) -> tuple[float, float]:
        """Base and work of reading these, and computing the rest."""
        cost = self.profile.price(Plan(self.example.id, self.prompt.input_tokens, self.prompt.output_tokens, pieces))
        if cost.ttft_us is None:
            return cost.score_us, self.work_us - worth_us(self.prices, sum(piece.tokens for piece in pieces))
        return cost.score_us, cost.ttft_us

    def pieces(
        self, runs: Sequence[Run], start: int, end: int, *, own: bool = True, same_domain: bool = True
    ) -> list[Piece]:
        """What is read of these runs from token `start` up to token `end`."""
        return [
            Piece(tokens, self.kv_bytes(tokens), tier, own, same_domain) for tokens, tier in _between(runs, start, end)
        ]

    def kv_bytes(self, tokens: int) -> int:
        """KV bytes of a prompt's tokens, rounded up: as the fleet record says, else the request; 0 for unknown."""
        block_bytes = self.example.endpoint.block_bytes
        if block_bytes:
            return -(-tokens * block_bytes // self.cut_tokens)
        return -(-tokens * self.prompt.block_bytes // (self.prompt.block_size or self.cut_tokens))


class Prospect(NamedTuple):
    """A candidate, and what the request would cost there without load: `base_us`, of which `work_us` pass before the first
    token.

    Besides the `usable` tokens of its `own` it would read the pieces `moved`, of the worker `source`.
    """

    candidate: Candidate
    quote: Quote
    own: HeldPrefix
    usable: int
    base_us: float
    work_us: float
    moved: Sequence[Piece] = ()
    source: str | None = None
    surcharges: tuple[Surcharge, ...] = ()
    surcharge_us: int = 0

    @property
    def id(self) -> str:
        return self.candidate.id

    @property
    def transferred(self) -> int:
        """Tokens in `moved`."""
        return sum(piece.tokens for piece in self.moved) if self.moved else 0

    @property
    def cached_tokens(self) -> int:
        return self.usable + self.transferred

    def plan(self, load: Load, predicted_tokens: int) -> Plan:
        """What it would do under load, with so many more tokens in its HBM by then."""
        quote = self.quote
        pieces = [*quote.pieces(self.own.runs, 0, self.usable), *self.moved]
        if predicted_tokens:
            pieces.append(Piece(predicted_tokens, 0, Tier.HBM))
        return Plan(self.candidate.id, quote.prompt.input_tokens, quote.prompt.output_tokens, pieces, load)


def rendezvous(fingerprint: bytes, worker_id: str) -> int:
    """A worker's weight for a prompt, where costs tie: the highest wins. Equal prompts meet, different ones spread."""
    return xxh3_64_intdigest(worker_id.encode() + b"\x00" + fingerprint)


def prospects(
    prompt: Prompt,
    pool: Pool,
    held: Mapping[str, HeldPrefix],
    *,
    fingerprint: bytes = b"",
    candidates: Sequence[Candidate] | None = None,
) -> list[Prospect]:
    """Every candidate (absent: the pool's), in the order in which ties go."""
    sources = _Sources(pool, held) if pool.givers else None
    some = pool.candidates if candidates is None else candidates
    weights = [rendezvous(fingerprint, candidate.id) for candidate in some]
    quotes: dict[int, Quote] = {}
    found = []
    for i in sorted(range(len(some)), key=weights.__getitem__, reverse=True):
        candidate = some[i]
        quote = quotes.get(candidate.kind)
        if quote is None:
            quote = quotes[candidate.kind] = Quote.of(prompt, candidate, pool.profile)
        own = held.get(candidate.id, NOTHING)
        prospect = Prospect(candidate, quote, own, *quote.holding(own))
        found.append(prospect if sources is None else sources.best(prospect))
    return found


def _between(runs: Sequence[Run], start: int, end: int) -> list[tuple[int, Tier]]:
    """The part of runs from token `start` up to token `end`, which they reach: tokens, and the nearest tier they are in.

    Neighbours in one tier are one, also where only some of them are in farther tiers as well."""
    if len(runs) == 1:  # as most are
        return [(end - start, runs[0].tiers[0])] if start < end else []
    found: list[tuple[int, Tier]] = []
    position = 0
    for run in runs:
        first, last = max(position, start), min(position + run.tokens, end)
        if first < last:
            before = found.pop()[0] if found and found[-1][1] is run.tiers[0] else 0
            found.append((before + last - first, run.tiers[0]))
        position += run.tokens
    return found


@dataclass(frozen=True, slots=True)
class _Deepest:
    """The deepest copy in one transfer group: of all, and of each locality domain."""

    of_all: EngineEndpoint
    by_domain: Mapping[str, EngineEndpoint]


class _Sources:
    """Whose copies a candidate may read; built once a ranking, so that the work grows with workers, not their pairs."""

    def __init__(self, pool: Pool, held: Mapping[str, HeldPrefix]) -> None:
        self._held = held
        self._groups: dict[tuple[str, int], _Deepest] = {}
        members: dict[tuple[str, int], list[EngineEndpoint]] = {}
        for endpoint in pool.givers:
            if endpoint.id in held and endpoint.block_size:
                for group in endpoint.transfer_groups:
                    members.setdefault((group, endpoint.block_size), []).append(endpoint)
        for key, endpoints in members.items():
            endpoints.sort(key=self._depth)
            self._groups[key] = _Deepest(endpoints[-1], {e.locality_domain: e for e in endpoints})

    def best(self, prospect: Prospect) -> Prospect:
        """With the copy to read, where one makes it cheaper."""
        quote, best = prospect.quote, prospect
        reader = prospect.candidate.endpoint
        for source in self._of(reader, prospect.own.tokens):
            there = self._held[source.id]
            reach = quote.usable_tokens(there.tokens)
            if reach > prospect.usable:
                near = source.locality_domain == reader.locality_domain
                moved = quote.pieces(there.runs, prospect.usable, reach, own=False, same_domain=near)
                base_us, work_us = quote.priced([*quote.pieces(prospect.own.runs, 0, prospect.usable), *moved])
                if base_us < best.base_us:
                    best = prospect._replace(base_us=base_us, work_us=work_us, moved=moved, source=source.id)
        return best

    def _of(self, candidate: EngineEndpoint, own_tokens: int) -> list[EngineEndpoint]:
        """At most two a group: the deepest copy, and the deepest in the candidate's own domain; deeper than its own."""
        found: dict[str, EngineEndpoint] = {}
        for group in candidate.transfer_groups:
            deepest = self._groups.get((group, candidate.block_size or 0))
            if deepest is None:
                continue
            for source in (deepest.by_domain.get(candidate.locality_domain), deepest.of_all):
                if source is not None and self._held[source.id].tokens > own_tokens:
                    found[source.id] = source
        return list(found.values())

    def _depth(self, endpoint: EngineEndpoint) -> tuple[int, int]:
        """Deeper is better; at equal depth the one whose farthest tier is nearer."""
        held = self._held[endpoint.id]
        return held.tokens, -max(run.tiers[0] for run in held.runs)
