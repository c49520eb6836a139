"""Quotes: what a request would cost on each worker of a pool, without load.

A quote is the price of a plan: read what the worker holds and its engine can use, compute the rest. What a shared store holds
beyond that is read too, by a worker that names it: its engine asks no router whether that pays. A copy on another worker
counts only if both share a transfer group and a block size; then the deepest such copy is the plan's source, if reading it is
cheaper.

Every choice prices every candidate, so what is common is worked out once a request: one `KindQuote` for all workers of a
kind, and in it what a held prefix of a given length saves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvatlas.blocks.tiers import Tier
from kvatlas.cost.protocol import Cost, CostProfile, Load, Piece, Plan, Prices, ReadRate, TermKind
from kvatlas.fleet.records import EngineEndpoint, Role
from kvatlas.reservations.evaluation import worth_us
from router_client.pricing.overlap import NOTHING_HELD, HeldPrefix, Run
from router_client.pricing.pool import Candidate, Pool
from router_client.prompt import Prompt


class Surcharge(NamedTuple):
    """An addition to a worker's cost by the router's policy: see `router_client.pricing.surcharges`."""

    kind: TermKind
    us: int
    amount: int


class PrefixPrice(NamedTuple):
    """A request's price with a held prefix of which `usable_tokens` need not be computed.

    `work_us` of `base_us` pass before the first token.
    """

    usable_tokens: int
    base_us: float
    work_us: float


@dataclass(frozen=True, slots=True, eq=False)
class KindQuote:
    """The cost of a request, without load, on any worker of a kind (`Candidate.kind`) that holds nothing of it.

    `work_us` of `base_us` pass before the first token; for a profile that predicts no time, the price of the prompt's
    tokens stands in. `block_size` 0: these workers have announced no block yet.
    """

    prompt: Prompt
    example: Candidate
    profile: CostProfile
    cold_cost: Cost
    prices: Prices
    base_us: float
    work_us: float
    hbm_prices: dict[tuple[int, int | None], PrefixPrice] = field(default_factory=dict)
    """By the number of tokens held in HBM, and up to where marks let the engine resume."""

    @classmethod
    def of(cls, prompt: Prompt, example: Candidate, profile: CostProfile) -> "KindQuote":
        """From any worker of the kind."""
        plan = Plan(example.id, prompt.input_tokens, prompt.output_tokens)
        cold_cost, prices = profile.price(plan), profile.prices(plan)
        work_us = worth_us(prices, prompt.input_tokens) if cold_cost.ttft_us is None else cold_cost.ttft_us
        return cls(prompt, example, profile, cold_cost, prices, cold_cost.score_us, work_us)

    @property
    def block_size(self) -> int:
        """In tokens."""
        return self.example.block_size

    @property
    def block_tokens(self) -> int:
        """The block size that the prompt is counted in: the workers', else the prompt's, else 1."""
        return self.example.block_size or self.prompt.block_size or 1

    @property
    def required_blocks(self) -> int:
        """Blocks of the prompt, its partial last one among them; 0 if their size is not known."""
        known = self.block_size or self.prompt.block_size
        return self.prompt.required_blocks(known) if known else 0

    def interference(self, factor: float) -> float:
        """What a microsecond costs by which a prompt delays an open request: `factor`, but 0 if nothing decodes there that
        could wait, or if the profile predicts no time."""
        waits = self.cold_cost.ttft_us is not None and self.example.endpoint.role is not Role.PREFILL
        return factor if waits else 0.0

    def usable_tokens(self, held: HeldPrefix) -> int:
        """How many of the prompt's first tokens the engine would not compute again if it held this."""
        return held.usable_tokens(self.example.rule, self.prompt, self.example.endpoint.kind, self.block_tokens)

    def price_prefix(self, held: HeldPrefix) -> PrefixPrice:
        """On a worker that holds this."""
        if not held.in_hbm:
            usable = self.usable_tokens(held)
            return PrefixPrice(usable, *self.price_pieces(self.pieces(held.runs, 0, usable)))
        key = held.tokens, held.reach_tokens
        known = self.hbm_prices.get(key)
        if known is None:
            usable = self.usable_tokens(held)
            saved_us = worth_us(self.prices, usable)
            known = PrefixPrice(usable, self.base_us - saved_us, self.work_us - saved_us)
            self.hbm_prices[key] = known
        return known

    def price_pieces(self, pieces: Sequence[Piece]) -> tuple[float, float]:
        """`base_us` and `work_us` of reading these, and computing the rest."""
        cost = self.profile.price(Plan(self.example.id, self.prompt.input_tokens, self.prompt.output_tokens, pieces))
        if cost.ttft_us is None:
            return cost.score_us, self.work_us - worth_us(self.prices, sum(piece.tokens for piece in pieces))
        return cost.score_us, cost.ttft_us

    def pieces(
        self,
        runs: Sequence[Run],
        start: int,
        end: int,
        *,
        own: bool = True,
        same_domain: bool = True,
        rate: ReadRate | None = None,
    ) -> list[Piece]:
        """The reads of these runs from token `start` up to token `end`, one for each run."""
        pieces = []
        for tokens, tier in _clip_runs(runs, start, end):
            pieces.append(Piece(tokens, self.kv_bytes(start, start + tokens), tier, own, same_domain, rate))
            start += tokens
        return pieces

    def kv_bytes(self, first: int, end: int) -> int:
        """KV bytes of the prompt's tokens `first` up to `end`, rounded up: as the fleet record says, else the request; 0 for
        unknown."""
        block_bytes = self.example.endpoint.block_bytes
        if block_bytes:
            return -(-(end - first) * block_bytes // self.block_tokens)
        return self.prompt.kv_bytes(first, end, self.block_tokens)


class Quote(NamedTuple):
    """The cost of a request on one candidate without load: `base_us`, of which `work_us` pass before the first token.

    The worker would reuse `usable_tokens` of the prefix that it holds, and read `transfers` from the worker or shared store
    `source`.
    """

    candidate: Candidate
    for_kind: KindQuote
    held: HeldPrefix
    usable_tokens: int
    base_us: float
    work_us: float
    transfers: Sequence[Piece] = ()
    source: str | None = None
    reads_store: bool = False
    surcharges: tuple[Surcharge, ...] = ()
    surcharge_us: int = 0

    @property
    def id(self) -> str:
        """The worker's."""
        return self.candidate.id

    @property
    def transferred_tokens(self) -> int:
        """Tokens in `transfers`."""
        return sum(piece.tokens for piece in self.transfers) if self.transfers else 0

    @property
    def cached_tokens(self) -> int:
        """Tokens that need not be computed: held here, or read from the source."""
        return self.usable_tokens + self.transferred_tokens

    def plan(self, load: Load, predicted_tokens: int) -> Plan:
        """The worker's plan under a load, with this many more tokens predicted to be in its HBM by then."""
        prompt = self.for_kind.prompt
        pieces = [*self.for_kind.pieces(self.held.runs, 0, self.usable_tokens), *self.transfers]
        if predicted_tokens:
            pieces.append(Piece(predicted_tokens, 0, Tier.HBM))
        return Plan(self.candidate.id, prompt.input_tokens, prompt.output_tokens, pieces, load)


def rendezvous_weight(fingerprint: bytes, worker_id: str) -> int:
    """A worker's weight for a prompt; if costs tie, the highest wins. Equal prompts meet, different ones spread."""
    return xxh3_64_intdigest(worker_id.encode() + b"\x00" + fingerprint)


def quote_candidates(
    prompt: Prompt,
    pool: Pool,
    held: Mapping[str, HeldPrefix],
    *,
    fingerprint: bytes = b"",
    candidates: Sequence[Candidate] | None = None,
) -> list[Quote]:
    """A quote for every candidate (`candidates` absent: the pool's), in the order in which ties are broken."""
    desk = QuoteDesk(prompt, pool, held)
    return desk.quote_all(pool.candidates if candidates is None else candidates, fingerprint)


class QuoteDesk:
    """Quotes workers of a pool for one prompt, with what they have in common worked out once."""

    def __init__(self, prompt: Prompt, pool: Pool, held: Mapping[str, HeldPrefix]) -> None:
        self._prompt = prompt
        self._profile = pool.profile
        self._held = held
        self._sources = _CopySources(pool, held) if pool.sources or pool.stores else None
        self._kinds: dict[int, KindQuote] = {}

    def quote(self, candidate: Candidate, prefix: HeldPrefix) -> Quote:
        """For a candidate that holds this."""
        for_kind = self._kinds.get(candidate.kind)
        if for_kind is None:
            for_kind = self._kinds[candidate.kind] = KindQuote.of(self._prompt, candidate, self._profile)
        quote = Quote(candidate, for_kind, prefix, *for_kind.price_prefix(prefix))
        return quote if self._sources is None else self._sources.add_best(quote)

    def quote_all(self, candidates: Sequence[Candidate], fingerprint: bytes) -> list[Quote]:
        """In the order in which ties are broken."""
        weights = [rendezvous_weight(fingerprint, candidate.id) for candidate in candidates]
        order = sorted(range(len(candidates)), key=weights.__getitem__, reverse=True)
        return [self.quote(candidates[i], self._held.get(candidates[i].id, NOTHING_HELD)) for i in order]


def _read_rate(source: EngineEndpoint) -> ReadRate | None:
    """How fast a shared store says that it is read."""
    setup_us, us_per_mib = source.read_setup_us, source.read_us_per_mib
    return None if setup_us is None and us_per_mib is None else ReadRate(setup_us or 0, us_per_mib or 0)


def _clip_runs(runs: Sequence[Run], start: int, end: int) -> list[tuple[int, Tier]]:
    """The part of runs from token `start` up to token `end`, which they reach: tokens, and the nearest tier they are in.

    Neighbours in one nearest tier are one, even if only some of them are in farther tiers as well."""
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
class _DeepestCopies:
    """The deepest copy in one transfer group: of all, and in each locality domain."""

    of_all: EngineEndpoint
    by_domain: Mapping[str, EngineEndpoint]


class _CopySources:
    """Whose copies a candidate may read; built once a request, so that the work grows with workers, not with their pairs."""

    def __init__(self, pool: Pool, held: Mapping[str, HeldPrefix]) -> None:
        self._held = held
        self._stores = {endpoint.id: endpoint for endpoint in pool.stores if endpoint.id in held}
        self._deepest: dict[tuple[str, int], _DeepestCopies] = {}
        members: dict[tuple[str, int], list[EngineEndpoint]] = {}
        for endpoint in pool.sources:
            if endpoint.id in held and endpoint.block_size:
                for group in endpoint.transfer_groups:
                    members.setdefault((group, endpoint.block_size), []).append(endpoint)
        for key, endpoints in members.items():
            endpoints.sort(key=self._depth)
            self._deepest[key] = _DeepestCopies(endpoints[-1], {e.locality_domain: e for e in endpoints})

    def add_best(self, quote: Quote) -> Quote:
        """The quote with the copy to read: that of a shared store, unless one on another worker makes it cheaper."""
        reader = quote.candidate.endpoint
        best = self._read_store(quote, reader) if self._stores and reader.stores else quote
        for source in self._of(reader, quote.held.copied_tokens):
            read = self._read(quote, source)
            if read is not None and read.base_us < best.base_us:
                best = read
        return best

    def _read(self, quote: Quote, source: EngineEndpoint) -> Quote | None:
        """The quote with what the source holds beyond the worker's own; None if that is nothing."""
        for_kind, reader, copy = quote.for_kind, quote.candidate.endpoint, self._held[source.id]
        reach = for_kind.usable_tokens(copy)
        if reach <= quote.usable_tokens:
            return None
        near = source.locality_domain == reader.locality_domain
        rate = _read_rate(source)
        transfers = for_kind.pieces(copy.runs, quote.usable_tokens, reach, own=False, same_domain=near, rate=rate)
        own = for_kind.pieces(quote.held.runs, 0, quote.usable_tokens)
        base_us, work_us = for_kind.price_pieces([*own, *transfers])
        return quote._replace(
            base_us=base_us, work_us=work_us, transfers=transfers, source=source.id, reads_store=source.is_store
        )

    def _read_store(self, quote: Quote, reader: EngineEndpoint) -> Quote:
        """The quote with what the deepest of the reader's shared stores holds beyond its own; of equally deep ones the one that
        is read fastest.

        Nothing of a store for a worker with marks: its other groups' blocks are not told there.
        """
        shape = reader.block_size, reader.lookahead_tokens
        if reader.marks:
            return quote
        reads = [
            read
            for id in reader.stores
            if (store := self._stores.get(id)) is not None
            and (store.block_size, store.lookahead_tokens) == shape
            and (read := self._read(quote, store)) is not None
        ]
        return min(reads, key=lambda read: (-read.transferred_tokens, read.base_us), default=quote)

    def _of(self, candidate: EngineEndpoint, own_tokens: int) -> list[EngineEndpoint]:
        """At most two a group, deeper than the candidate's own: the deepest copy, and the deepest in its own domain."""
        found: dict[str, EngineEndpoint] = {}
        for group in candidate.transfer_groups:
            deepest = self._deepest.get((group, candidate.block_size or 0))
            if deepest is None:
                continue
            for source in (deepest.by_domain.get(candidate.locality_domain), deepest.of_all):
                if source is not None and self._held[source.id].copied_tokens > own_tokens:
                    found[source.id] = source
        return list(found.values())

    def _depth(self, endpoint: EngineEndpoint) -> tuple[int, int]:
        """Deeper is better; at equal depth the copy whose farthest tier is nearer."""
        held = self._held[endpoint.id]
        return held.copied_tokens, -max(run.tiers[0] for run in held.runs)
