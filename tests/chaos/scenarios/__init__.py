"""Every scenario by name. One does its faults under load and returns when all is whole again."""

from collections.abc import Awaitable, Callable

from tests.chaos.chaos import Chaos
from tests.chaos.scenarios import bus, combined, indexers, publishers, store, workers

Scenario = Callable[[Chaos], Awaitable[None]]

MODULES = (publishers, indexers, store, bus, workers, combined)

SCENARIOS: dict[str, Scenario] = {scenario.__name__: scenario for module in MODULES for scenario in module.SCENARIOS}
