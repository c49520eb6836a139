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

from kvatlas.cost.plan import CostProfile, Load, Piece, Plan, mean_load
from kvatlas.fleet import EngineEndpoint, EngineState, FleetRecord, Liveness, Role
from kvatlas.request import SelectionResult
from kvatlas.reuse import ReuseRules
from router_client.lookup import NOTHING, HeldPrefix, Run
from router_client.prompt import Prompt


def may_get(record: FleetRecord) -> bool:
    """May this worker get a prompt now?"""
    return record.routable and record.endpoint.role is not Role.DECODE


def may_give(record: FleetRecord) -> bool:
    """May other workers read this one's cache now? A draining engine still answers reads."""
    return record.liveness is Liveness.ALIVE and record.state in (EngineState.UP, EngineState.DRAINING)


def rendezvous(fingerprint: bytes, worker_id: str) -> int:
    """A worker's weight for a prompt, where costs tie: the highest wins. Equal prompts meet, different ones spread."""
    return xxh3_64_intdigest(worker_id.encode() + b"\x00" + fingerprint)


def rank(
    prompt: Prompt,
    pool: Mapping[str, FleetRecord],
    held: Mapping[str, HeldPrefix],
    profile: CostProfile,
    *,
    rules: ReuseRules | None = None,
    fingerprint: bytes = b"",
    booked: Mapping[str, Load] | None = None,
) -> tuple[SelectionResult, ...]:
    """Every candidate with its cost, cheapest first; ties in rendezvous order. Deterministic.

    `booked`: load on top of what workers report, for requests they can't have reported yet.
    """
    known = {
        id: Load.of(record.load, record.endpoint.block_size or 1)
        for id, record in pool.items()
        if record.load is not None
    }
    candidates = [record for _, record in sorted(pool.items()) if may_get(record)]
    mean = mean_load([known[r.endpoint.id] for r in candidates if r.endpoint.id in known])
    sources = _Sources(pool, held)
    applying = rules or ReuseRules()
    results: list[SelectionResult] = []
    for record in candidates:
        id = record.endpoint.id
        load = known.get(id, mean)
        if booked is not None and id in booked:
            load = load + booked[id]
        results.append(_result(prompt, record.endpoint, held, load, id in known, profile, applying, sources))
    results.sort(key=lambda result: (result.score_us, -rendezvous(fingerprint, result.worker_id)))
    return tuple(results)


def _result(
    prompt: Prompt,
    endpoint: EngineEndpoint,
    held: Mapping[str, HeldPrefix],
    load: Load,
    load_known: bool,
    profile: CostProfile,
    rules: ReuseRules,
    sources: "_Sources",
) -> SelectionResult:
    own = held.get(endpoint.id, NOTHING)
    size = endpoint.block_size or prompt.block_size or 1
    rule = rules.of(endpoint)
    usable = rule.usable_tokens(own.tokens, prompt.input_tokens, size)
    kv_bytes = _kv_bytes(prompt, endpoint, size)
    pieces = [Piece(run.tokens, _bytes(run.tokens, kv_bytes), run.tiers[0]) for run in _between(own.runs, 0, usable)]
    cost = profile.price(Plan(endpoint.id, prompt.input_tokens, prompt.output_tokens, pieces, load))
    source_id: str | None = None
    transferred = 0
    for source in sources.of(endpoint, own.tokens):
        there = held[source.id]
        reach = rule.usable_tokens(there.tokens, prompt.input_tokens, size)
        if reach <= usable:
            continue
        near = source.locality_domain == endpoint.locality_domain
        read = [
            Piece(run.tokens, _bytes(run.tokens, kv_bytes), run.tiers[0], own=False, same_domain=near)
            for run in _between(there.runs, usable, reach)
        ]
        with_source = profile.price(
            Plan(endpoint.id, prompt.input_tokens, prompt.output_tokens, [*pieces, *read], load)
        )
        if with_source.score_us < cost.score_us:
            cost, source_id, transferred = with_source, source.id, reach - usable
    return SelectionResult(
        worker_id=endpoint.id,
        required_blocks=prompt.required_blocks(size) if endpoint.block_size or prompt.block_size else 0,
        overlap_blocks=own.tokens // size,
        resident_tokens=own.tokens,
        usable_tokens=usable,
        cost=cost,
        source=source_id,
        transferred_tokens=transferred,
        load_known=load_known,
    )


def _kv_bytes(prompt: Prompt, endpoint: EngineEndpoint, block_size: int) -> tuple[int, int]:
    """KV bytes of how many tokens: as the fleet record says, else the request; 0 bytes for unknown."""
    if endpoint.block_bytes:
        return endpoint.block_bytes, block_size
    return prompt.block_bytes, prompt.block_size or block_size


def _bytes(tokens: int, kv_bytes: tuple[int, int]) -> int:
    """KV bytes of tokens, rounded up."""
    return -(-tokens * kv_bytes[0] // kv_bytes[1])


def _between(runs: Sequence[Run], start: int, end: int) -> Iterator[Run]:
    """The part of runs from token `start` up to token `end`."""
    position = 0
    for run in runs:
        first, last = max(position, start), min(position + run.tokens, end)
        if first < last:
            yield Run(last - first, run.tiers)
        position += run.tokens


@dataclass(frozen=True, slots=True)
class _Deepest:
    """The deepest copy in one transfer group: of all, and of each locality domain."""

    of_all: EngineEndpoint
    by_domain: Mapping[str, EngineEndpoint]


class _Sources:
    """Whose copies a candidate may read; built once a ranking, so that the work grows with workers, not their pairs."""

    def __init__(self, pool: Mapping[str, FleetRecord], held: Mapping[str, HeldPrefix]) -> None:
        self._held = held
        self._groups: dict[tuple[str, int], _Deepest] = {}
        members: dict[tuple[str, int], list[EngineEndpoint]] = {}
        for id, record in sorted(pool.items()):
            endpoint = record.endpoint
            if id in held and endpoint.transfer_groups and endpoint.block_size and may_give(record):
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
