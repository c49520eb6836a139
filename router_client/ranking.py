"""Which worker a request should go to: pure ranking of a pool by cost.

Candidates are the workers that may get a prompt now (alive, up, not decode-only), also those that hold nothing. What
each would do is a plan: read what it holds and its engine can use, compute the rest. A copy held elsewhere counts only
where the candidate and its holder share a transfer group and a block size; then the deepest such copy is the plan's
source, if that is cheaper than computing. A worker that does not tell its load is taken to have the mean of those that
do. Load comes last, because it is what routers book that changes while they decide.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from xxhash import xxh3_64_intdigest

from kvatlas.cost.plan import Cost, CostProfile, Load, Piece, Plan, TermKind
from kvatlas.fleet import EngineEndpoint
from kvatlas.limits import NO_ROOM, Over, level
from kvatlas.request import DEFAULT_SLO, SelectionResult, Slo
from kvatlas.reservations import Weighed
from kvatlas.reservations.weigh import worth_us
from kvatlas.tiers import Tier
from router_client.lookup import NOTHING, HeldPrefix, Run
from router_client.pool import Candidate, Pool
from router_client.prompt import Prompt

IN_FLIGHT = TermKind("in_flight", "tokens")
AGAIN = TermKind("again", "tokens")
SLO = TermKind("slo", "us missed")


class Surcharge(NamedTuple):
    """What a router's policy adds to a worker's cost: see `router_client.surcharges`."""

    kind: TermKind
    us: int
    amount: int


class Prospect(NamedTuple):
    """A candidate and what it would do for a request, priced without load.

    `source`: the worker whose copy it would read, with `transferred` more tokens than the `usable` of its own.
    """

    candidate: Candidate
    plan: Plan
    base: Cost
    required_blocks: int
    overlap_blocks: int
    resident_tokens: int
    usable: int
    source: str | None
    transferred: int
    surcharges: tuple[Surcharge, ...] = ()
    surcharge_us: int = 0

    @property
    def id(self) -> str:
        return self.candidate.endpoint.id

    @property
    def cached_tokens(self) -> int:
        return self.usable + self.transferred


def rendezvous(fingerprint: bytes, worker_id: str) -> int:
    """A worker's weight for a prompt, where costs tie: the highest wins. Equal prompts meet, different ones spread."""
    return xxh3_64_intdigest(worker_id.encode() + b"\x00" + fingerprint)


def rank(
    prompt: Prompt,
    pool: Pool,
    held: Mapping[str, HeldPrefix],
    profile: CostProfile,
    *,
    fingerprint: bytes = b"",
) -> tuple[SelectionResult, ...]:
    """Every candidate with its cost by what workers report, cheapest first; ties in rendezvous order. Deterministic."""
    found = prospects(prompt, pool, held, profile, fingerprint=fingerprint)
    return tuple(Ranked(found, [Weighed(p.candidate.load, p.candidate.load_known) for p in found], profile))


def prospects(
    prompt: Prompt,
    pool: Pool,
    held: Mapping[str, HeldPrefix],
    profile: CostProfile,
    *,
    fingerprint: bytes = b"",
    candidates: Sequence[Candidate] | None = None,
) -> list[Prospect]:
    """Every candidate (absent: the pool's), in the order in which ties go."""
    sources = _Sources(pool, held) if pool.givers else None
    some = pool.candidates if candidates is None else candidates
    order = sorted(some, key=lambda candidate: -rendezvous(fingerprint, candidate.id))
    return [_prospect(prompt, candidate, held, profile, sources) for candidate in order]


class Judging(NamedTuple):
    """What is added to a result's cost, and what it is held to: as the ask was (`kvatlas.reservations.Ask`)."""

    slo: Slo = DEFAULT_SLO
    again_factor: float = 0.0
    slo_factor: float = 0.0
    slo_filters: bool = False


JUDGING = Judging()


class Ranked(Sequence[SelectionResult]):
    """Prospects with their load, cheapest first.

    Where it is known which one is `chosen`, that is the first (the store's arithmetic may differ by a rounding), and the
    others are priced only when somebody looks at them: a router reads one of hundreds. Those that are left out for a
    limit come last.
    """

    __slots__ = ("_all", "_chosen", "_first", "_found", "_judging", "_profile", "_weighed")

    def __init__(
        self,
        found: Sequence[Prospect],
        weighed: Sequence[Weighed],
        profile: CostProfile,
        *,
        chosen: int | None = None,
        judging: Judging = JUDGING,
    ) -> None:
        self._found = found
        self._weighed = weighed
        self._profile = profile
        self._chosen = chosen
        self._judging = judging
        self._first = None if chosen is None else self._price(chosen)
        self._all: tuple[SelectionResult, ...] | None = None

    @overload
    def __getitem__(self, index: int) -> SelectionResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SelectionResult]: ...
    def __getitem__(self, index: int | slice) -> SelectionResult | Sequence[SelectionResult]:
        return self._first if index == 0 and self._first is not None else self._ranked()[index]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[SelectionResult]:
        return iter(self._ranked())

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def load_of(self, worker_id: str) -> Load | None:
        """The load that a worker was judged by; None for one that is no candidate."""
        return next((self._weighed[i].load for i, one in enumerate(self._found) if one.id == worker_id), None)

    def _ranked(self) -> tuple[SelectionResult, ...]:
        if self._all is None:
            results = [self._price(i) for i in range(len(self._found))]
            filters = self._judging.slo_filters
            levels = [level(result.over, slo_filters=filters) for result in results]
            order = sorted(range(len(results)), key=lambda i: (i != self._chosen, levels[i], results[i].score_us))
            self._all = tuple(results[i] for i in order)
        return self._all

    def _price(self, i: int) -> SelectionResult:
        return _result(self._found[i], self._weighed[i], self._profile, self._judging)


