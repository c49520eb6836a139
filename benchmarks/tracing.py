"""The cost of tracing: `python -m benchmarks.tracing`.

It measures the CPU time of a request in `kvatlas router`, in processes that sample no traces, 1% and all; and of a message of
16 blocks from outbox to index with tracing off, with none sampled, and with all recorded (at 1%, 99 of 100 cost as much as an
unsampled one). Turns are short, so a busy machine affects all of them.
"""

import gc
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from random import Random
from statistics import median
from time import perf_counter, process_time
from timeit import timeit

import httpx
import uvloop
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from rich.console import Console

from benchmarks.child_processes import server_process
from benchmarks.fleet_records import routable_record
from benchmarks.process_usage import usage_of
from benchmarks.result import Result, tabulate
from benchmarks.route.workload import SCOPE
from benchmarks.stalls import apply_messages
from benchmarks.stores import valkey_store
from kvatlas.bus import wire
from kvatlas.fleet.records import WorkerState
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from kvatlas.telemetry import (
    LinkCollector,
    apply_span,
    current_traceparent,
    decision_span,
    describe_batch,
    flush_span,
    inject_headers,
    step_span,
    store_span,
)
from kvatlas.telemetry.root_sampler import decide_roots_first
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.engine_events import EngineBatch, EngineStored
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.ledger.settings import LedgerSettings
from kvatlas_publishers.stream.changelog import Changelog, IncarnationReason
from kvatlas_router.proxy.request_trace import (
    request_span,
    trace_headers,
)
from tests.trace_receiver import running_receiver

ROUNDS = 40
CALLS = 250
SAMPLED = {"off": None, "none": 0.0, "all": 1.0}
TURNS = 40
REQUESTS = 25
ROUTERS = {"off": None, "1 %": 0.01, "100 %": 1.0}
MODEL = "bench"
PROMPT_TOKENS = 8_192
BUDGET = 5.0
PATH = "/v1/completions"
BLOCK_TOKENS = 16

Step = Callable[[], Awaitable[None]]


class _Encoder(SpanExporter):
    """Does the work of an exporter, without the network."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def provider_of(share: float | None) -> TracerProvider | None:
    """A process' tracer provider, which samples this share of requests; None: tracing is off."""
    if share is None:
        return None
    provider = decide_roots_first(TracerProvider(sampler=ParentBased(TraceIdRatioBased(share))))
    provider.add_span_processor(BatchSpanProcessor(_Encoder()))
    return provider


@contextmanager
def traced_by(provider: TracerProvider | None) -> Iterator[None]:
    """Trace the block, and export all its spans at its end."""
    before, trace._TRACER_PROVIDER = trace._TRACER_PROVIDER, provider  # the API lets a process set it once
    try:
        yield
        if provider is not None:
            provider.force_flush()
    finally:
        trace._TRACER_PROVIDER = before


async def cpu_us(step: Step) -> dict[str, list[float]]:
    """CPU time of a call in microseconds, by share and round."""
    found: dict[str, list[float]] = {name: [] for name in SAMPLED}
    providers = {name: provider_of(share) for name, share in SAMPLED.items()}
    for number in range(ROUNDS + 1):
        for name, provider in providers.items():
            gc.collect()  # a turn's leftovers must not count for the next one
            began = process_time()
            with traced_by(provider):
                for _ in range(CALLS):
                    await step()
            if number:  # the first round warms up
                found[name].append((process_time() - began) / CALLS * 1e6)
    for provider in providers.values():
        if provider is not None:
            provider.shutdown()
    return found


async def router_cpu_us(store: Store) -> dict[str, float]:
    """CPU time of a request in microseconds, in router processes that differ only in tracing. The engine answers at once."""
    await store.client.flushall()
    await open_redis_index(store, writer=True)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        receiver = stack.enter_context(running_receiver())
        args = ["simulate-engine", "--model", MODEL, "--port", "0", "--speed-up", "1000000"]
        args += ["--endpoint", "tcp://127.0.0.1:0", "--replay-endpoint", "tcp://127.0.0.1:0"]
        engine = await enter(server_process("kvatlas_cli.main", args, r"engine at (\S+);"))
        record = routable_record(Scope(MODEL, MODEL), WorkerState(id="w1"), base_url=engine.announced)
        await FleetStore(store).write({"w1": record})
        args = ["router", "--port", "0", "--redis-url", store.url, "--no-access-log"]
        routers = {
            name: await enter(
                server_process("kvatlas_cli.main", args, r"router at (\S+);", traces_of(share, receiver.url))
            )
            for name, share in ROUTERS.items()
        }
        client = await enter(httpx.AsyncClient(timeout=30, trust_env=False))
        body = {"model": MODEL, "prompt": list(range(PROMPT_TOKENS)), "max_tokens": 16, "stream": True}
        spent = dict.fromkeys(routers, 0.0)
        for turn in range(TURNS + 1):
            for name, router in routers.items():
                before_s = usage_of(router.pid).cpu_s
                for _ in range(REQUESTS):
                    (await client.post(f"{router.announced}{PATH}", json=body)).raise_for_status()
                if turn:  # the first one warms up
                    spent[name] += usage_of(router.pid).cpu_s - before_s
        return {name: seconds * 1e6 / (TURNS * REQUESTS) for name, seconds in spent.items()}


