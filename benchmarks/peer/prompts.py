"""Prompts of a pool, the same for both subjects. Uses only the standard library, because the peer's processes import this file
too.

Seven eighths of a prompt's blocks are one of PREFIXES prefixes, which some workers hold; the rest is new, so each choice books
a prefix that no worker holds yet.
"""

import random
from collections.abc import Iterator

BLOCK_SIZE = 16
BLOCKS = 512
PREFIXES = 8
VOCABULARY = 100_000


class PromptSource:
    """Prompts of a pool of `workers` workers, of which `holders` hold each prefix. The same numbers give the same prompts in
    every process."""

    def __init__(self, workers: int, holders: int, blocks: int = BLOCKS) -> None:
        self.workers = workers
        self.holders = holders
        self.blocks = blocks
        rng = random.Random(f"{workers}/{holders}/{blocks}")
        shared = (blocks - blocks // 8) * BLOCK_SIZE
        self.prefixes = [rng.choices(range(VOCABULARY), k=shared) for _ in range(PREFIXES)]
        self.depths = [self._draw_depths(rng, holders, shared // BLOCK_SIZE) for _ in range(PREFIXES)]
        """For each prefix, how many of its blocks each worker holds, by worker number; the depths differ."""
        self._rng = rng

    def _draw_depths(self, rng: random.Random, holders: int, blocks: int) -> dict[int, int]:
        chosen = rng.sample(range(self.workers), holders)
        return {worker: max(1, blocks * (rank + 1) // holders) for rank, worker in enumerate(chosen)}

    def __iter__(self) -> Iterator[list[int]]:
        """The token ids of one prompt after another, without end."""
        number = 0
        while True:
            number += 1
            new = self._rng.choices(range(VOCABULARY), k=self.blocks // 8 * BLOCK_SIZE + 7)
            yield [*self.prefixes[number % PREFIXES], *new]


OVERLAP_BLOCKS = (512, 2_048, 8_192)
OVERLAP_HOLDERS = 64


class OverlapCase:
    """A prompt whose blocks OVERLAP_HOLDERS workers hold, as a whole or each to a different depth (`different`)."""

    def __init__(self, blocks: int, different: bool) -> None:
        self.blocks = blocks
        self.different = different
        rng = random.Random(f"{blocks}/{different}")
        self.tokens = rng.choices(range(VOCABULARY), k=blocks * BLOCK_SIZE)
        ranks = rng.sample(range(OVERLAP_HOLDERS), OVERLAP_HOLDERS)
        self.depths = {
            worker: blocks * (rank + 1) // OVERLAP_HOLDERS if different else blocks for worker, rank in enumerate(ranks)
        }
        """Number of blocks, by worker number."""


def overlap_cases() -> list[OverlapCase]:
    return [OverlapCase(blocks, different) for blocks in OVERLAP_BLOCKS for different in (False, True)]
