"""`python -m benchmarks.lab.giants`: how chats fare beside giant prompts on the same engines, by policy.

One request in 40 has a prompt of 40,000 to 100,000 tokens that no engine has cached. Eight engines; virtual time; three minutes
on two cores.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from statistics import fmean

from benchmarks.lab.document import to_table
from benchmarks.lab.grid import FIRST_SEED, FLEET, OUR, RIVALS
from kvatlas_simulator.lab.generated_requests import generate
from kvatlas_simulator.lab.replay import replay
from kvatlas_simulator.lab.summary import Figures, Objective, margin

POLICIES = (OUR, "kvatlas-no-interference", *RIVALS)
SEEDS = 3
SPEED = 1.8
"""As a multiple of the workload's own 6.7 requests per second."""
REQUESTS, SKIPPED = 600, 150
GIANT_TOKENS = 40_000


def see_chats(policy: str, seed: int) -> Figures:
    """Figures of the requests that are no giants, without the first ones."""
    outcome = replay(generate("giants", seed, REQUESTS), policy, replace(FLEET, workers=8), seed, speed=SPEED)
    chats = [one for one in outcome.served if one.number >= SKIPPED and one.input_tokens < GIANT_TOKENS]
    return Figures.of(replace(outcome, served=chats), Objective())


def main() -> None:
    """Replay with every policy, and print a table."""
    runs = list(product(POLICIES, range(FIRST_SEED, FIRST_SEED + SEEDS)))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = dict(zip(runs, pool.map(see_chats, *zip(*runs, strict=True)), strict=True))
    rows = []
    for policy in POLICIES:
        seen = [figures for (name, _), figures in found.items() if name == policy]
        rows.append([policy])
        for field, form in (
            ("ttft_mean_ms", ",.0f"),
            ("ttft_p99_ms", ",.0f"),
            ("tpot_mean_ms", ".1f"),
            ("good", ".1%"),
        ):
            values = [float(getattr(one, field)) for one in seen]
            rows[-1].append(f"{fmean(values):{form}} ± {margin(values):{form}}")
    print(to_table(("policy", "chats' mean TTFT, ms", "p99 TTFT, ms", "mean TPOT, ms", "good"), rows))


if __name__ == "__main__":
    main()
