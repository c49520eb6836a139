"""The interface of a policy."""

import math
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvatlas_simulator.cache.kv_events import KVEvent
from kvatlas_simulator.lab.engine import EngineRequest, VirtualEngine
from kvatlas_simulator.lab.requests import LabRequest

REFUSED, WAITS = -1, -2
"""The choices of a policy that refuses a request, or lets it wait for its turn."""


class LabFetch(NamedTuple):
    """KV of a prompt's first `tokens`, which the request's engine fetches from another one before it computes the rest."""

    source: int
    tokens: int


class Policy(Protocol):
    """Chooses for one replay. Times are virtual microseconds and never go back. The same calls give the same choices."""

    def choose(self, request: LabRequest, now_us: float) -> int:
        """The number of the engine that gets the request, which must be up, or `REFUSED`, or `WAITS`. Called again if the
        request is lost, and for each request of `take_turns`."""

    @property
    def next_turns_us(self) -> float:
        """When to call `take_turns` next; infinite: nothing waits."""

    def take_turns(self, now_us: float) -> Sequence[LabRequest]:
        """The waiting requests that are tried now."""

    def fetch_of(self, request: LabRequest) -> LabFetch | None:
        """The KV that the chosen engine should fetch for this request."""

    def priority_of(self, request: LabRequest, now_us: float) -> int:
        """The request's priority in the chosen engine's queue; lower values come first."""

    def record_first_token(self, sequence: EngineRequest, engine: int) -> None:
        """Record the first token of a request that was sent to this engine."""

    def record_finish(self, sequence: EngineRequest, engine: int) -> None:
        """Record the end of a request that was sent to this engine."""

    def record_loss(self, sequence: EngineRequest, engine: int, now_us: float) -> None:
        """Record that a request was lost with its engine."""

    def record_loads(self, engines: Sequence[VirtualEngine], now_us: float) -> None:
        """Read the engines' reports; called once a second, and when an engine stops or starts."""

    def record_events(self, engine: int, events: Sequence[KVEvent]) -> None:
        """Record the engine's events when they arrive; only for policies with their own index."""

    def close(self) -> None:
        """End the replay."""


class LoadBlind:
    """A policy that needs no reports, has no index, lets no request wait, and lets engines fetch nothing."""

    @property
    def next_turns_us(self) -> float:
        """See `Policy`."""
        return math.inf

    def take_turns(self, now_us: float) -> Sequence[LabRequest]:
        """See `Policy`."""
        return ()

    def fetch_of(self, request: LabRequest) -> LabFetch | None:
        """See `Policy`."""

    def priority_of(self, request: LabRequest, now_us: float) -> int:
        """See `Policy`."""
        return 0

    def record_first_token(self, sequence: EngineRequest, engine: int) -> None:
        """See `Policy`."""

    def record_finish(self, sequence: EngineRequest, engine: int) -> None:
        """See `Policy`."""

    def record_loss(self, sequence: EngineRequest, engine: int, now_us: float) -> None:
        """See `Policy`."""

    def record_loads(self, engines: Sequence[VirtualEngine], now_us: float) -> None:
        """See `Policy`."""

    def record_events(self, engine: int, events: Sequence[KVEvent]) -> None:
        """See `Policy`."""

    def close(self) -> None:
        """See `Policy`."""


class OpenRequests(LoadBlind):
    """Counts the open requests of each engine, as a gateway would."""

    def __init__(self, engines: Sequence[VirtualEngine], rng: random.Random) -> None:
        self.engines = engines
        self.open = [0] * len(engines)
        self._rng = rng

    @property
    def up(self) -> list[int]:
        """The engines that may get requests."""
        return [number for number, engine in enumerate(self.engines) if engine.up]

    def least(self, costs: Iterable[tuple[int, float]]) -> int:
        """The engine with the lowest cost; a random one among equals."""
        found = list(costs)
        lowest = min(cost for _, cost in found)
        return self._rng.choice([engine for engine, cost in found if cost == lowest])

    def least_open(self) -> int:
        """The engine with the fewest open requests; a random one among equals."""
        return self.least((engine, self.open[engine]) for engine in self.up)

    def send(self, engine: int) -> int:
        """Count a request for this engine, and return its number."""
        self.open[engine] += 1
        return engine

    def record_finish(self, sequence: EngineRequest, engine: int) -> None:
        self.open[engine] -= 1

    def record_loss(self, sequence: EngineRequest, engine: int, now_us: float) -> None:
        self.open[engine] -= 1
