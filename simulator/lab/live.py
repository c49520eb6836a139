"""A replay over real servers in scaled real time: NATS, Valkey, an indexer, a publisher for each engine, and routers that
book in the store. The engines are virtual; their steps take `scale` times less real time than virtual time.

It shows what a replay in virtual time leaves out: how long events and choices take on their way, and their order.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path

import anyio

from kvatlas.blocks.hashing import extend_chain
from kvatlas.bus.connection import connect_nats
from kvatlas.cost import EngineProfile, EngineRates
from kvatlas.fleet.records import EngineKind
from kvatlas.store.connection import connected_store
from kvatlas_publishers.engine_events import EngineBatch
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.settings import PublisherSettings
from kvatlas_simulator.demo.processes import FleetSettings as ServerSettings
from kvatlas_simulator.demo.processes import running_fleet, wait_until_routable
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.lab.cache_layout import CacheLayout
from kvatlas_simulator.lab.engine import EngineRequest, VirtualEngine
from kvatlas_simulator.lab.engine_metrics import EngineMetrics
from kvatlas_simulator.lab.event_path import to_engine_event
from kvatlas_simulator.lab.policies.atlas import AtlasSettings
from kvatlas_simulator.lab.policies.engine_names import worker_name
from kvatlas_simulator.lab.replay import START_US, FleetSettings, Outcome, Served, build_engines, draw_arrivals
from kvatlas_simulator.lab.requests import MODEL, LabRequest, Workload
from router_client.client import RouterClient
from router_client.learning.timings import Timings
from router_client.learning.token_counts import Usage
from router_client.prompt import Prompt
from router_client.results import Choice
from router_client.settings import LearningSettings, RouterSettings

SAMPLE_S = 0.1
"""Interval at which engines' loads are read; heartbeats carry the latest one."""
ROUTABLE_S = 30.0
DEADLINE_MS = 5_000.0
"""Long, because we compare the choices themselves, not how a busy machine delays them."""


