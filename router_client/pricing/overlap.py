"""From a prompt to the part of it that each worker of a pool holds, in tokens.

Each block shape of the pool (block size and granularity) is looked up with its own hashes; results compare in tokens.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

from kvatlas.blocks.hashing import HASH_BYTES, thin
from kvatlas.blocks.residency import Overlap, WorkerRuns
from kvatlas.blocks.tiers import Tier, tiers_of
from kvatlas.identity import Scope
from kvatlas.request import DEFAULT_BLOCK_TOKENS
from router_client.pricing.pool import BlockShape
from router_client.prompt import Prompt
from router_client.prompt_chain import PromptChain


class OverlapIndex(Protocol):
    """The only call that a router makes to the index; every `kvatlas.index.protocol.ResidencyIndex` has it."""

    async def overlap(self, scope: Scope, hashes: bytes, *, verify: bool = False) -> Overlap:
        """How many leading blocks of a chain each active worker holds. Raises Unreachable."""


class Run(NamedTuple):
    """Consecutive tokens of a prompt's start that one worker holds; `tiers` nearest first.

    The tiers are those at the run's first and last block.
    """

    tokens: int
    tiers: tuple[Tier, ...]


class HeldPrefix(NamedTuple):
    """How much of a prompt's start one worker holds: its runs, in order, in whole blocks of its own size.

    `in_hbm`: all of it is in HBM.
    """

    runs: tuple[Run, ...] = ()
    tokens: int = 0
    in_hbm: bool = True

    @classmethod
    def of(cls, runs: tuple[Run, ...]) -> "HeldPrefix":
        if len(runs) == 1:  # as most are
            return cls(runs, runs[0].tokens, runs[0].tiers[0] is Tier.HBM)
        return cls(runs, sum(run.tokens for run in runs), all(run.tiers[0] is Tier.HBM for run in runs))


NOTHING_HELD = HeldPrefix()

_tiers = cache(tiers_of)  # 256 flags bytes, read for each worker of each result


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """The part of a prompt that each of a pool's workers holds; those that hold nothing are absent.

    `fingerprint` identifies the prompt's start, the same on every router. `chains`: by block size, as far as hashed.
    """

    held: Mapping[str, HeldPrefix]
    fingerprint: bytes
    round_trips: int = 0
    chains: Mapping[int, PromptChain] = field(default_factory=dict)

    @classmethod
    def empty(cls, prompt: Prompt, block_shapes: Mapping[BlockShape, Set[str]]) -> "PromptLookup":
        """As if no worker held anything; the index is not called."""
        chains = {shape.block_size: PromptChain(prompt, shape.block_size) for shape in block_shapes}
        return cls({}, _fingerprint(prompt, chains), 0, chains)


async def look_up_overlap(
    index: OverlapIndex, prompt: Prompt, block_shapes: Mapping[BlockShape, Set[str]]
) -> PromptLookup:
    """Look a prompt up for a pool's workers, by block shape (`Pool.block_shapes`). Raises Unreachable."""
    chains = {shape.block_size: PromptChain(prompt, shape.block_size) for shape in block_shapes}
    results = await _gather(
        [
            _look_up_shape(index, prompt.scope, chains[shape.block_size], shape, ids)
            for shape, ids in block_shapes.items()
        ]
    )
    held: dict[str, HeldPrefix] = {}
    for result in results:
        held.update(result.held)
    round_trips = max((result.round_trips for result in results), default=0)
    return PromptLookup(held, _fingerprint(prompt, chains), round_trips, chains)


def _fingerprint(prompt: Prompt, chains: Mapping[int, PromptChain]) -> bytes:
    smallest = chains[min(chains)] if chains else PromptChain(prompt, prompt.block_size or DEFAULT_BLOCK_TOKENS)
    return smallest.fingerprint


class _ShapeLookup(NamedTuple):
    held: dict[str, HeldPrefix]
    round_trips: int


async def _look_up_shape(
    index: OverlapIndex, scope: Scope, chain: PromptChain, shape: BlockShape, workers: Set[str]
) -> _ShapeLookup:
    runs: dict[str, WorkerRuns] = {}
    first_index = number = round_trips = 0
    while chunk := chain.chunk(number):
        hashes = thin(chunk, shape.granularity, first_index)
        if hashes:
            round_trips += 1
            overlap = await index.overlap(scope, hashes)
            before, whole = first_index // shape.granularity, len(hashes) // HASH_BYTES
            reached_end = False
            for worker_id, found in overlap.runs_by_worker().items():
                if worker_id in workers:
                    reached_end = reached_end or _length(found) == whole
                    if before:
                        known = runs.get(worker_id, ())
                        # residency is prefix-closed: what an earlier chunk's result did not show is held now
                        if missing := before - _length(known):
                            _, first_flags = found[0]
                            known = (*known, (missing, first_flags))
                        runs[worker_id] = (*known, *found)
                    else:
                        runs[worker_id] = found
            if not reached_end:
                break
        first_index += len(chunk) // HASH_BYTES
        number += 1
    step_tokens = shape.block_size * shape.granularity
    return _ShapeLookup({id: _prefix_of(found, step_tokens) for id, found in runs.items()}, round_trips)


async def _gather(lookups: Sequence[Coroutine[Any, Any, _ShapeLookup]]) -> list[_ShapeLookup]:
    """All results; several lookups run at once. Raises the first error itself, not an exception group."""
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
    """Many workers, and many prompts, have the same; equal ones are one object."""
    return HeldPrefix.of(_merge_runs(found, step_tokens))


def _merge_runs(found: Sequence[tuple[int, int]], step_tokens: int) -> tuple[Run, ...]:
    """From (length in steps, flags) to runs in tokens; neighbours in equal tiers become one."""
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
