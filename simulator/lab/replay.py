"""One replay: a workload against a fleet of virtual engines, routed by one policy. The same arguments give the same
outcome."""

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count

from kvatlas.index.memory.index import MemoryIndex
from kvatlas_simulator.cache.kv_events import KVEvent
from kvatlas_simulator.engine.scheduler import SchedulerLimits
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.lab.cache_layout import CacheLayout
from kvatlas_simulator.lab.engine import EngineRequest, VirtualEngine
from kvatlas_simulator.lab.event_path import EventPath
from kvatlas_simulator.lab.policies.catalogue import POLICIES, Fleet, PolicyKind
from kvatlas_simulator.lab.policies.engine_names import worker_name
from kvatlas_simulator.lab.policies.protocol import REFUSED, WAITS
from kvatlas_simulator.lab.requests import LabRequest, Workload, written_tokens

REPORT_US = 1e6
"""Engines' loads are read every second, like heartbeats."""
SHIFT_US = 3e6
START_US = 1e6
"""Earliest virtual time of the first arrival: a load sampled at 0 would count as never sampled."""


@dataclass(frozen=True, slots=True)
class Outage:
    """An engine takes no new requests from `begins` on, ends at `stops`, and is back with an empty cache at `ends`. Requests
    that are open when the engine stops are sent again. Times are shares of the time in which requests arrive. `engine` None:
    the one that has the most open requests when the outage begins; a fixed one would favor a policy that happens to leave it
    idle."""

    engine: int | None
    begins: float
    stops: float
    ends: float


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The fleet, and how its events travel. `cache_tokens`: the size of each engine's GPU cache; `cpu_tokens`: that of
    its host tier; `layout`: the layout of both. `dynamo_python`: the Python that the policy dynamo runs."""

    workers: int = 16
    cache_tokens: int = 500_000
    cpu_tokens: int = 0
    layout: CacheLayout = field(default_factory=CacheLayout)
    limits: SchedulerLimits = field(default_factory=lambda: SchedulerLimits(queue_limit=1 << 30))
    cost: StepCost = field(default_factory=StepCost)
    """`swap_in_us_per_block` is for a block of 16 tokens."""
    transfer_us_per_token: float = 3.0
    """Microseconds that a source takes to send one token's KV. It serves one reader after another."""
    event_delay_us: float = 5_000.0
    event_loss: float = 0.0
    outages: Sequence[Outage] = ()
    dynamo_python: str = sys.executable


