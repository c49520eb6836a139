"""`python -m benchmarks.lab.hot_documents`: mean time to first token with and without fetching, if documents become hot.

Each request asks a question of 500 tokens about a document of 32,256 tokens. It runs in virtual time, and takes three minutes
on two cores.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from random import Random
from typing import NamedTuple

from benchmarks.lab.document import to_table
from kvatlas_simulator.lab.replay import FleetSettings, replay
from kvatlas_simulator.lab.requests import LabRequest, Workload
from kvatlas_simulator.lab.summary import Figures, Objective

FLEET = FleetSettings(workers=8, cache_tokens=250_000)
POLICIES = ("kvatlas", "kvatlas-fetching")
SEEDS = 5
BLOCK_TOKENS, DOCUMENT_BLOCKS, QUESTION_TOKENS, ANSWER_TOKENS = 512, 63, 500, 100
EARLIER = 75
"""Number of requests about eight other documents, at 5 per second, that come first and don't count."""


class Case(NamedTuple):
    """`documents`: how many become hot at once, after `earlier` requests about others. With `turn_s`, they become hot one after
    another, each for that many seconds."""

    name: str
    documents: int
    requests: int
    per_s: float
    earlier: int = EARLIER
    turn_s: float | None = None


CASES = (
    Case("4 documents become hot", 4, 600, 40.0),
    Case("12 documents become hot", 12, 1_200, 40.0),
    Case("a document becomes hot every 10 s", 3, 1_200, 40.0, earlier=0, turn_s=10.0),
    Case("40 documents that just fit the caches", 40, 1_000, 30.0, earlier=0),
)


def workload(case: Case, seed: int) -> Workload:
    """The requests of a case, which arrive as a Poisson process."""
    rng, at_us, requests = Random(f"{case.name} {seed}"), 0.0, []
    for number in range(case.earlier + case.requests):
        is_early = number < case.earlier
        at_us += rng.expovariate(5.0 if is_early else case.per_s) * 1e6
        if is_early:
            document = case.documents + rng.randrange(8)
        elif case.turn_s is not None:
            document = int(at_us / 1e6 / case.turn_s)
        else:
            document = rng.randrange(case.documents)
        first = document * DOCUMENT_BLOCKS
        own = (1 + number) * 1_000_000
        contents = (*range(first, first + DOCUMENT_BLOCKS), own, own + 1)
        tokens = DOCUMENT_BLOCKS * BLOCK_TOKENS + QUESTION_TOKENS
        requests.append(LabRequest(number, at_us, tokens, ANSWER_TOKENS, contents, number))
    return Workload(case.name, BLOCK_TOKENS, requests)


def mean_ttft_ms(case: Case, policy: str, seed: int) -> float:
    """The mean time to first token of the requests that count."""
    outcome = replay(workload(case, seed), policy, FLEET, seed)
    return Figures.of(outcome, Objective(), skipped=case.earlier).ttft_mean_ms


def main() -> None:
    """Replay every case, and print a table."""
    runs = [(case, policy, seed) for case in CASES for policy in POLICIES for seed in range(SEEDS)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = dict(zip(runs, pool.map(mean_ttft_ms, *zip(*runs, strict=True)), strict=True))
    rows = []
    for case in CASES:
        shown: dict[str, list[float]] = {one: [found[case, one, seed] for seed in range(SEEDS)] for one in POLICIES}
        changes = [f"{with_it / without - 1:+.0%}" for without, with_it in zip(*shown.values(), strict=True)]
        rows.append([case.name, *("; ".join(f"{ms:,.0f}" for ms in one) for one in shown.values()), "; ".join(changes)])
    print(to_table(("", *(f"{one}, ms by seed" for one in POLICIES), "difference"), rows))


if __name__ == "__main__":
    main()
