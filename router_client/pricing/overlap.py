"""Finds the part of a prompt that each worker of a pool holds, in tokens.

Each block shape of the pool (block size and granularity) is looked up with its own hashes; results are compared in tokens.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence, Set
from dataclasses import field
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

from kvatlas.blocks.hashing import HASH_BYTES, thin
from kvatlas.blocks.residency import Overlap, Residency, WorkerRuns
from kvatlas.blocks.reuse import ReuseRule
from kvatlas.blocks.tiers import Tier, tiers_of
from kvatlas.dataclass import dataclass
from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas.request import DEFAULT_BLOCK_TOKENS
from router_client.pricing.candidates import BlockShape
from router_client.prompt import Prompt
from router_client.prompt_chain import PromptChain


class OverlapIndex(Protocol):
    """The only index call that a choice needs; every `kvatlas.index.protocol.ResidencyIndex` has it."""

    async def overlap(
        self, scope: Scope, hashes: bytes, *, first_index: int = 0, limit: int | None = None, verify: bool = False
    ) -> Overlap:
        """The number of leading blocks of a chain that each active worker holds, and where it can resume. Raises
        Unreachable."""


@runtime_checkable
class ReportsStatus(Protocol):
    """An index that can report its status."""

    def status(self) -> dict[str, Any] | None:
        """The human-readable status, as plain data."""


@runtime_checkable
class BlockIndex(Protocol):
    """An index's calls for single blocks."""

    async def locate(self, scope: Scope, sequence_hash: int) -> Sequence[Residency]:
        """See `ResidencyIndex`."""

    async def children(self, scope: Scope, prefix_hash: int | None) -> Sequence[Residency]:
        """See `ResidencyIndex`."""


class ResidencyOnly:
    """An index without its marks, for comparison: all resident blocks of hybrid models count as reusable."""

    def __init__(self, index: OverlapIndex) -> None:
        self._index = index

    async def overlap(
        self, scope: Scope, hashes: bytes, *, first_index: int = 0, limit: int | None = None, verify: bool = False
    ) -> Overlap:
        """See `OverlapIndex`."""
        found = await self._index.overlap(scope, hashes, first_index=first_index, limit=limit, verify=verify)
        return found._replace(shards=[shard._replace(positions={}) for shard in found.shards])

    def status(self) -> dict[str, Any] | None:
        """The status of the underlying index."""
        return self._index.status() if isinstance(self._index, ReportsStatus) else None


class Run(NamedTuple):
    """Consecutive tokens of a prompt's start that one worker holds; `tiers` are ordered from nearest to farthest.

    The tiers are those of the run's first and last block.
    """

    tokens: int
    tiers: tuple[Tier, ...]


class HeldPrefix(NamedTuple):
    """How much of a prompt's start one worker holds: its runs, in order, in whole blocks of its own size.

    `in_hbm`: all of it is in HBM. `reach_tokens`: how far the worker's marks let its engine resume this prompt; None for
    a worker without marks, for which the engine's rule decides.
    """

    runs: tuple[Run, ...] = ()
    tokens: int = 0
    in_hbm: bool = True
    reach_tokens: int | None = None

    @classmethod
    def of(cls, runs: tuple[Run, ...], reach_tokens: int | None = None) -> "HeldPrefix":
        if len(runs) == 1:  # the usual case
            return cls(runs, runs[0].tokens, runs[0].tiers[0] is Tier.HBM, reach_tokens)
        in_hbm = all(run.tiers[0] is Tier.HBM for run in runs)
        return cls(runs, sum(run.tokens for run in runs), in_hbm, reach_tokens)

    @property
    def copied_tokens(self) -> int:
        """The number of its tokens that can be of use to an engine."""
        return self.tokens if self.reach_tokens is None else self.reach_tokens

    def usable_tokens(self, rule: ReuseRule, prompt: Prompt, kind: EngineKind, block_size: int) -> int:
        """The number of tokens at the prompt's start that an engine with this rule and of this kind would not compute
        again."""
        readable = prompt.reading.readable_tokens(kind)
        if self.reach_tokens is None:
            return rule.usable_tokens(self.tokens, prompt.input_tokens, block_size, readable)
        return self.reach_tokens if readable is None or self.reach_tokens <= readable else 0


NOTHING_HELD = HeldPrefix()

_tiers = cache(tiers_of)  # at most 256 flag bytes, read for each worker of each result


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """The part of a prompt that each of a pool's workers holds; workers that hold nothing are absent.

    `fingerprint` identifies the prompt's start, in the same way on every router. `chains`: the chains by block size, as
    far as they have been hashed. `source`: see `Overlap`.
    """

    held: Mapping[str, HeldPrefix]
    fingerprint: bytes
    round_trips: int = 0
    chains: Mapping[int, PromptChain] = field(default_factory=dict)
    source: str = ""

    @classmethod
    def empty(cls, prompt: Prompt, block_shapes: Mapping[BlockShape, Set[str]]) -> "PromptLookup":
        """A lookup as if no worker held anything; the index is not called."""
        chains = {shape.block_size: PromptChain(prompt, shape.block_size) for shape in block_shapes}
        return cls({}, _fingerprint(prompt, chains), 0, chains)