@dataclass(frozen=True, slots=True)
class Served:
    """One request, as its client saw it. `number`: its number; `arrived_us`: when it arrived."""

    number: int
    arrived_us: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_us: float
    tpot_us: float
    """0 for an answer of one token."""

    @property
    def ended_us(self) -> float:
        """When its last token arrived, by the clock of `arrived_us`."""
        return self.arrived_us + self.ttft_us + self.tpot_us * (self.output_tokens - 1)

    @classmethod
    def of(cls, sequence: EngineRequest, arrived_us: float) -> "Served":
        """A finished request, with times on the clock of `arrived_us`."""
        request, after_first = sequence.request, sequence.request.output_tokens - 1
        return cls(
            request.number,
            arrived_us,
            request.input_tokens,
            request.output_tokens,
            sequence.cached_tokens or 0,
            sequence.first_token_us - arrived_us,
            (sequence.finished_us - sequence.first_token_us) / after_first if after_first else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A policy's result on a workload. `refused`: numbers of the requests that it refused. By engine: `prefilled_tokens`,
    `busy_us`."""

    served: Sequence[Served]
    refused: Sequence[int]
    span_us: float
    """Time from the first arrival to the last token."""
    prefilled_tokens: Sequence[int]
    busy_us: Sequence[float]
    preemptions: int
    lost_messages: int
    snapshots: int


def replay(
    workload: Workload,
    policy: str | PolicyKind,
    settings: FleetSettings,
    seed: int,
    *,
    speed: float = 1.0,
    on_progress: Callable[[int], None] | None = None,
    on_events: Callable[[int, Sequence[KVEvent], float], None] | None = None,
) -> Outcome:
    """Replay a workload. `policy`: a name in `POLICIES`, or another policy. `speed`: requests arrive this many times as fast.
    `on_progress` gets the number of arrivals now and then; `on_events` gets an engine's number, its events, and when they
    happened (us).

    Raises InvalidValue for a request that fits no engine.
    """
    return _Replay(workload, policy, settings, seed, speed, on_events).run(on_progress)


def draw_arrivals(workload: Workload, seed: int, speed: float) -> list[tuple[float, LabRequest]]:
    """When each request that waits for no other one arrives, in order. Each session is late by up to SHIFT_US, or by the
    trace's clock resolution if that is larger. So seeds differ in which requests coincide, as days do, while a session's own
    requests keep their spacing."""
    rng = random.Random(f"arrivals {seed}")
    most_us, shifts = max(SHIFT_US, workload.quantum_us), dict[int, float]()
    drawn = []
    for request in workload.requests:
        if request.after is not None:
            continue
        shift_us = shifts.setdefault(request.session, rng.random() * most_us)
        drawn.append((START_US + (request.arrival_us + shift_us) / speed, request))
    return sorted(drawn, key=lambda one: (one[0], one[1].number))


def build_engines(
    settings: FleetSettings, block_tokens: int, cost: StepCost | None = None, *, equal_seeds: bool = False
) -> list[VirtualEngine]:
    """The fleet's engines, with empty caches. `cost`: overrides the settings'. `equal_seeds`: the same block has the same
    hash on all engines, as with PYTHONHASHSEED. Raises InvalidValue if the trace's blocks don't fit the layout."""
    layout, blocks = settings.layout.scaled(block_tokens), max(1, settings.cache_tokens // block_tokens)
    return [
        VirtualEngine(
            layout.build(blocks, settings.cpu_tokens // block_tokens, 0 if equal_seeds else number),
            block_tokens,
            settings.limits,
            _cost_per_block(cost or settings.cost, block_tokens),
        )
        for number in range(settings.workers)
    ]


def _cost_per_block(cost: StepCost, block_tokens: int) -> StepCost:
    return replace(cost, swap_in_us_per_block=cost.swap_in_us_per_block * block_tokens / 16)


class _Replay:
    def __init__(
        self,
        workload: Workload,
        policy: str | PolicyKind,
        settings: FleetSettings,
        seed: int,
        speed: float,
        on_events: Callable[[int, Sequence[KVEvent], float], None] | None,
    ) -> None:
        self._on_events = on_events
        self._kind = kind = POLICIES[policy] if isinstance(policy, str) else policy
        self._settings = settings
        size = workload.block_tokens
        per_block = _cost_per_block(settings.cost, size)
        self._arrivals = draw_arrivals(workload, seed, speed)
        self._speed = speed
        self._next: dict[int, list[LabRequest]] = {}
        for request in workload.requests:
            if request.after is not None:
                self._next.setdefault(request.after, []).append(request)
        self._turns_us = math.inf
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._engines = build_engines(settings, size, equal_seeds=kind.own_index and kind.equal_seeds)
        index = MemoryIndex()
        self._paths = [
            EventPath(
                worker_name(number),
                index,
                self._at,
                random.Random(f"events {seed} {number}"),
                settings.layout.scaled(size),
                delay_us=settings.event_delay_us,
                loss=settings.event_loss,
            )
            for number in range(settings.workers if kind.uses_events and not kind.own_index else 0)
        ]
        fleet = Fleet(self._engines, index, per_block, random.Random(f"policy {seed}"), settings.dynamo_python)
        self._policy = kind.make(fleet)
        self._loss_rng = random.Random(f"loss {seed}")
        self._lost = 0
        self._links_free_us = [0.0] * settings.workers
        self._served: list[Served | None] = [None] * len(workload.requests)
        self._arrived: dict[int, float] = {}
        self._refused: list[int] = []
        self._left = len(workload.requests)
        self._ended_us = 0.0

    def run(self, on_progress: Callable[[int], None] | None) -> Outcome:
        try:
            return self._run(on_progress)
        finally:
            self._policy.close()

    def _run(self, on_progress: Callable[[int], None] | None) -> Outcome:
        first_us, last_us = self._arrivals[0][0], self._arrivals[-1][0]
        for outage in self._settings.outages:
            begins_us, stops_us, ends_us = (
                first_us + share * (last_us - first_us) for share in (outage.begins, outage.stops, outage.ends)
            )
            self._at(begins_us, partial(self._begin_outage, outage.engine, begins_us, stops_us, ends_us))
        for number, (when_us, request) in enumerate(self._arrivals):
            self._run_until(when_us)
            if on_progress is not None and number % 64 == 0:
                on_progress(number)
            self._arrive(request, when_us)
            if number == 0:
                self._report(when_us)
        self._run_until(math.inf)
        served = [one for one in self._served if one is not None]
        return Outcome(
            served,
            self._refused,
            self._ended_us - self._arrivals[0][0],
            [engine.prefilled_tokens for engine in self._engines],
            [float(engine.busy_us) for engine in self._engines],
            sum(engine.preemptions for engine in self._engines),
            self._lost + sum(path.lost for path in self._paths),
            sum(path.snapshots for path in self._paths),
        )

    def _at(self, when_us: float, action: Callable[[], None]) -> None:
        heappush(self._events, (when_us, next(self._order), action))

    def _run_until(self, when_us: float) -> None:
        while self._events and self._events[0][0] <= when_us:
            _, _, action = heappop(self._events)
            action()

    def _begin_outage(self, number: int | None, now_us: float, stops_us: float, ends_us: float) -> None:
        if number is None:
            open_requests = [len(engine.running) + len(engine.waiting) for engine in self._engines]
            number = open_requests.index(max(open_requests))
        self._set_up(number, False, now_us)
        self._at(stops_us, partial(self._stop, number, stops_us))
        self._at(ends_us, partial(self._set_up, number, True, ends_us))

    def _set_up(self, number: int, up: bool, now_us: float) -> None:
        self._engines[number].up = up
        self._policy.record_loads(self._engines, now_us)

    def _stop(self, number: int, now_us: float) -> None:
        """End an engine, and send its open requests again."""
        engine = self._engines[number]
        lost = engine.stop()
        self._publish(number, engine.cache.take_events(), now_us)
        for sequence in lost:
            self._policy.record_loss(sequence, number, now_us)
        for sequence in lost:
            self._send(sequence.request, now_us)

    def _arrive(self, request: LabRequest, now_us: float) -> None:
        self._arrived[request.number] = now_us
        self._send(request, now_us)

    def _send(self, request: LabRequest, now_us: float) -> None:
        number = self._policy.choose(request, now_us)
        self._plan_turns()
        if number == WAITS:
            return
        if number == REFUSED:
            self._arrived.pop(request.number)
            self._refuse(request)
            return
        engine = self._engines[number]
        fetch = self._policy.fetch_of(request)
        sequence = EngineRequest(request, priority=self._policy.priority_of(request, now_us))
        if fetch is None:
            self._submit(sequence, number, now_us)
            return
        namespace, source = request.identity.namespace, self._engines[fetch.source]
        prompt = sequence.content[: written_tokens(request.input_tokens, engine.block_tokens)]
        there = min(fetch.tokens, source.cached_tokens(prompt, namespace))
        missing = max(0, there - engine.cached_tokens(prompt, namespace))
        began_us = max(now_us, self._links_free_us[fetch.source])
        ended_us = began_us + missing * self._settings.transfer_us_per_token
        self._links_free_us[fetch.source] = ended_us
        sequence.received_tokens = there
        self._at(ended_us, lambda: self._submit(sequence, number, ended_us))

    def _refuse(self, request: LabRequest) -> None:
        """Count a refused request, and those that would have come after it."""
        self._refused.append(request.number)
        self._left -= 1
        for later in self._next.pop(request.number, ()):
            self._refuse(later)

    def _plan_turns(self) -> None:
        """Let the policy try waiting requests when it wants to."""
        if (next_us := self._policy.next_turns_us) != self._turns_us:
            self._turns_us = next_us
            if next_us < math.inf:
                self._at(next_us, partial(self._take_turns, next_us))

    def _take_turns(self, now_us: float) -> None:
        if now_us != self._turns_us:
            return  # an earlier time was planned since
        for request in self._policy.take_turns(now_us):
            self._send(request, now_us)
        self._plan_turns()

    def _submit(self, sequence: EngineRequest, number: int, now_us: float) -> None:
        engine = self._engines[number]
        ends_us = engine.ends_us
        engine.submit(sequence, now_us)
        if engine.ends_us != ends_us:
            self._wake(number)

    def _advance(self, number: int, ends_us: float) -> None:
        engine = self._engines[number]
        if engine.ends_us != ends_us:
            return  # a request has arrived in the meantime and cut the step short
        done = engine.advance()
        self._publish(number, done.events, done.ended_us)
        for sequence in done.first_tokens:
            self._policy.record_first_token(sequence, number)
        for sequence in done.finished:
            self._policy.record_finish(sequence, number)
            self._finish(sequence)
        if engine.ends_us < math.inf:
            self._wake(number)

    def _publish(self, number: int, events: Sequence[KVEvent], now_us: float) -> None:
        if events and self._on_events is not None:
            self._on_events(number, events, now_us)
        if events and self._paths:
            self._paths[number].publish(events, now_us)
        elif events and self._kind.own_index:
            self._deliver(number, events, now_us)

    def _deliver(self, number: int, events: Sequence[KVEvent], now_us: float) -> None:
        """Pass an engine's events to a policy with its own index, unless they are lost."""
        if self._settings.event_loss and self._loss_rng.random() < self._settings.event_loss:
            self._lost += 1
        else:
            self._at(now_us + self._settings.event_delay_us, lambda: self._policy.record_events(number, events))

    def _wake(self, number: int) -> None:
        """Advance the engine once its step ends."""
        ends_us = self._engines[number].ends_us
        self._at(ends_us, lambda: self._advance(number, ends_us))

    def _finish(self, sequence: EngineRequest) -> None:
        number = sequence.request.number
        self._served[number] = Served.of(sequence, self._arrived.pop(number))
        self._left -= 1
        self._ended_us = sequence.finished_us
        self._plan_turns()
        for request in self._next.pop(number, ()):
            when_us = sequence.finished_us + request.arrival_us / self._speed
            self._at(when_us, partial(self._arrive, request, when_us))

    def _report(self, now_us: float) -> None:
        self._policy.record_loads(self._engines, now_us)
        if self._left:
            self._at(now_us + REPORT_US, lambda: self._report(now_us + REPORT_US))
