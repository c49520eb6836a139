"""The simulated engines make the schedules of vLLM's own scheduler: chunks, hits, preemptions and priorities, step by step."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.recorded_schedules import Schedule
from tests.simulator.test_recorded_schedules import check_like_vllm

RECORDER = Path(__file__).parent / "record_schedules.py"
REQUESTS = 100

# groups, blocks of the pool, tokens and sequences of a step
ENGINES: dict[str, tuple[list[str], int, int, int]] = {
    "small-budget": (["full"], 600, 128, 64),
    "small-cache": (["full"], 100, 512, 64),
    "few-sequences": (["full"], 300, 256, 4),
    "roomy": (["full"], 4_000, 2_048, 64),
}
CONFIGS: dict[str, dict[str, Any]] = {
    (name := f"{engine}-{policy}-{seed}"): {
        "name": name,
        "groups": groups,
        "pool": pool,
        "budget": budget,
        "sequences": sequences,
        "policy": policy,
        "requests": REQUESTS,
        "seed": seed,
    }
    for (engine, (groups, pool, budget, sequences)), policy, seed in product(
        ENGINES.items(), ("fcfs", "priority"), range(5)
    )
}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_step_is_that_of_vllm(recordings: Path, name: str) -> None:
    check_like_vllm(Schedule.read(recordings / f"{name}.json.gz"))