def _result(found: Prospect, seen: Weighed, profile: CostProfile, judging: Judging) -> SelectionResult:
    plan, cached = found.plan, found.cached_tokens
    pieces, predicted = plan.pieces, 0
    if seen.predicted_tokens:
        predicted = seen.predicted_tokens - cached
        pieces = [*pieces, Piece(predicted, 0, Tier.HBM)]
    priced = Plan(plan.worker_id, plan.input_tokens, plan.output_tokens, pieces, seen.load)
    cost = profile.price(priced)
    if seen.wait_us:
        cost = cost.plus(IN_FLIGHT, seen.wait_us, predicted, delays=True)
    if seen.again_tokens:
        prices, known = profile.prices(plan), cached + predicted
        more_us = worth_us(prices, known + seen.again_tokens) - worth_us(prices, known)
        cost = cost.plus(AGAIN, judging.again_factor * more_us, seen.again_tokens)
    over = seen.over & NO_ROOM
    if cost.ttft_us is not None and cost.ttft_us > judging.slo.ttft_ms * 1_000:
        over |= Over.TTFT
    if cost.tpot_us is not None and plan.output_tokens and cost.tpot_us > judging.slo.tpot_ms * 1_000:
        over |= Over.TPOT
    if seen.missed_us and judging.slo_factor:
        cost = cost.plus(SLO, judging.slo_factor * seen.missed_us, round(seen.missed_us))
    for kind, us, amount in found.surcharges:
        cost = cost.plus(kind, us, amount)
    return SelectionResult(
        found.id,
        found.required_blocks,
        found.overlap_blocks,
        found.resident_tokens,
        found.usable,
        cost,
        found.source,
        found.transferred,
        seen.load_known,
        predicted,
        Over(over),
        plan=priced,
    )


def _prospect(
    prompt: Prompt,
    candidate: Candidate,
    held: Mapping[str, HeldPrefix],
    profile: CostProfile,
    sources: "_Sources | None",
) -> Prospect:
    id, endpoint = candidate.id, candidate.endpoint
    size = candidate.block_size or prompt.block_size or 1
    own = held.get(id, NOTHING)
    usable = candidate.rule.usable_tokens(own.tokens, prompt.input_tokens, size)
    kv_bytes = _kv_bytes(prompt, endpoint, size)
    pieces = [Piece(n, _bytes(n, kv_bytes), tier) for n, tier in _between(own.runs, 0, usable)]
    plan = Plan(id, prompt.input_tokens, prompt.output_tokens, pieces)
    cost = profile.price(plan)
    source_id: str | None = None
    transferred = 0
    for source in sources.of(endpoint, own.tokens) if sources is not None else ():
        there = held[source.id]
        reach = candidate.rule.usable_tokens(there.tokens, prompt.input_tokens, size)
        if reach <= usable:
            continue
        near = source.locality_domain == endpoint.locality_domain
        read = [
            Piece(n, _bytes(n, kv_bytes), tier, own=False, same_domain=near)
            for n, tier in _between(there.runs, usable, reach)
        ]
        with_source = Plan(id, prompt.input_tokens, prompt.output_tokens, [*pieces, *read])
        priced = profile.price(with_source)
        if priced.score_us < cost.score_us:
            plan, cost, source_id, transferred = with_source, priced, source.id, reach - usable
    return Prospect(
        candidate,
        plan,
        cost,
        prompt.required_blocks(size) if candidate.block_size or prompt.block_size else 0,
        own.tokens // size,
        own.tokens,
        usable,
        source_id,
        transferred,
    )


def _kv_bytes(prompt: Prompt, endpoint: EngineEndpoint, block_size: int) -> tuple[int, int]:
    """KV bytes of how many tokens: as the fleet record says, else the request; 0 bytes for unknown."""
    if endpoint.block_bytes:
        return endpoint.block_bytes, block_size
    return prompt.block_bytes, prompt.block_size or block_size


def kv_bytes_of(prompt: Prompt, candidate: Candidate, tokens: int) -> int:
    """KV bytes of a prompt's tokens on a worker; 0 for unknown."""
    size = candidate.block_size or prompt.block_size or 1
    return _bytes(tokens, _kv_bytes(prompt, candidate.endpoint, size))


def _bytes(tokens: int, kv_bytes: tuple[int, int]) -> int:
    """KV bytes of tokens, rounded up."""
    return -(-tokens * kv_bytes[0] // kv_bytes[1])


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

    def of(self, candidate: EngineEndpoint, own_tokens: int) -> list[EngineEndpoint]:
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
