"""The project's whole logic under every fault at once (see `tests.logic.world` for the invariants).

LOGIC_SEEDS   seeds for each shape of world (default 4), plus two random ones
LOGIC_SEED    the first of them (default 0); a failure names its seed: LOGIC_SEED=<seed> LOGIC_SEEDS=1 runs it again
"""

import os
import random

import pytest

from tests.logic.invariants import Violation
from tests.logic.shapes import SHAPES
from tests.logic.world import Shape, World

FIRST_SEED = int(os.environ.get("LOGIC_SEED", "0"))
SEEDS = int(os.environ.get("LOGIC_SEEDS", "4"))
RANDOM_SEEDS = 2 if "LOGIC_SEED" not in os.environ else 0


@pytest.mark.timeout(max(120, 10 * SEEDS))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_index_holds_what_the_ledgers_announce_after_any_faults(shape: str) -> None:
    random_seeds = [random.randrange(1 << 32) for _ in range(RANDOM_SEEDS)]
    print(f"{shape}: seeds {FIRST_SEED} to {FIRST_SEED + SEEDS - 1}, and random {random_seeds}")
    for seed in [*range(FIRST_SEED, FIRST_SEED + SEEDS), *random_seeds]:
        world = World(seed, SHAPES[shape])
        try:
            for _ in range(world.shape.steps):
                world.step()
            world.settle()
        except Violation as violation:
            last = "\n  ".join(world.log[-40:])
            pytest.fail(f"{shape}, seed {seed}, after {len(world.log)} moves: {violation}\n  {last}")


def test_the_worlds_have_snapshots_retirements_and_blocks() -> None:
    """A world in which nothing happens proves nothing."""
    worlds = [World(seed, SHAPES["everything"]) for seed in range(6)]
    for world in worlds:
        for _ in range(world.shape.steps):
            world.step()
        world.settle()
    assert sum(world.stats["retired"] for world in worlds) > 0
    assert sum(world.stats["without room"] for world in worlds) > 0
    assert sum(world.stats["snapshots"] for world in worlds) > 4 * len(worlds)
    announced, usable = (sum(world.stats[name] for world in worlds) for name in ("announced", "usable"))
    assert announced > usable / 2 > 0


@pytest.mark.parametrize("seed", range(5))
def test_the_lost_tail_of_an_idle_worker_is_noticed_by_its_heartbeat(seed: int) -> None:
    """No later message shows a gap."""
    world = World(seed, Shape(engines=1, owners=1, partitions=1, faults=""))
    world.calm = True
    world.run_laps(5)
    before, snapshots = world.stream.last_seq, world.publishers[0].counters.snapshots
    while world.stream.last_seq == before:
        world.engines[0].work()
        world.publish()
    assert world.publishers[0].quiet
    world.stream.lose_newest(world.stream.last_seq - before)  # acknowledged, but not read yet
    world.run_laps(0)
    world.invariants.check_end(world.publishers[0].counters.snapshots - snapshots)
    assert world.publishers[0].counters.snapshots > snapshots
