"""Runs scenarios on a running fleet."""

from tests.chaos.chaos import Chaos
from tests.chaos.fleet import RETIRE_AFTER_S, Fleet
from tests.chaos.report import Outcome
from tests.chaos.scenarios import SCENARIOS

SCRUB_WORDS = ("--scrub-period-s", "3")
"""So that what is damaged by hand is found soon."""
INDEXER_WORDS = ("--retire-after-s", str(RETIRE_AFTER_S), *SCRUB_WORDS)


async def run_scenario(fleet: Fleet, name: str) -> Outcome:
    """Raises AssertionError where it does not end exact."""
    chaos = Chaos(fleet, name)
    try:
        await chaos.begin()
        await SCENARIOS[name](chaos)
        outcome = await chaos.settle()
        for worker in fleet.workers:
            if worker.worker_id in chaos.under_reporting:  # so that the next scenario may ask for everything
                await fleet.empty_engine(worker)
        return outcome
    except BaseException:
        await fleet.load.rest()
        await fleet.mend()  # the next one begins whole
        raise
