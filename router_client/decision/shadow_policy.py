"""Ways to choose a worker other than by cost, for a router in shadow mode or a request that asks for one."""

from collections.abc import Sequence
from typing import Protocol

from kvatlas.fleet.records import EngineEndpoint
from router_client.prompt import Prompt


class Policy(Protocol):
    """Another way to choose a worker."""

    def choose(self, prompt: Prompt, workers: Sequence[EngineEndpoint]) -> str:
        """The id of one of `workers`: the candidates for the prompt, sorted by id, never empty."""


class RoundRobin:
    """Chooses each worker in turn, as a policy to compare with."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, prompt: Prompt, workers: Sequence[EngineEndpoint]) -> str:
        """See `Policy`."""
        self._turn += 1
        return workers[(self._turn - 1) % len(workers)].id
