"""`make chaos`: random faults in a fleet of 4 engines, 2 of them hybrids, and 3 indexers.

Runs for CHAOS_SECONDS (300), with CHAOS_SEED (random). With CHAOS_REVISION (a commit of this repository, for example HEAD~1)
everything starts in that version, and one more fault is that a process continues in the other version.

    python -m tests.chaos                   random faults
    python -m tests.chaos clusters          the same on three NATS servers and six Valkey servers, whose faults come on top
    python -m tests.chaos all               every scenario once
    python -m tests.chaos NAME...           these scenarios
    python -m tests.chaos requests          requests while engines fail and routers are replaced: what is lost
    python -m tests.chaos soak SECONDS      64 ranks with churn: memory of each process over time, and unexplained log lines

Exit code 0 only if the index became exact after every round or scenario. A seed gives the same faults in the same order;
their timing depends on the machine.
"""

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import anyio

from benchmarks.store_calls import SHORTEST_US, StoreCall
from tests.chaos.clusters.random_faults import CLUSTER_FAULTS
from tests.chaos.clusters.scenarios import CLUSTER_SCENARIOS, fleet_on_clusters
from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.random_faults import FAULTS, UPGRADES, Fault, run_random_faults
from tests.chaos.report import Outcome, as_text
from tests.chaos.requests.request_figures import print_request_figures
from tests.chaos.runner import ALL_SCENARIOS, INDEXER_ARGUMENTS, SCRUB_ARGUMENTS, run_scenario
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.soak.soak import run_soak
from tests.end_to_end.processes import ROOT, check_out, query

DEFAULT_SECONDS = 300.0
CLUSTERS = "clusters"


class Size(TypedDict):
    """The fleet's size. Two of the engines are hybrids, whose marks must be exact too."""

    engines: int
    hybrids: int
    indexers: int


SIZE = Size(engines=4, hybrids=2, indexers=3)


async def run(names: Sequence[str], seed: int, seconds: float, revision: str | None, folder: Path) -> bool:
    """Run, and print a report. True if everything is exact."""
    tree = await check_out(revision, folder / "other") if revision else ROOT
    upgrades = UPGRADES if revision else {}
    outcomes: list[Outcome] = []
    failures: list[str] = []
    if names == [CLUSTERS]:
        async with fleet_on_clusters(folder, **SIZE, seed=seed, indexer_arguments=SCRUB_ARGUMENTS, tree=tree) as fleet:
            await run_rounds(fleet, CLUSTER_FAULTS | upgrades, seed, seconds, outcomes, failures)
            await finish(fleet, failures)
    elif not names:
        async with running_fleet(
            folder, **SIZE, seed=seed, indexer_arguments=SCRUB_ARGUMENTS, large=1, tree=tree
        ) as fleet:
            await run_rounds(fleet, FAULTS | upgrades, seed, seconds, outcomes, failures)
            await finish(fleet, failures)
    if scenarios := [name for name in names if name in SCENARIOS]:
        async with running_fleet(folder, **SIZE, seed=seed, indexer_arguments=INDEXER_ARGUMENTS, large=1) as fleet:
            await run_scenarios(fleet, scenarios, outcomes, failures)
            await finish(fleet, failures)
    if scenarios := [name for name in names if name in CLUSTER_SCENARIOS]:
        folder = folder / CLUSTERS
        folder.mkdir()
        async with fleet_on_clusters(folder, **SIZE, seed=seed, indexer_arguments=INDEXER_ARGUMENTS) as fleet:
            await run_scenarios(fleet, scenarios, outcomes, failures)
            await finish(fleet, failures)
    return report(outcomes, failures)


async def run_rounds(
    fleet: Fleet,
    faults: Mapping[Fault, float],
    seed: int,
    seconds: float,
    outcomes: list[Outcome],
    failures: list[str],
) -> None:
    try:
        await run_random_faults(fleet, faults, seed, seconds, log, outcomes)
    except AssertionError as error:
        failures.append(str(error))


