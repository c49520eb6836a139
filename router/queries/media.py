"""Counts how much of a prompt one worker holds on each medium, in the two ways that other indexes do.

A run's tiers are those of its first and last block. The end of a worker's held prefix is exact.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvatlas.blocks.tiers import Tier
from router_client.pricing.overlap import Run

GPU = frozenset({Tier.HBM, Tier.REMOTE_HBM})
CPU = frozenset({Tier.CPU_DRAM})
DISK = frozenset({Tier.LOCAL_SSD, Tier.OBJECT_STORE})


class MediaTokens(NamedTuple):
    """Numbers of tokens from a prompt's start, by medium."""

    gpu: int
    cpu: int
    disk: int


def on_each_medium(runs: Sequence[Run]) -> MediaTokens:
    """For each medium, the longest start that it holds alone."""
    return MediaTokens(*(_leading(runs, medium) for medium in (GPU, CPU, DISK)))


def through_each_medium(runs: Sequence[Run]) -> MediaTokens:
    """The start on the GPU; that plus what follows in CPU memory; and that plus what follows on disks."""
    gpu = _leading(runs, GPU)
    cpu = gpu + _following(runs, gpu, CPU)
    return MediaTokens(gpu, cpu, cpu + _following(runs, cpu, DISK))


def _leading(runs: Sequence[Run], medium: Collection[Tier]) -> int:
    return _following(runs, 0, medium)


def _following(runs: Sequence[Run], first: int, medium: Collection[Tier]) -> int:
    """The number of contiguous tokens on a medium from token `first` on."""
    position = tokens = 0
    for run in runs:
        end = position + run.tokens
        if end > first:
            if not any(tier in medium for tier in run.tiers):
                break
            tokens = end - first
        position = end
    return tokens
