"""Hashes a prompt of 32,768 tokens: the whole chain, and only the first blocks of a cold prompt."""

import random
from collections.abc import Callable

from benchmarks.result import Result
from benchmarks.timing import time_calls
from kvatlas.blocks.hashing import extend_chain, lazy_chain

TOKENS = 32_768
BLOCK_SIZE = 16
RUNS = 40


def measure() -> list[Result]:
    rng = random.Random(1)
    tokens = [rng.randrange(150_000) for _ in range(TOKENS)]
    whole_s = _median_s(lambda: extend_chain(tokens, BLOCK_SIZE))
    cold_s = _median_s(lambda: next(lazy_chain(tokens, BLOCK_SIZE, 64)))
    return [
        Result("hashing 32,768 tokens, whole chain", whole_s * 1e3, "ms", 0.45),
        Result("hashing, tokens a second", TOKENS / whole_s / 1e6, "Mtoken/s"),
        Result("hashing of a cold prompt's first 64 blocks", cold_s * 1e6, "us"),
    ]


def _median_s(call: Callable[[], object]) -> float:
    return time_calls([call] * RUNS)[RUNS // 2]
