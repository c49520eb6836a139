"""Every scenario by name. A scenario injects its faults under load and returns when everything runs again."""

from collections.abc import Awaitable, Callable

from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.scenarios import bus, combinations, indexers, publishers, rogues, shared_stores, store, workers

Scenario = Callable[[ScenarioRun], Awaitable[None]]

MODULES = (publishers, indexers, store, shared_stores, bus, workers, rogues, combinations)

SCENARIOS: dict[str, Scenario] = {scenario.__name__: scenario for module in MODULES for scenario in module.SCENARIOS}
