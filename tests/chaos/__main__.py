"""`make chaos`: random faults in a fleet of 4 engines, 2 of them hybrids, and 3 indexers.

For CHAOS_SECONDS (300), by CHAOS_SEED (random).

    python -m tests.chaos                   random faults
    python -m tests.chaos all               every scenario once
    python -m tests.chaos NAME...           these scenarios
    python -m tests.chaos requests          requests while engines fail and routers are replaced: what is lost

Exit code 0 only if the index became exact after every round or scenario. A seed gives the same faults in the same order;
their timing depends on the machine.
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
from tests.chaos.requests.request_figures import print_request_figures
from tests.chaos.runner import INDEXER_ARGUMENTS, SCRUB_ARGUMENTS, run_scenario
from tests.chaos.scenarios import SCENARIOS
from tests.end_to_end.processes import query

ENGINES = 4
HYBRIDS = 2
"""Of the engines: their marks must be exact too."""
INDEXERS = 3
DEFAULT_SECONDS = 300.0
CLUSTER = nats_leader_changes.__name__


async def run(names: Sequence[str], seed: int, seconds: float, folder: Path) -> bool:
    """Run, and print a report. Is everything exact?"""
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
            return report(outcomes, failures)
    arguments = INDEXER_ARGUMENTS if names else SCRUB_ARGUMENTS
    async with running_fleet(
        folder, engines=ENGINES, indexers=INDEXERS, seed=seed, indexer_arguments=arguments, large=1, hybrids=HYBRIDS
    ) as fleet:
        if names:
            for name in names:
                try:
                    outcomes.append(await run_scenario(fleet, name))
                    await fleet.note_store_call()
                    log(f"{name}: exact after {outcomes[-1].exact_after_s:.2f} s")
                except* AssertionError as errors:
                    failures.append(f"{name}: {errors.exceptions[0]}")
                    log(failures[-1])
        else:
            try:
                await run_random_faults(fleet, seed, seconds, log, outcomes)
            except AssertionError as error:
                failures.append(str(error))
        await fleet.note_store_call()
        if fleet.store_calls:
            longest = max(fleet.store_calls, key=lambda call: call.ms)
            log(f"longest store call: {longest.command}, {longest.ms:.1f} ms (other programs may have interrupted it)")
        else:
            log("longest store call: none took a millisecond")
        try:
            await audit(fleet)
        except AssertionError as error:
            failures.append(f"kvatlas audit: {error}")
    return report(outcomes, failures)


async def audit(fleet: Fleet) -> None:
    """Run `kvatlas audit`. Raises AssertionError if it finds differences."""
    await query("audit", "--nats-url", fleet.nats_server.url, "--redis-url", fleet.valkey.url)


def report(outcomes: Sequence[Outcome], failures: Sequence[str]) -> bool:
    """Print the report. Is everything exact?"""
    log(as_text(outcomes))
    for failure in failures:
        log(f"NOT EXACT: {failure}")
    return not failures and not any(outcome.wrong for outcome in outcomes)


def log(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """Exits with 0, 1 if something was not exact, 2 for wrong usage."""
    names = sys.argv[1:]
    if names == ["requests"]:
        with tempfile.TemporaryDirectory(prefix="kvatlas-chaos-") as logs:
            sys.exit(0 if anyio.run(print_request_figures, Path(logs), log) else 1)
    if names == ["all"]:
        names = [*SCENARIOS, CLUSTER]
    if unknown := [name for name in names if name not in (*SCENARIOS, CLUSTER)]:
        log(f"no scenario {', '.join(unknown)}; expected all, requests, or some of {', '.join((*SCENARIOS, CLUSTER))}")
        sys.exit(2)
    try:
        seed = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(10**6))
        seconds = float(os.environ.get("CHAOS_SECONDS") or DEFAULT_SECONDS)
    except ValueError as error:
        log(f"CHAOS_SEED and CHAOS_SECONDS: {error}; expected numbers")
        sys.exit(2)
    folder = Path(tempfile.mkdtemp(prefix="kvatlas-chaos-"))
    log(f"CHAOS_SEED={seed} CHAOS_SECONDS={seconds:g}; logs in {folder}")
    exact = anyio.run(run, names, seed, seconds, folder)
    if exact:
        shutil.rmtree(folder)
    sys.exit(0 if exact else 1)


if __name__ == "__main__":
    main()
