"""Runs scenarios on a running fleet."""

from tests.chaos.chaos import Chaos
from tests.chaos.fleet import Fleet
from tests.chaos.report import Outcome
from tests.chaos.scenarios import SCENARIOS


async def run_scenario(fleet: Fleet, name: str) -> Outcome:
    """Raises AssertionError where it does not end exact."""
    chaos = Chaos(fleet, name)
    await chaos.begin()
    await SCENARIOS[name](chaos)
    return await chaos.settle()
