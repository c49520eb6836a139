"""The hash chain of a 32,768-token prompt, and of a cold one that is hashed lazily."""

import random
from time import perf_counter

from benchmarks.result import Result
from kvatlas.blocks.hashing import extend_chain, lazy_chain

TOKENS = 32_768
BLOCK_SIZE = 16
RUNS = 40


def measure() -> list[Result]:
    chooser = random.Random(1)
    tokens = [chooser.randrange(150_000) for _ in range(TOKENS)]
    whole = _best(lambda: extend_chain(tokens, BLOCK_SIZE))
    cold = _best(lambda: next(lazy_chain(tokens, BLOCK_SIZE, 64)))
    return [
        Result("hashing 32,768 tokens, whole chain", whole * 1e3, "ms", 0.45),
        Result("hashing, tokens a second", TOKENS / whole / 1e6, "Mtoken/s"),
        Result("hashing of a cold prompt's first 64 blocks", cold * 1e6, "us"),
    ]


def _best(run: object) -> float:
    """Seconds of the median of several runs."""
    assert callable(run)
    times = []
    for _ in range(RUNS):
        began = perf_counter()
        run()
        times.append(perf_counter() - began)
    return sorted(times)[RUNS // 2]
