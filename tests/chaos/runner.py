"""Runs scenarios on a running fleet."""

from tests.chaos.clusters.scenarios import CLUSTER_SCENARIOS
from tests.chaos.fleet import RETIRE_AFTER_S, Fleet
from tests.chaos.report import Outcome
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.scenarios import SCENARIOS

SCRUB_ARGUMENTS = ("--scrub-period-s", "3")
"""With these, damaged blocks are found soon."""
INDEXER_ARGUMENTS = ("--retire-after-s", str(RETIRE_AFTER_S), *SCRUB_ARGUMENTS)


ALL_SCENARIOS = {**SCENARIOS, **CLUSTER_SCENARIOS}


async def run_scenario(fleet: Fleet, name: str) -> Outcome:
    """Raises AssertionError if the index does not become exact."""
    run = ScenarioRun(fleet, name)
    try:
        await run.begin()
        await ALL_SCENARIOS[name](run)
        outcome = await run.settle()
        for worker in fleet.workers:
            if worker.worker_id in run.under_reporting:  # so that the next scenario can check everything
                await fleet.empty_engine(worker)
        return outcome
    except BaseException:
        await fleet.load.pause()
        await fleet.heal()  # for the next scenario
        raise
