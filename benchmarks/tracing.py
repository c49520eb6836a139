"""What traces cost: `python -m benchmarks.tracing`.

Processor time of a routed request without its engine (a choice among 64 workers, booked and released in Valkey, with all spans
that the proxy makes), and of a message from outbox to index, while traces are off, sampled at 1 % and all recorded. In turns,
so that a busy machine meets all of them; what is exported is encoded and thrown away.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from statistics import median
from time import perf_counter, process_time
from timeit import timeit

import uvloop
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from rich.console import Console

from benchmarks.result import Result, tabulate
from benchmarks.route.workload import BLOCKS, SCOPE, WORKERS, RouteWorkload
from benchmarks.stalls import apply_messages
from benchmarks.stores import valkey_store
from kvatlas.bus import wire
from kvatlas.events import EngineBatch, EngineStored
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import open_redis_index
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
from publishers.counters import PublisherCounters
from publishers.ledger.ledger import Ledger
from publishers.ledger.settings import LedgerSettings
from publishers.stream.changelog import Changelog, IncarnationReason
from router_client import RouterClient, RouterSettings
from router_client.proxy.request_trace import (
    describe_answer,
    describe_engine_answer,
    describe_first_token,
    engine_span,
    request_span,
    trace_headers,
)
from router_client.upstream.engine_answer import EngineRequest

ROUNDS = 15
CALLS = 200
SAMPLED = {"off": None, "1 %": 0.01, "100 %": 1.0}
BUDGET = {"1 %": 5.0}
PATH = "/v1/completions"
BLOCK_TOKENS = 16

Step = Callable[[], Awaitable[None]]


class _Encoder(SpanExporter):
    """Does what an exporter does, but for the network."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


@contextmanager
def sampled(share: float | None) -> Iterator[None]:
    """Traces with this share of requests sampled; None: off."""
    before = trace._TRACER_PROVIDER
    if share is None:
        yield
        return
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(share)))
    provider.add_span_processor(BatchSpanProcessor(_Encoder()))
    trace._TRACER_PROVIDER = provider  # the API lets a process set it once
    try:
        yield
        provider.force_flush()
    finally:
        trace._TRACER_PROVIDER = before
        provider.shutdown()


async def cpu_us(step: Step) -> dict[str, list[float]]:
    """Microseconds of processor time of a call, by share and round."""
    found: dict[str, list[float]] = {name: [] for name in SAMPLED}
    for number in range(ROUNDS + 1):
        for name, share in SAMPLED.items():
            began = process_time()
            with sampled(share):
                for _ in range(CALLS):
                    await step()
            if number:  # the first round warms up
                found[name].append((process_time() - began) / CALLS * 1e6)
    return found


async def route_once(router: RouterClient, workload: RouteWorkload) -> None:
    """A request as the proxy routes it, with an engine that answers at once."""
    request = EngineRequest("POST", PATH, b"", b"")
    with request_span(PATH, (), model="bench") as span:
        with step_span("read prompt"):
            prompt = workload.hashed_prompt()
        choice = await router.reserve(prompt)
        with engine_span(request, choice, "bench") as sent:
            trace_headers(sent)
            describe_engine_answer(sent, 200)
            describe_first_token(sent, 0.1)
        describe_answer(span, 200, choice.worker_id)
        await choice.done()


class Ingest:
    """One worker's events of 16 blocks, each published and applied by itself: the most spans that a block can cost. From the
    ledger to the index, but for the bus."""

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
        """All that is in the outbox, as an indexer applies it."""
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
    """Microseconds of all places of a routed request that make a span, while traces are off."""
    calls = 20_000

    def places() -> None:
        with request_span(PATH, ()), step_span("read prompt"), decision_span("route"):
            store_span("FCALL", "kvatlas_pool_book", {})
            store_span("FCALL", "kvatlas_overlap", {})
            store_span("FCALL", "kvatlas_pool_ends", {})
            trace_headers()

    return timeit(places, number=calls) / calls * 1e6


async def measure() -> list[Result]:
    """What each share costs beside traces switched off, in percent of processor time."""
    async with valkey_store() as store:
        workload = RouteWorkload(WORKERS, BLOCKS)
        await workload.write(store)
        async with RouterClient.open(store.url, RouterSettings(deadline_ms=None), wait=False) as router:
            routed = await cpu_us(partial(route_once, router, workload))
        ingest = Ingest(await open_redis_index(store, writer=True))
        await ingest.begin()
        applied = await cpu_us(ingest.pass_one)
    results = []
    off_us = median(routed["off"])
    for what, found in (("a routed request", routed), ("a message of 16 blocks", applied)):
        results.append(Result(f"{what}, traces off", median(found["off"]), "us"))
        for name in SAMPLED:
            if name != "off":
                more = [100 * (on / off - 1) for on, off in zip(found[name], found["off"], strict=True)]
                results.append(Result(f"  {name} sampled: more by", median(more), "%", BUDGET.get(name)))
    results.append(
        Result(
            "  of a request without traces, for the places that would make spans",
            100 * switched_off_us() / off_us,
            "%",
            1.0,
        )
    )
    return results


def main() -> None:
    began = perf_counter()
    console = Console(width=120)
    console.print(tabulate(uvloop.run(measure()), "processor time of traces"))
    console.print(f"took {perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
