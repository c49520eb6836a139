"""Miss-ratio curves: the hit rate of one cache of each size for a workload's prompts, from a single pass over the trace.

A prompt's block is found in a least-recently-used cache if fewer other blocks were used since its last use than the cache
holds (Mattson et al., 1970). We count these for a random share of all blocks, chosen by hash, and scale up (SHARDS with its
adjustment: Waldspurger et al., FAST '15). A request uses its blocks from last to first, as vLLM frees them, so a cache loses
the ends of prompts before their beginnings.

The pass ignores that requests overlap in time, so the curve is that of an idle fleet that shares one cache. `replayed_hit_rate`
gets the same figure from a full replay.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from kvatlas_simulator.engine.scheduler import SchedulerLimits
from kvatlas_simulator.lab.replay import FleetSettings, draw_arrivals, replay
from kvatlas_simulator.lab.requests import LabRequest, Workload

MOST_SAMPLED_USES = 400_000
"""Approximate number of block uses to track, which takes about two seconds."""
UNHURRIED = 0.01
"""Multiple of the trace's rate at which the requests of a replay don't overlap."""
SIZES = 10
"""Default number of sizes in a curve. Each is twice the previous one, and the last one holds everything."""

_HASHES = 1 << 64


class CurvePoint(NamedTuple):
    """`hit_rate`: the share of all prompt tokens that are found cached."""

    cache_tokens: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class MissRatioCurve:
    """`sampled`: the share of all blocks that was tracked. `distinct_tokens`: the approximate number of tokens in all
    distinct blocks of the workload."""

    points: Sequence[CurvePoint]
    sampled: float
    distinct_tokens: int


def measure_curve(
    workload: Workload, cache_tokens: Sequence[int] = (), *, seed: int = 0, most_uses: int = MOST_SAMPLED_USES
) -> MissRatioCurve:
    """The curve at these sizes, or at SIZES default ones. `seed`: used for the order of arrivals and the choice of
    blocks."""
    size = workload.block_tokens
    uses = sum(len(request.contents) for request in workload.requests)
    share = min(1.0, most_uses / uses)
    distances, sampled_lookups, distinct = _follow(workload, share, seed)
    sizes = cache_tokens or [max(1, (distinct * size) >> n) for n in reversed(range(SIZES))]
    lookups = sum(_found_at_most(request, size) for request in workload.requests)
    # the sample happens to have too few or too many lookups of hot blocks; those hit, so correct the hits
    hot = share * lookups - sampled_lookups
    points = []
    for tokens in sizes:
        hits = sum(distance < tokens // size for distance in distances) + hot
        points.append(CurvePoint(tokens, min(1.0, max(0.0, hits / share * size / workload.prompt_tokens))))
    return MissRatioCurve(points, share, distinct * size)


def sizes_to_replay(workload: Workload, curve: MissRatioCurve, count: int) -> list[int]:
    """At most `count` sizes of the curve, evenly spread, among those in which each request fits twice."""
    largest = max(len(request.contents) for request in workload.requests) * workload.block_tokens
    fitting = [point.cache_tokens for point in curve.points if point.cache_tokens >= 2 * largest]
    count = min(count, len(fitting))
    return [fitting[(2 * n + 1) * len(fitting) // (2 * count)] for n in range(count)]


def replayed_hit_rate(workload: Workload, cache_tokens: int, seed: int = 0) -> float:
    """The hit rate of one engine with this cache, replayed request by request. Raises InvalidValue for a request that does
    not fit."""
    limits = SchedulerLimits(queue_limit=1 << 30)
    fleet = FleetSettings(1, cache_tokens, limits=limits)
    served = replay(workload, "round-robin", fleet, seed, speed=UNHURRIED).served
    return sum(one.cached_tokens for one in served) / workload.prompt_tokens


def _follow(workload: Workload, share: float, seed: int) -> tuple[list[float], int, int]:
    """The reuse distances, in blocks, of the sampled lookups that found their block used before; the number of sampled
    lookups; and the approximate number of distinct blocks."""
    size = workload.block_tokens
    below = int(share * _HASHES)
    requests = [request for _, request in draw_arrivals(workload, seed, UNHURRIED)]
    sampled = [_sampled_blocks(request, below, seed) for request in requests]
    last_use: dict[int, int] = {}
    newest = _UseCounts(sum(map(len, sampled)))
    distances: list[float] = []
    lookups = time = 0
    for request, blocks in zip(requests, sampled, strict=True):
        end = _found_at_most(request, size)
        for position, block in blocks:
            if position >= end:
                break
            lookups += 1
            used = last_use.get(block)
            if used is not None:
                # the prompt's own earlier blocks are used after this one
                distances.append(newest.count_after(used) / share)
        for _, block in reversed(blocks):
            used = last_use.get(block)
            if used is not None:
                newest.add(used, -1)
            newest.add(time, 1)
            last_use[block] = time
            time += 1
    return distances, lookups, round(len(last_use) / share)


def _found_at_most(request: LabRequest, block_tokens: int) -> int:
    """The number of a prompt's blocks that an engine can find; it always computes the last token."""
    return (request.input_tokens - 1) // block_tokens


def _sampled_blocks(request: LabRequest, below: int, seed: int) -> list[tuple[int, int]]:
    """(position, id) of each of the request's blocks that is tracked."""
    return [(position, block) for position, block in enumerate(_block_ids(request, seed)) if block < below]


def _block_ids(request: LabRequest, seed: int) -> Iterator[int]:
    """An id for each block, derived from its content and all content before it, in the request's identity."""
    id = xxhash.xxh3_64_intdigest(repr(request.identity).encode(), seed)
    for content in request.contents:
        id = xxhash.xxh3_64_intdigest(struct.pack("<QQ", id, content), seed)
        yield id


class _UseCounts:
    """Counts how many blocks' last uses came after a time: a Fenwick tree over times."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)
        self._total = 0

    def add(self, time: int, amount: int) -> None:
        self._total += amount
        tree, at = self._tree, time + 1
        while at < len(tree):
            tree[at] += amount
            at += at & -at

    def count_after(self, time: int) -> int:
        tree, at, until = self._tree, time + 1, 0
        while at:
            until += tree[at]
            at &= at - 1
        return self._total - until
