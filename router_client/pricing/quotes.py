"""Quotes: what a request would cost on each worker of a pool, without load.

A quote is the price of a plan: read what the worker holds and its engine can use, and compute the rest. A worker that names a
shared store also reads what the store holds beyond that: its engine does so whether or not it pays off. Blocks of another
worker are read if the engine can fetch them and that is cheaper; see `copies`.

Every choice prices every candidate, so common parts are computed once per request: one `KindQuote` for all workers of a kind,
and in it the savings for a held prefix of a given length.
"""

from collections.abc import Sequence
from dataclasses import field
from heapq import nsmallest
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvatlas.blocks.tiers import Tier
from kvatlas.cost.protocol import Cost, CostProfile, Load, Piece, Plan, Prices, ReadRate, TermKind
from kvatlas.dataclass import dataclass
from kvatlas.fleet.records import EngineEndpoint, Role
from kvatlas.reservations.evaluation import worth_us
from kvatlas.reservations.protocol import MOST_OFFERS, Fetching
from router_client.pricing.candidates import Candidate
from router_client.pricing.overlap import HeldPrefix, Run
from router_client.prompt import Prompt


class Surcharge(NamedTuple):
    """An addition to a worker's cost: either by the router's policy (`router_client.pricing.surcharges`) or NOT_FETCHED, the
    expected cost of fetched blocks that don't arrive."""

    kind: TermKind
    us: int
    amount: int


class PrefixPrice(NamedTuple):
    """The price of a request given a held prefix, of which `usable_tokens` don't have to be computed.

    `work_us` of `base_us` pass before the first token.
    """

    usable_tokens: int
    base_us: float
    work_us: float