def traces_of(share: float | None, url: str) -> dict[str, str]:
    """Environment variables of a process that exports this share of its traces to a receiver; empty for None."""
    if share is None:
        return {}
    return {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{url}/v1/traces",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(share),
    }


class Ingest:
    """One worker's events of 16 blocks, from the ledger to the index without the bus. Each event is published and applied
    separately, which causes the most spans per block."""

    def __init__(self, index: ResidencyIndex) -> None:
        self._index = index
        ledger = Ledger(LedgerSettings(SCOPE.model_id, SCOPE.tokenizer_id, block_size=BLOCK_TOKENS))
        self._changelog = Changelog("traced", ledger, PublisherCounters())
        self._links = LinkCollector()
        self._rng = Random(1)
        self._number = 0

    async def begin(self) -> None:
        self._changelog.require_incarnation(IncarnationReason.START)
        assert self._changelog.begin_incarnation(1, 1)
        await self._apply()

    async def pass_one(self) -> None:
        self._number += 16
        hashes = range(self._number, self._number + 16)
        tokens = self._rng.choices(range(100_000), k=16 * BLOCK_TOKENS)
        self._changelog.record(EngineBatch([EngineStored(hashes, None, tokens, BLOCK_TOKENS)]))
        events = self._changelog.fold()
        with flush_span("traced", incarnation=1, messages=1, events=1, blocks=16):
            self._changelog.publish(events, 1, 0.0, inject_headers())
        await self._apply()

    async def _apply(self) -> None:
        """Apply everything in the outbox, as an indexer does."""
        outbox, messages = self._changelog.outbox, []
        while (outgoing := outbox.take()) is not None:
            self._links.add(outgoing.headers)
            messages.append(wire.decode_raw(outgoing.payload))
            outbox.acknowledge(outgoing.round, outgoing.seq, outgoing.seq + 1)
        with apply_span(self._links.take(), shard=0, messages=len(messages)) as span:
            if span.is_recording():
                describe_batch(span, {("traced", 1): len(messages)})
            await apply_messages(self._index, messages)
            current_traceparent()


def switched_off_us() -> float:
    """Microseconds that all places that create a span take in a routed request, while tracing is off."""
    calls = 20_000

    def places() -> None:
        with request_span(PATH, ()), step_span("read prompt"), decision_span("route"):
            store_span("FCALL", "kvatlas_pool_book", {})
            store_span("FCALL", "kvatlas_overlap", {})
            store_span("FCALL", "kvatlas_pool_ends", {})
            trace_headers()

    return timeit(places, number=calls) / calls * 1e6


async def measure() -> list[Result]:
    """The cost of each share compared with no tracing, in percent of CPU time."""
    async with valkey_store() as store:
        routed = await router_cpu_us(store)
        ingest = Ingest(await open_redis_index(store, writer=True))
        await ingest.begin()
        applied = await cpu_us(ingest.pass_one)
    off_us = routed["off"]
    none, every = (
        median(100 * (on / off - 1) for on, off in zip(applied[name], applied["off"], strict=True))
        for name in ("none", "all")
    )
    return [
        Result("a routed request, traces off", off_us, "us"),
        Result("  of it the places that would make spans", 100 * switched_off_us() / off_us, "%", 1.0),
        Result("  1 % sampled: more by", 100 * (routed["1 %"] / off_us - 1), "%", BUDGET),
        Result("  100 % sampled: more by", 100 * (routed["100 %"] / off_us - 1), "%"),
        Result("a message of 16 blocks, traces off", median(applied["off"]), "us"),
        Result("  1 % sampled: more by", 0.99 * none + 0.01 * every, "%", BUDGET),
        Result("  100 % sampled: more by", every, "%"),
    ]


def main() -> None:
    began = perf_counter()
    console = Console(width=120)
    console.print(tabulate(uvloop.run(measure()), "CPU time of traces"))
    console.print(f"took {perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