async def look_up_overlap(
    index: OverlapIndex, prompt: Prompt, block_shapes: Mapping[BlockShape, Set[str]]
) -> PromptLookup:
    """Look a prompt up for a pool's workers, by block shape (`Pool.looked_up_shapes`). Raises Unreachable."""
    chains = {shape.block_size: PromptChain(prompt, shape.block_size) for shape in block_shapes}
    results = await _gather(
        [
            _look_up_shape(index, prompt, chain_for(prompt, shape, chains), shape, ids)
            for shape, ids in block_shapes.items()
        ]
    )
    held: dict[str, HeldPrefix] = {}
    for result in results:
        held.update(result.held)
    round_trips = max((result.round_trips for result in results), default=0)
    source = next((result.source for result in results if result.source), "")
    return PromptLookup(held, _fingerprint(prompt, chains), round_trips, chains, source)


def chain_for(prompt: Prompt, shape: BlockShape, plain: Mapping[int, PromptChain]) -> PromptChain:
    """The chain for a lookup. Bookings and fingerprints use the plain chain, which all workers with the same block size
    share."""
    if shape.lookahead_tokens:
        return PromptChain(prompt, shape.block_size, shape.lookahead_tokens)
    return plain[shape.block_size]


def _fingerprint(prompt: Prompt, chains: Mapping[int, PromptChain]) -> bytes:
    smallest = chains[min(chains)] if chains else PromptChain(prompt, prompt.block_size or DEFAULT_BLOCK_TOKENS)
    return smallest.fingerprint


class _ShapeLookup(NamedTuple):
    held: dict[str, HeldPrefix]
    round_trips: int
    source: str


async def _look_up_shape(
    index: OverlapIndex, prompt: Prompt, chain: PromptChain, shape: BlockShape, workers: Set[str]
) -> _ShapeLookup:
    runs: dict[str, WorkerRuns] = {}
    reach: dict[str, int] = {}
    every_block = shape.granularity == 1  # workers with another granularity have no marks
    limit = (prompt.input_tokens - 1) // shape.block_size  # an engine computes at least the last token
    first_index = number = round_trips = 0
    source = ""
    while chunk := chain.chunk(number):
        hashes = thin(chunk, shape.granularity, first_index)
        if hashes:
            round_trips += 1
            if every_block:
                overlap = await index.overlap(prompt.scope, hashes, first_index=first_index, limit=limit)
                for worker_id, blocks in overlap.reach().items():
                    reach[worker_id] = max(blocks, reach.get(worker_id, 0))
            else:
                overlap = await index.overlap(prompt.scope, hashes)
            source = overlap.source
            before, whole = first_index // shape.granularity, len(hashes) // HASH_BYTES
            found = {worker: held for worker, held in overlap.runs_by_worker().items() if worker in workers}
            runs = _append_runs(runs, before, found) if before else found
            reached_end = overlap.longest == whole and any(_length(held) == whole for held in found.values())
            if not reached_end:
                break
        first_index += len(chunk) // HASH_BYTES
        number += 1
    step_tokens = shape.block_size * shape.granularity
    held: dict[str, HeldPrefix] = {}
    for worker_id, its_runs in runs.items():
        resumed = reach.get(worker_id)
        prefix = _prefix_of(its_runs, step_tokens)
        held[worker_id] = prefix if resumed is None else prefix._replace(reach_tokens=resumed * shape.block_size)
    return _ShapeLookup(held, round_trips, source)


def _append_runs(runs: Mapping[str, WorkerRuns], before: int, found: Mapping[str, WorkerRuns]) -> dict[str, WorkerRuns]:
    """Join `runs`, which cover the first `before` blocks, with the runs found after them."""
    joined = dict(runs)
    for worker_id, behind in found.items():
        known = runs.get(worker_id, ())
        # residency is prefix-closed: blocks that an earlier chunk's result did not show must be held now
        if missing := before - _length(known):
            _, first_flags = behind[0]
            known = (*known, (missing, first_flags))
        joined[worker_id] = (*known, *behind)
    return joined


async def _gather(lookups: Sequence[Coroutine[Any, Any, _ShapeLookup]]) -> list[_ShapeLookup]:
    """Run several lookups concurrently and return all results. Raises the first error itself, not an exception
    group."""
    if len(lookups) <= 1:
        return [await lookup for lookup in lookups]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(lookup) for lookup in lookups]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _length(found: Sequence[tuple[int, int]]) -> int:
    return sum(length for length, _ in found)


@lru_cache(maxsize=16_384)
def _prefix_of(found: WorkerRuns, step_tokens: int) -> HeldPrefix:
    """The prefix of these runs. Cached, because many workers and prompts have the same prefix; equal prefixes are one
    object."""
    return HeldPrefix.of(_merge_runs(found, step_tokens))


def _merge_runs(found: Sequence[tuple[int, int]], step_tokens: int) -> tuple[Run, ...]:
    """Turn (length in steps, flags) into runs in tokens; adjacent runs in the same tiers become one."""
    if len(found) == 1:
        ((length, flags),) = found
        return (Run(length * step_tokens, _tiers(flags)),)
    merged: list[Run] = []
    for length, flags in found:
        tiers = _tiers(flags)
        if merged and merged[-1].tiers == tiers:
            merged[-1] = Run(merged[-1].tokens + length * step_tokens, tiers)
        else:
            merged.append(Run(length * step_tokens, tiers))
    return tuple(merged)
