"""Which worker a request should go to: pure ranking of a pool by cost.

Candidates are the workers that may get a prompt now (alive, up, not decode-only), also those that hold nothing. What
each would do is a plan: read what it holds and its engine can use, compute the rest. A copy held elsewhere counts only
where the candidate and its holder share a transfer group and a block size; then the deepest such copy is the plan's
source, if that is cheaper than computing. A worker that does not tell its load is taken to have the mean of those that
do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvatlas.cost.plan import CostProfile, Load, Piece, Plan
from kvatlas.fleet import EngineEndpoint
from kvatlas.request import SelectionResult
from kvatlas.tiers import Tier
from router_client.lookup import NOTHING, HeldPrefix, Run
from router_client.pool import Candidate, Pool
from router_client.prompt import Prompt


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
    booked: Mapping[str, Load] | None = None,
) -> tuple[SelectionResult, ...]:
    """Every candidate with its cost, cheapest first; ties in rendezvous order. Deterministic.

    `booked`: load on top of what workers report, for requests they can't have reported yet.
    """
    sources = _Sources(pool, held) if pool.givers else None
    results = [
        _result(prompt, candidate, held, profile, sources, booked.get(candidate.id) if booked else None)
        for candidate in pool.candidates
    ]
    results.sort(key=lambda result: (result.score_us, -rendezvous(fingerprint, result.worker_id)))
    return tuple(results)


def _result(
    prompt: Prompt,
    candidate: Candidate,
    held: Mapping[str, HeldPrefix],
    profile: CostProfile,
    sources: "_Sources | None",
    booked: Load | None,
) -> SelectionResult:
    id, endpoint = candidate.id, candidate.endpoint
    size = candidate.block_size or prompt.block_size or 1
    load = candidate.load if booked is None else candidate.load + booked
    own = held.get(id, NOTHING)
    usable = candidate.rule.usable_tokens(own.tokens, prompt.input_tokens, size)
    kv_bytes = _kv_bytes(prompt, endpoint, size)
    pieces = [Piece(n, _bytes(n, kv_bytes), tier) for n, tier in _between(own.runs, 0, usable)] if usable else []
    cost = profile.price(Plan(id, prompt.input_tokens, prompt.output_tokens, pieces, load))
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
        with_source = profile.price(Plan(id, prompt.input_tokens, prompt.output_tokens, [*pieces, *read], load))
        if with_source.score_us < cost.score_us:
            cost, source_id, transferred = with_source, source.id, reach - usable
    return SelectionResult(
        id,
        prompt.required_blocks(size) if candidate.block_size or prompt.block_size else 0,
        own.tokens // size,
        own.tokens,
        usable,
        cost,
        source_id,
        transferred,
        candidate.load_known,
    )


def _kv_bytes(prompt: Prompt, endpoint: EngineEndpoint, block_size: int) -> tuple[int, int]:
    """KV bytes of how many tokens: as the fleet record says, else the request; 0 bytes for unknown."""
    if endpoint.block_bytes:
        return endpoint.block_bytes, block_size
    return prompt.block_bytes, prompt.block_size or block_size


def _bytes(tokens: int, kv_bytes: tuple[int, int]) -> int:
    """KV bytes of tokens, rounded up."""
    return -(-tokens * kv_bytes[0] // kv_bytes[1])


def _between(runs: Sequence[Run], start: int, end: int) -> Iterator[tuple[int, Tier]]:
    """The part of runs from token `start` up to token `end`: tokens, and the nearest tier they are in."""
    position = 0
    for run in runs:
        first, last = max(position, start), min(position + run.tokens, end)
        if first < last:
            yield last - first, run.tiers[0]
        position += run.tokens


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
