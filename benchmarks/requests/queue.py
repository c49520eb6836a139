"""A queue in the router, on and off, at 1.2 times what the engines can serve: `python -m benchmarks.requests queue`.

There are two tenants, one of which sends four times as much, and two priorities. Without the router's queue, each engine queues
what it gets, in order of arrival. The engines report how many of their request slots are taken, as SGLang does.
"""

import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random

import httpx
from rich.table import Table

from benchmarks.child_processes import server_process
from benchmarks.fleet_records import routable_record
from benchmarks.requests.clients import Request, Seen, repeating, running_engines, send, ttft_ms
from kvatlas.embedded import valkey_server
from kvatlas.fleet.records import ForwardPassMetrics, WorkerState
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import connected_store
from kvatlas_simulator.engine.step_cost import StepCost

MODEL = "queue"
ENGINES = 4
SLOTS = 8
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 24
STEP_US = 200_000.0
"""Long steps: a few requests per second fill the engines, and the machine has time to spare."""
OVERLOAD = 1.2
SECONDS = 60.0
SLO_S = 4.0
REPORT_S = 0.5
TENANTS = {"a": 0.8, "b": 0.2}
URGENT = 0.2
ON = [
    "--queue-requests",
    "5000",
    "--queue-wait-s",
    "100",
    "--tenant-header",
    "x-tenant",
    "--priority-header",
    "x-priority",
]
WARM_UP_S = 10.0
"""Seconds at the start that don't count, until a queue has formed."""


@dataclass(frozen=True, slots=True)
class Run:
    """Results as clients saw them. `per_s`: requests per second."""

    name: str
    seen: Sequence[Seen]
    per_s: float

    @property
    def kinds(self) -> list[str]:
        return sorted({one.kind for one in self.seen})

    def of(self, kind: str) -> list[Seen]:
        return [one for one in self.seen if kind in (one.kind, "all")]

    def goodput_per_s(self, kind: str) -> float:
        """Requests per second whose first token came within the SLO."""
        good = sum(not one.error and one.ttft_s <= SLO_S for one in self.of(kind))
        return good / (len(self.seen) / self.per_s)


def capacity_per_s() -> float:
    """Requests per second that the engines can serve with all slots taken."""
    cost = StepCost(decode_step_us=STEP_US)
    kv_tokens = SLOTS * (PROMPT_TOKENS + OUTPUT_TOKENS // 2)
    step_us = cost.step_us(prefill_tokens=0, decode_sequences=SLOTS, decode_kv_tokens=kv_tokens, swapped_in=0)
    # each prompt is computed in a step that all slots wait for
    served_us = OUTPUT_TOKENS * step_us + SLOTS * PROMPT_TOKENS * cost.prefill_us_per_token
    return ENGINES * SLOTS * 1e6 / served_us


async def measure() -> list[Run]:
    """Measure without a queue, with one, and with one that three routers share."""
    return [
        await _run("engines' queues", []),
        await _run("one router's queue", ON),
        await _run("three routers' queue", ON, routers=3),
    ]


async def _run(name: str, flags: Sequence[str], routers: int = 1) -> Run:
    random = Random(5)
    per_s = OVERLOAD * capacity_per_s()
    engine = {"max_num_seqs": SLOTS, "decode_step_us": STEP_US, "events": False}
    async with (
        valkey_server() as valkey,
        connected_store(valkey.url, wait=False) as store,
        running_engines(MODEL, ENGINES, **engine) as urls,
        httpx.AsyncClient(trust_env=False, timeout=20) as client,
    ):
        await open_redis_index(store, writer=True)

        async def report() -> None:
            for number, url in enumerate(urls):
                page = (await client.get(f"{url}/metrics")).text
                seconds, us = await store.client.time()
                running, waiting = (_gauge(page, f"vllm:num_requests_{what}") for what in ("running", "waiting"))
                load = WorkerState(
                    id=f"w{number}",
                    running_decodes=running,
                    queued_prefill_tokens=waiting * PROMPT_TOKENS,
                    forward_pass=ForwardPassMetrics(
                        active_request_slots=running, total_request_slots=SLOTS, requests_waiting=waiting
                    ),
                    sampled_us=int(seconds) * 1_000_000 + int(us),
                )
                record = routable_record(Scope(MODEL, MODEL), load, base_url=url)
                await FleetStore(store).write({record.endpoint.id: record})

        arguments = [
            "router",
            "--redis-url",
            valkey.url,
            "--port",
            "0",
            "--tokenizer",
            "none",
            "--no-learn",
            "--no-access-log",
        ]
        async with repeating(report, REPORT_S), AsyncExitStack() as stack:
            started = [
                await stack.enter_async_context(
                    server_process("kvatlas_cli.main", [*arguments, *flags], r"router at (\S+?);?\s")
                )
                for _ in range(routers)
            ]
            requests = [_request(random) for _ in range(round(per_s * SECONDS))]
            seen = await send([router.announced for router in started], MODEL, requests, per_s, random)
    return Run(name, seen[round(per_s * WARM_UP_S) :], per_s)


def _gauge(page: str, name: str) -> int:
    found = re.search(rf"^{name}{{[^}}]*}} ([0-9.e+]+)$", page, re.MULTILINE)
    assert found is not None, f"no {name} on the engine's page"
    return int(float(found[1]))


def _request(random: Random) -> Request:
    (tenant,) = random.choices(list(TENANTS), list(TENANTS.values()))
    urgent = random.random() < URGENT
    prompt = [random.randrange(100_000) for _ in range(PROMPT_TOKENS)]
    headers = {"x-tenant": tenant, "x-priority": "0" if urgent else "1"}
    return Request(prompt, OUTPUT_TOKENS, headers, f"priority {0 if urgent else 1}, tenant {tenant}")


def tabulate(runs: Sequence[Run]) -> Table:
    """Results by priority and tenant."""
    names = [run.name for run in runs]
    table = Table(
        "requests",
        "number",
        *(f"{name}: TTFT p50 / p99 ms" for name in names),
        *(f"{name}: within SLO" for name in names),
    )
    table.title = (
        f"{runs[0].per_s:.0f} requests a second, {OVERLOAD:g} times the capacity; SLO: first token within {SLO_S:g} s"
    )
    for kind in [*runs[0].kinds, "all"]:
        number = len(runs[0].of(kind))
        times = [f"{ttft_ms(run.of(kind), 0.5):,.0f} / {ttft_ms(run.of(kind), 0.99):,.0f}" for run in runs]
        good = [f"{run.goodput_per_s(kind):.1f}/s" for run in runs]
        table.add_row(kind, str(number), *times, *good)
    table.add_row("lost", "", *(str(sum(bool(one.error) for one in run.seen)) for run in runs), *("" for _ in runs))
    return table
