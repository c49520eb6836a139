"""`make chaos`: random faults into a fleet of 4 engines and 3 indexers, for CHAOS_SECONDS (300), by CHAOS_SEED (random).

    python -m tests.chaos                   random faults
    python -m tests.chaos all               every scenario once
    python -m tests.chaos NAME...           these scenarios

Exit code 0 only where every round or scenario ended exact. A seed gives the same faults in the same order; when they meet
what the processes do is the machine's.
"""

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio

from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.nats_cluster import nats_leader_changes
from tests.chaos.random_faults import run_random_faults
from tests.chaos.report import Outcome, as_text
from tests.chaos.runner import INDEXER_WORDS, SCRUB_WORDS, run_scenario
from tests.chaos.scenarios import SCENARIOS
from tests.end_to_end.processes import query

ENGINES = 4
INDEXERS = 3
DEFAULT_SECONDS = 300.0
CLUSTER = nats_leader_changes.__name__


async def run(names: Sequence[str], seed: int, seconds: float, folder: Path) -> bool:
    """Is all exact?"""
    outcomes: list[Outcome] = []
    failures: list[str] = []
    own_fleet = CLUSTER in names
    names = [name for name in names if name != CLUSTER]
    if own_fleet:
        try:
            outcomes.append(await nats_leader_changes(folder / CLUSTER, seed))
        except AssertionError as error:
            failures.append(str(error))
        if not names:
            return told(outcomes, failures)
    words = INDEXER_WORDS if names else SCRUB_WORDS
    async with running_fleet(
        folder, engines=ENGINES, indexers=INDEXERS, seed=seed, indexer_words=words, large=1
    ) as fleet:
        if names:
            for name in names:
                try:
                    outcomes.append(await run_scenario(fleet, name))
                    say(f"{name}: exact after {outcomes[-1].exact_after_s:.2f} s")
                except* AssertionError as errors:
                    failures.append(f"{name}: {errors.exceptions[0]}")
                    say(failures[-1])
        else:
            try:
                await run_random_faults(fleet, seed, seconds, say, outcomes)
            except AssertionError as error:
                failures.append(str(error))
        try:
            await audit(fleet)
        except AssertionError as error:
            failures.append(f"kvatlas audit: {error}")
    return told(outcomes, failures)


async def audit(fleet: Fleet) -> None:
    """Once more by `kvatlas audit`. Raises AssertionError where there are differences."""
    await query("audit", "--nats-url", fleet.nats_server.url, "--redis-url", fleet.valkey.url)


def told(outcomes: Sequence[Outcome], failures: Sequence[str]) -> bool:
    """The report; is all exact?"""
    say(as_text(outcomes))
    for failure in failures:
        say(f"NOT EXACT: {failure}")
    return not failures and not any(outcome.wrong for outcome in outcomes)


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """Exits with 0, 1 where something was not exact, 2 for wrong usage."""
    names = sys.argv[1:]
    if names == ["all"]:
        names = [*SCENARIOS, CLUSTER]
    if unknown := [name for name in names if name not in (*SCENARIOS, CLUSTER)]:
        say(f"no scenario {', '.join(unknown)}; expected all, or some of {', '.join((*SCENARIOS, CLUSTER))}")
        sys.exit(2)
    try:
        seed = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(10**6))
        seconds = float(os.environ.get("CHAOS_SECONDS") or DEFAULT_SECONDS)
    except ValueError as error:
        say(f"CHAOS_SEED and CHAOS_SECONDS: {error}; expected numbers")
        sys.exit(2)
    folder = Path(tempfile.mkdtemp(prefix="kvatlas-chaos-"))
    say(f"CHAOS_SEED={seed} CHAOS_SECONDS={seconds:g}; logs in {folder}")
    exact = anyio.run(run, names, seed, seconds, folder)
    if exact:
        shutil.rmtree(folder)
    sys.exit(0 if exact else 1)


if __name__ == "__main__":
    main()