@dataclass(frozen=True, slots=True, eq=False)
class KindQuote:
    """The cost of a request, without load, on any worker of a kind (`Candidate.kind`) that holds none of it.

    `work_us` of `base_us` pass before the first token; if the profile predicts no time, the price of the prompt's tokens
    stands in. `block_size` 0: these workers have not announced any block yet.
    """

    prompt: Prompt
    example: Candidate
    profile: CostProfile
    cold_cost: Cost
    prices: Prices
    base_us: float
    work_us: float
    hbm_prices: dict[tuple[int, int | None], PrefixPrice] = field(default_factory=dict)
    """Prices by the number of tokens held in HBM and by how far marks let the engine resume."""

    @classmethod
    def of(cls, prompt: Prompt, example: Candidate, profile: CostProfile) -> "KindQuote":
        """Build the quote from any worker of the kind."""
        plan = Plan(example.id, prompt.input_tokens, prompt.output_tokens)
        cold_cost, prices = profile.price(plan), profile.prices(plan)
        work_us = worth_us(prices, prompt.input_tokens) if cold_cost.ttft_us is None else cold_cost.ttft_us
        return cls(prompt, example, profile, cold_cost, prices, cold_cost.score_us, work_us)

    @property
    def block_size(self) -> int:
        """The block size in tokens."""
        return self.example.block_size

    @property
    def block_tokens(self) -> int:
        """The block size in which the prompt is counted: the workers', or else the prompt's, or else 1."""
        return self.example.block_size or self.prompt.block_size or 1

    @property
    def required_blocks(self) -> int:
        """Number of blocks in the prompt, including a partial last one; 0 if the block size is unknown."""
        known = self.block_size or self.prompt.block_size
        return self.prompt.required_blocks(known) if known else 0

    def interference(self, factor: float) -> float:
        """The cost of each microsecond by which a prompt delays an open request: `factor`, or 0 if no running answer could
        be delayed there or if the profile predicts no time."""
        waits = self.cold_cost.ttft_us is not None and self.example.endpoint.role is not Role.PREFILL
        return factor if waits else 0.0

    def usable_tokens(self, held: HeldPrefix) -> int:
        """The number of tokens at the prompt's start that the engine would not compute again if it held this prefix."""
        return held.usable_tokens(self.example.rule, self.prompt, self.example.endpoint.kind, self.block_tokens)

    def price_prefix(self, held: HeldPrefix) -> PrefixPrice:
        """The price on a worker that holds this prefix."""
        if not held.tokens:
            return PrefixPrice(0, self.base_us, self.work_us)
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
        """`base_us` and `work_us` for reading these pieces and computing the rest."""
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
        source: EngineEndpoint | None = None,
        same_domain: bool = True,
        rate: ReadRate | None = None,
    ) -> list[Piece]:
        """The pieces of these runs to read, from token `start` up to token `end`, one per run. `source`: the worker or
        store that holds them, if it is not the worker itself."""
        pieces = []
        for tokens, tier in _clip_runs(runs, start, end):
            kv_bytes = self.kv_bytes(start, start + tokens, tier, 0 if source is None else source.bytes_in(tier.label))
            pieces.append(Piece(tokens, kv_bytes, tier, source is None, same_domain, rate))
            start += tokens
        return pieces

    def kv_bytes(self, first: int, end: int, tier: Tier, block_bytes: int = 0) -> int:
        """KV bytes of the prompt's tokens `first` up to `end` in a tier, rounded up. `block_bytes`: bytes per block at the
        source; if unknown (0), those of the worker's fleet record, otherwise the request's; 0 if unknown."""
        block_bytes = block_bytes or self.example.endpoint.bytes_in(tier.label)
        if block_bytes:
            return -(-(end - first) * block_bytes // self.block_tokens)
        return self.prompt.kv_bytes(first, end, self.block_tokens)


class Quote(NamedTuple):
    """The cost of a request on one candidate, ignoring load: `base_us` in total, of which `work_us` comes before the first
    token.

    The worker would reuse `usable_tokens` of its held prefix, and read `transfers` from the worker or shared store
    `source`. Reading from another worker takes `transfer_us`; `equal_sources` are the workers that would serve it equally
    well, `source` among them.
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
    equal_sources: tuple[str, ...] = ()
    transfer_us: int = 0

    @property
    def id(self) -> str:
        """The worker's id."""
        return self.candidate.id

    @property
    def offered_us(self) -> float:
        """The cost without load, including surcharges."""
        return self.base_us + self.surcharge_us

    @property
    def fetching(self) -> Fetching | None:
        """What the candidate would fetch from other workers."""
        return Fetching(self.equal_sources, self.transfer_us) if self.equal_sources else None

    @property
    def transferred_tokens(self) -> int:
        """The number of tokens in `transfers`."""
        return sum(piece.tokens for piece in self.transfers) if self.transfers else 0

    @property
    def cached_tokens(self) -> int:
        """The number of tokens that don't have to be computed, because they are held here or read from the source."""
        return self.usable_tokens + self.transferred_tokens

    def plan(self, load: Load, predicted_tokens: int) -> Plan:
        """The worker's plan under a load, with this many more tokens predicted to be in its HBM by then."""
        prompt = self.for_kind.prompt
        pieces = [*self.for_kind.pieces(self.held.runs, 0, self.usable_tokens), *self.transfers]
        if predicted_tokens:
            pieces.append(Piece(predicted_tokens, 0, Tier.HBM))
        return Plan(self.candidate.id, prompt.input_tokens, prompt.output_tokens, pieces, load)


def rendezvous_weight(fingerprint: bytes, worker_id: str) -> int:
    """A worker's weight for a prompt; the highest wins if costs tie. So identical prompts go to the same worker, and
    different prompts are spread."""
    return xxh3_64_intdigest(worker_id.encode() + b"\x00" + fingerprint)


def in_tie_order(candidates: Sequence[Candidate], fingerprint: bytes) -> Sequence[Candidate]:
    """The candidates in the order in which ties are broken."""
    return sorted(candidates, key=lambda one: rendezvous_weight(fingerprint, one.id), reverse=True)


def _clip_runs(runs: Sequence[Run], start: int, end: int) -> list[tuple[int, Tier]]:
    """Cut runs to the tokens from `start` up to `end`, which they must reach. Returns token counts and their nearest
    tiers.

    Adjacent runs with the same nearest tier are merged, even if only some of them are also in farther tiers."""
    if len(runs) == 1:  # the usual case
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


def with_source(quotes: Sequence[Quote], worker_id: str, source: str | None) -> Sequence[Quote]:
    """The quotes, with one worker's quote changed to the source that its booking chose (None: it fetches nothing)."""
    if source is None:
        return quotes
    return [quote._replace(source=source) if quote.id == worker_id else quote for quote in quotes]


def shortlist(quotes: Sequence[Quote], kept: str | None = None, most: int = MOST_OFFERS) -> Sequence[Quote]:
    """The quotes that are cheapest without load, in their original order, at most as many as one ask may name; the worker
    `kept` is always among them."""
    if len(quotes) <= most:
        return quotes
    return [quotes[i] for i in cheapest(quotes, most, kept)]


def cheapest(quotes: Sequence[Quote], most: int, kept: str | None = None) -> list[int]:
    """The positions of the quotes that `shortlist` keeps."""
    found = nsmallest(most, range(len(quotes)), key=lambda i: (quotes[i].id != kept, quotes[i].offered_us))
    return sorted(found)
