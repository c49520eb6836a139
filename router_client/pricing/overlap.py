"""From a prompt to what each worker of the pool holds of it, in tokens.

Workers that cut blocks alike (block size and granularity) form a group; each group is asked about with its own hashes,
and the answers compare in tokens.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol

from kvatlas.blocks.hashing import HASH_BYTES, thin
from kvatlas.blocks.residency import Overlap
from kvatlas.blocks.tiers import Tier, tiers_of
from kvatlas.identity import Scope
from kvatlas.request import DEFAULT_BLOCK_TOKENS
from router_client.pricing.pool import Group
from router_client.prompt import Prompt
from router_client.prompt_chain import PromptChain


class OverlapIndex(Protocol):
    """The one question a router asks; every `kvatlas.index.protocol.ResidencyIndex` answers it."""

    async def overlap(self, scope: Scope, hashes: bytes, *, verify: bool = False) -> Overlap:
        """How many leading blocks of a chain each active worker holds. Raises Unreachable."""


class Run(NamedTuple):
    """Consecutive tokens of a prompt's start that one worker holds; `tiers` nearest first.

    The tiers are those at the run's first and last block.
    """

    tokens: int
    tiers: tuple[Tier, ...]


class HeldPrefix(NamedTuple):
    """How much of a prompt's start one worker holds: its runs, in order. In whole blocks of the worker's own size.

    `at_hand`: all of it is in HBM."""

    runs: tuple[Run, ...] = ()
    tokens: int = 0
    at_hand: bool = True

    @classmethod
    def of(cls, runs: tuple[Run, ...]) -> "HeldPrefix":
        if len(runs) == 1:  # as most are
            return cls(runs, runs[0].tokens, runs[0].tiers[0] is Tier.HBM)
        return cls(runs, sum(run.tokens for run in runs), all(run.tiers[0] is Tier.HBM for run in runs))


NOTHING = HeldPrefix()

_tiers = cache(tiers_of)  # of 256 flags bytes, asked for each worker of each answer


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the pool holds of a prompt. `fingerprint` names the prompt's start, the same for every router; `chains` are by
    block size, as far as they were hashed."""

    held: Mapping[str, HeldPrefix]
    fingerprint: bytes
    round_trips: int = 0
    chains: Mapping[int, PromptChain] = field(default_factory=dict)


async def look_up(index: OverlapIndex, prompt: Prompt, groups: Mapping[Group, Set[str]]) -> Lookup:
    """Ask about a prompt for a pool's workers, by group (`Pool.groups`); those that hold nothing are absent.

    Raises Unreachable.
    """
    chains = {size: PromptChain(prompt, size) for size, _ in groups}
    answers = await _together(
        [
            _ask(index, prompt.scope, chains[size], (size, granularity), ids)
            for (size, granularity), ids in groups.items()
        ]
    )
    held: dict[str, HeldPrefix] = {}
    for found, _ in answers:
        held.update(found)
    return Lookup(held, _fingerprint(prompt, chains), max((asked for _, asked in answers), default=0), chains)


def without_index(prompt: Prompt, groups: Mapping[Group, Set[str]]) -> Lookup:
    """As if nobody held anything."""
    chains = {size: PromptChain(prompt, size) for size, _ in groups}
    return Lookup({}, _fingerprint(prompt, chains), 0, chains)


def _fingerprint(prompt: Prompt, chains: Mapping[int, PromptChain]) -> bytes:
    smallest = chains[min(chains)] if chains else PromptChain(prompt, prompt.block_size or DEFAULT_BLOCK_TOKENS)
    return smallest.fingerprint


Answer = tuple[dict[str, HeldPrefix], int]
"""What a group's workers hold, and how many times the index was asked."""


async def _ask(index: OverlapIndex, scope: Scope, chain: PromptChain, group: Group, workers: Set[str]) -> Answer:
    block_size, granularity = group
    runs: dict[str, list[tuple[int, int]]] = {}
    first_index = number = asked = 0
    while chunk := chain.chunk(number):
        hashes = thin(chunk, granularity, first_index)
        if hashes:
            asked += 1
            overlap = await index.overlap(scope, hashes)
            before, whole = first_index // granularity, len(hashes) // HASH_BYTES
            reached_end = False
            for worker_id, found in overlap.held().items():
                if worker_id in workers:
                    reached_end = reached_end or _length(found) == whole
                    if before:
                        known = runs.setdefault(worker_id, [])
                        # residency is prefix-closed: what was not yet held in an earlier answer is held now
                        if missing := before - _length(known):
                            known.append((missing, found[0][1]))
                        known.extend(found)
                    else:
                        runs[worker_id] = found
            if not reached_end:
                break
        first_index += len(chunk) // HASH_BYTES
        number += 1
    step_tokens = block_size * granularity
    equal: dict[tuple[Any, ...], HeldPrefix] = {}  # many workers hold the same part of a shared prompt
    held: dict[str, HeldPrefix] = {}
    for worker_id, found in runs.items():
        key = found[0] if len(found) == 1 else tuple(found)
        if (prefix := equal.get(key)) is None:
            prefix = equal[key] = HeldPrefix.of(_merged(found, step_tokens))
        held[worker_id] = prefix
    return held, asked


async def _together(questions: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """All answers; several groups are asked at once. An error is the first one's, not a group of errors."""
    if len(questions) <= 1:
        return [await question for question in questions]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(question) for question in questions]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _length(found: Sequence[tuple[int, int]]) -> int:
    return found[0][0] if len(found) == 1 else sum(length for length, _ in found)


def _merged(found: Sequence[tuple[int, int]], step_tokens: int) -> tuple[Run, ...]:
    """Runs in tokens, neighbours in equal tiers made one."""
    if len(found) == 1:
        return (Run(found[0][0] * step_tokens, _tiers(found[0][1])),)
    merged: list[Run] = []
    for length, flags in found:
        tiers = _tiers(flags)
        if merged and merged[-1].tiers == tiers:
            merged[-1] = Run(merged[-1].tokens + length * step_tokens, tiers)
        else:
            merged.append(Run(length * step_tokens, tiers))
    return tuple(merged)