async def replay_live(
    workload: Workload,
    atlas: AtlasSettings,
    settings: FleetSettings,
    seed: int,
    *,
    speed: float = 1.0,
    scale: float = 1.0,
    on_progress: Callable[[int], None] = lambda arrived: None,
) -> Outcome:
    """`replay` for kvatlas: `scale` virtual seconds take one real second. Raises InvalidValue for a request that fits no
    engine, or KvatlasError for a server that does not start."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvatlas-lab-")))
        servers = await stack.enter_async_context(
            running_fleet(ServerSettings(MODEL, engines=0, indexers=1, engine_flags=(), routers={}), folder)
        )
        nats = await connect_nats(servers.nats_url, name="kvatlas-lab")
        stack.push_async_callback(nats.close)
        engines = build_engines(settings, workload.block_tokens, scaled_cost(settings.cost, scale))
        publishers = [
            await stack.enter_async_context(
                Publisher(_publisher_settings(number, workload, settings.layout), nats=nats)
            )
            for number in range(settings.workers)
        ]
        router_settings = RouterSettings(
            profile=EngineProfile(_scaled_rates(scale)),
            booking=atlas.booking,
            learning=LearningSettings(on=atlas.learning),
            deadline_ms=DEADLINE_MS,
            most_deadline_ms=DEADLINE_MS,
        )
        routers = [
            await stack.enter_async_context(
                RouterClient.open(servers.redis_url, replace(router_settings, router_id=f"lab-{number}"))
            )
            for number in range(atlas.replicas)
        ]
        async with connected_store(servers.redis_url, wait=False) as store:
            await wait_until_routable(store, settings.workers, ROUTABLE_S)
        arrivals = draw_arrivals(workload, seed, speed * scale)
        return await _LiveReplay(workload, settings.layout, engines, publishers, routers, arrivals, scale).run(
            on_progress
        )


def scaled_cost(cost: StepCost, scale: float) -> StepCost:
    """The costs of an engine that is `scale` times as fast."""
    return StepCost(
        cost.prefill_us_per_token / scale,
        cost.decode_step_us / scale,
        cost.decode_us_per_sequence / scale,
        cost.decode_us_per_kv_token / scale,
        cost.swap_in_us_per_block / scale,
        cost.attention_us_per_token_pair / scale,
        cost.overhead_us / scale,
    )


def _scaled_rates(scale: float) -> EngineRates:
    rates = EngineRates()
    return replace(
        rates,
        prefill_us_per_token=rates.prefill_us_per_token / scale,
        attention_us_per_token_pair=rates.attention_us_per_token_pair / scale,
        tpot_base_us=rates.tpot_base_us / scale,
        tpot_us_per_running=rates.tpot_us_per_running / scale,
        tpot_us_per_kv_token=rates.tpot_us_per_kv_token / scale,
    )


def _publisher_settings(number: int, workload: Workload, layout: CacheLayout) -> PublisherSettings:
    return PublisherSettings(
        worker_id=worker_name(number),
        model_id=MODEL,
        tokenizer_id=MODEL,
        engine=EngineKind.MOCK,
        block_size=workload.block_tokens,
        chunk_size=layout.chunk_tokens,
        salt_is_tenant=True,
    )


class _LiveReplay:
    def __init__(
        self,
        workload: Workload,
        layout: CacheLayout,
        engines: Sequence[VirtualEngine],
        publishers: Sequence[Publisher],
        routers: Sequence[RouterClient],
        arrivals: Sequence[tuple[float, LabRequest]],
        scale: float,
    ) -> None:
        self._block_tokens = workload.block_tokens
        self._groups = layout.groups
        self._engines = engines
        self._publishers = publishers
        self._routers = routers
        self._arrivals = arrivals
        self._scale = scale
        self._served: list[Served | None] = [None] * len(arrivals)
        self._open: dict[int, tuple[Choice, float]] = {}
        """The choice and the arrival time of each request."""
        self._left = len(arrivals)
        self._ended_us = 0.0
        self._metrics = EngineMetrics()
        self._began_s = time.monotonic()
        self._changed = anyio.Event()

    async def run(self, on_progress: Callable[[int], None]) -> Outcome:
        self._began_s = time.monotonic() - START_US / 1e6
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._sample_loads)
            tasks.start_soon(self._run_engines, tasks.cancel_scope)
            for number, (when_us, request) in enumerate(self._arrivals):
                await anyio.sleep(max(0.0, (when_us - self._now_us()) / 1e6))
                tasks.start_soon(self._arrive, request, self._routers[number % len(self._routers)])
                on_progress(number)
        return Outcome(
            [one for one in self._served if one is not None],
            (),
            (self._ended_us - self._arrivals[0][0]) * self._scale,
            [engine.prefilled_tokens for engine in self._engines],
            [engine.busy_us * self._scale for engine in self._engines],
            sum(engine.preemptions for engine in self._engines),
            0,
            sum(publisher.counters.snapshots for publisher in self._publishers),
        )

    def _now_us(self) -> float:
        return (time.monotonic() - self._began_s) * 1e6

    async def _arrive(self, request: LabRequest, router: RouterClient) -> None:
        arrived_us = self._now_us()
        size = self._block_tokens
        contents = request.prompt_contents(size)
        chain = extend_chain([content for content in contents for _ in range(size)], size)
        prompt = Prompt.of_hashes(request.identity.scope, chain, size, input_tokens=request.input_tokens)
        choice = await router.reserve(prompt)
        self._open[request.number] = choice, arrived_us
        number = int(choice.worker_id[1:])
        await self._catch_up(number)  # otherwise this request would follow a step that is over but not ended here yet
        self._engines[number].submit(EngineRequest(request), self._now_us())
        self._changed.set()

    async def _run_engines(self, scope: anyio.CancelScope) -> None:
        while self._left:
            self._changed = anyio.Event()
            for number in range(len(self._engines)):
                await self._catch_up(number)
            if self._left:
                next_us = min(engine.ends_us for engine in self._engines)
                with anyio.move_on_after(max(0.0, (next_us - self._now_us()) / 1e6)):
                    await self._changed.wait()
        scope.cancel()

    async def _catch_up(self, number: int) -> None:
        """End those of an engine's steps that are over by now."""
        while self._engines[number].ends_us <= self._now_us():
            await self._advance(number)

    async def _advance(self, number: int) -> None:
        done = self._engines[number].advance()
        if done.events:
            events = [to_engine_event(event, self._groups, self._block_tokens) for event in done.events]
            self._publishers[number].record(EngineBatch(events))
        for sequence in done.first_tokens:
            await self._open[sequence.request.number][0].first_token()
        for sequence in done.finished:
            await self._finish(sequence)

    async def _finish(self, sequence: EngineRequest) -> None:
        request = sequence.request
        choice, arrived_us = self._open.pop(request.number)
        seen = Served.of(sequence, arrived_us)
        await choice.done(
            usage=Usage(seen.input_tokens, seen.output_tokens, seen.cached_tokens),
            timings=Timings(seen.ttft_us, seen.tpot_us or None),
        )
        self._served[request.number] = replace(
            seen, ttft_us=seen.ttft_us * self._scale, tpot_us=seen.tpot_us * self._scale
        )
        self._metrics.record_finish(request.input_tokens)
        self._left -= 1
        self._ended_us = sequence.finished_us

    async def _sample_loads(self) -> None:
        """Sample loads as a publisher reads them from vLLM's metrics."""
        for _ in count():
            for publisher, engine in zip(self._publishers, self._engines, strict=True):
                publisher.engine.reported_load = self._metrics.read(
                    publisher.worker_id, engine, time.time_ns() // 1_000
                )
            await anyio.sleep(SAMPLE_S)