async def run_scenarios(fleet: Fleet, names: Sequence[str], outcomes: list[Outcome], failures: list[str]) -> None:
    for name in names:
        try:
            outcomes.append(await run_scenario(fleet, name))
            await fleet.note_store_call()
            log(f"{name}: exact after {outcomes[-1].exact_after_s:.2f} s")
        except* AssertionError as errors:
            failures.append(f"{name}: {errors.exceptions[0]}")
            log(failures[-1])


async def finish(fleet: Fleet, failures: list[str]) -> None:
    await fleet.note_store_call()
    log_longest("longest store call", fleet.store_calls)
    log_longest("functions loaded, once a version of each server", fleet.function_loads)
    try:
        await audit(fleet)
    except AssertionError as error:
        failures.append(f"kvatlas audit: {error}")


async def audit(fleet: Fleet) -> None:
    """Run `kvatlas audit` for each worker: a rogue that has just left has no publisher that could answer. Raises AssertionError
    if it finds differences."""
    servers = ("--nats-url", ",".join(one.url for one in fleet.nats_servers), "--redis-url", fleet.store_url)
    for worker in fleet.workers:
        await query("audit", *servers, "--worker", worker.worker_id)


def run_soak_command(arguments: Sequence[str]) -> None:
    """Exits as `main` does. The measured data stays."""
    if len(arguments) != 1 or not arguments[0].isdecimal():
        log(f"soak {' '.join(arguments)}; expected one number of seconds")
        sys.exit(2)
    folder = Path(tempfile.mkdtemp(prefix="kvatlas-soak-"))
    sys.exit(0 if anyio.run(run_soak, float(arguments[0]), folder, log) else 1)


def report(outcomes: Sequence[Outcome], failures: Sequence[str]) -> bool:
    """Print the report. True if everything is exact."""
    log(as_text(outcomes))
    for failure in failures:
        log(f"NOT EXACT: {failure}")
    return not failures and not any(outcome.wrong for outcome in outcomes)


def log_longest(what: str, calls: Sequence[StoreCall]) -> None:
    if calls:
        longest = max(calls, key=lambda call: call.ms)
        log(f"{what}: {longest.command}, {longest.ms:.1f} ms (other programs may have interrupted it)")
    else:
        log(f"{what}: none above {SHORTEST_US / 1e3:g} ms")


def log(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """Exit with 0, with 1 if something was not exact, or with 2 for wrong usage."""
    names = sys.argv[1:]
    if names == ["requests"]:
        with tempfile.TemporaryDirectory(prefix="kvatlas-chaos-") as logs:
            sys.exit(0 if anyio.run(print_request_figures, Path(logs), log) else 1)
    if names[:1] == ["soak"]:
        run_soak_command(names[1:])
    if names == ["all"]:
        names = list(ALL_SCENARIOS)
    if names != [CLUSTERS] and (unknown := [name for name in names if name not in ALL_SCENARIOS]):
        expected = f"all, {CLUSTERS}, requests, or some of {', '.join(ALL_SCENARIOS)}"
        log(f"no scenario {', '.join(unknown)}; expected {expected}")
        sys.exit(2)
    try:
        seed = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(10**6))
        seconds = float(os.environ.get("CHAOS_SECONDS") or DEFAULT_SECONDS)
    except ValueError as error:
        log(f"CHAOS_SEED and CHAOS_SECONDS: {error}; expected numbers")
        sys.exit(2)
    folder = Path(tempfile.mkdtemp(prefix="kvatlas-chaos-"))
    log(f"CHAOS_SEED={seed} CHAOS_SECONDS={seconds:g}; logs in {folder}")
    exact = anyio.run(run, names, seed, seconds, os.environ.get("CHAOS_REVISION"), folder)
    if exact:
        shutil.rmtree(folder)
    sys.exit(0 if exact else 1)


if __name__ == "__main__":
    main()
