"""Runs every query of the dashboards and rules on a real Prometheus that scrapes a small fleet while it serves requests."""

import math
import shutil
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from k8s.dashboards.dashboards import DASHBOARDS
from kvatlas.embedded.free_port import LOOPBACK, free_port
from tests.deployment.test_alerts import FILE, RULES, SERIES, selectors_in
from tests.end_to_end.processes import service
from tests.end_to_end.prometheus import Prometheus
from tests.eventually import until
from tests.http_client import http_client
from tests.trace_receiver import TraceReceiver, running_receiver

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is missing: apt-get install prometheus"),
]

OF_A_SLOW_MACHINE = {
    "KvatlasDecisionsSlow",
    "KvatlasDecisionsWithoutIndex",
    "KvatlasIndexLate",
    "KvatlasTokenIdsMissing",
}
"""Alerts about times, which mean nothing where tests run; the others hold anywhere."""
OF_CERTIFICATES = "kvatlas_process_certificate_seconds"
"""Only processes with certificates export this metric: `python -m tests.alerts certificate_expires`."""
WINDOW = "30s"
"""Replaces Grafana's rate interval."""


@dataclass(frozen=True, slots=True)
class ScrapedFleet:
    """A router's URL, its servers' URLs, and the metrics ports of three processes: servers with indexer and publishers,
    router, picker."""

    router: str
    nats_url: str
    redis_url: str
    ports: list[int]


@asynccontextmanager
async def running_fleet(
    folder: Path,
    engines: int = 2,
    engine_flags: Sequence[str] = ("--speed-up", "100"),
    up_flags: Sequence[str] = (),
    collector: str = "",
) -> AsyncIterator[ScrapedFleet]:
    """The router's metrics are on its own port, the others' where the standard variables say. `up_flags`: additional flags of
    `kvatlas up`. The first two processes send traces to `collector`, if there is one.
    """
    ports = [free_port() for _ in range(3)]

    def metrics(port: int) -> dict[str, str]:
        return {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": str(port)}

    traces = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector}/v1/traces"}
    traces = {**traces, "OTEL_BSP_SCHEDULE_DELAY": "200"} if collector else {}

    async with AsyncExitStack() as stack:

        async def start(*words: str, ready: str, variables: dict[str, str] | None = None) -> None:
            await stack.enter_async_context(service(*words, ready=ready, cwd=folder, variables=variables))

        addresses = []
        for number in range(engines):
            port, events, replay = free_port(), free_port(), free_port()
            flags = ["--port", str(port), "--endpoint", f"tcp://{LOOPBACK}:{events}"]
            flags += ["--replay-endpoint", f"tcp://{LOOPBACK}:{replay}", *engine_flags]
            await start("simulate-engine", "--model", "m", *flags, ready="at http://")
            addresses += ["--engine", f"http://{LOOPBACK}:{port},worker=w{number}"]
        redis_port, nats_port, router_port = free_port(), free_port(), ports[1]
        flags = ["--redis-port", str(redis_port), "--nats-port", str(nats_port), "--state-dir", str(folder / "state")]
        flags += up_flags
        await start("up", *addresses, *flags, ready="stop with Ctrl-C", variables={**metrics(ports[0]), **traces})
        nats_url, redis_url = f"nats://{LOOPBACK}:{nats_port}", f"redis://{LOOPBACK}:{redis_port}/0"
        redis = ["--redis-url", redis_url, "--drain-s", "0"]
        flags = ["--port", str(router_port), "--no-access-log"]
        await start("router", *redis, *flags, ready="router at", variables=traces)
        flags = ["--port", "0", "--health-port", "0"]
        await start("epp", *redis, *flags, ready="endpoint picker on", variables=metrics(ports[2]))
        yield ScrapedFleet(f"http://{LOOPBACK}:{router_port}", nats_url, redis_url, ports)


async def ask(router: str, number: int) -> None:
    start = f"{number}: the" if number % 4 == 0 else "The"  # some are new, so that engines store blocks
    prompt = f"{start} quick brown fox jumps over the lazy dog. " + "Again and again. " * 20
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "stream": bool(number % 2)}
    async with http_client(timeout=30) as client:

        async def is_answered() -> bool:
            """On a busy machine, workers' heartbeats may be late for a moment."""
            return (await client.post(f"{router}/v1/completions", json=body)).status_code == 200

        await until(is_answered, what="a request is answered")


async def test_every_query_returns_data_of_a_running_fleet_and_no_alert_is_raised(tmp_path: Path) -> None:
    queries = {
        f"{board.title}: {panel.title}: {query.expr}": query.expr.replace("$__rate_interval", WINDOW).replace(
            "$worker", ".*"
        )
        for board in DASHBOARDS
        for panel in board.panels
        for query in panel.queries
    }
    queries |= {f"rules: {one}": one for rule in RULES for one in selectors_in(rule["expr"])}
    queries |= {f"tests of the rules: {one}": one for one in SERIES}
    queries |= {
        f"rules: {rule['record']}": rule["record"] for rule in RULES if rule.get("record", "").endswith("p99_5m")
    }
    queries = {name: query for name, query in queries.items() if not query.startswith(OF_CERTIFICATES)}
    with running_receiver() as receiver:
        async with running_fleet(tmp_path, collector=receiver.url) as fleet:
            await check_metrics(fleet.router, fleet.ports, queries, receiver, tmp_path)


async def check_metrics(
    router: str, ports: list[int], queries: dict[str, str], receiver: TraceReceiver, tmp_path: Path
) -> None:
    async with http_client() as client:

        async def is_routed() -> bool:
            answer = await client.get(f"{router}/v1/models")
            return answer.status_code == 200 and bool(answer.json()["data"])

        await until(is_routed, what="the router sees the workers")
        with Prometheus(ports, tmp_path, FILE) as prometheus:

            async def values(query: str) -> list[float]:
                answer = await client.get(f"{prometheus.url}/api/v1/query", params={"query": query})
                found: dict[str, Any] = answer.json()
                assert found["status"] == "success", f"{query}: {found}"
                return [float(one["value"][1]) for one in found["data"]["result"]]

            async def without_data(names: Iterable[str]) -> list[str]:
                return [name for name in names if not any(map(math.isfinite, await values(queries[name])))]

            missing = list(queries)
            with anyio.move_on_after(180):
                for number in count(0, 4):
                    async with anyio.create_task_group() as tasks:  # concurrently, so that each engine gets some
                        for one in range(number, number + 4):
                            tasks.start_soon(ask, router, one)
                    await anyio.sleep(0.5)
                    missing = await without_data(missing) or await without_data(queries)
                    if not missing:
                        break
            assert not missing
            assert await values("sum(up)") == [3]

            async def alerts() -> set[str]:
                """The alerts, including those that are not due yet."""
                raised = (await client.get(f"{prometheus.url}/api/v1/alerts")).json()["data"]["alerts"]
                return {one["labels"]["alertname"] for one in raised}

            async def is_quiet() -> bool:
                return await alerts() <= OF_A_SLOW_MACHINE

            # a sample follows new partitions in half a second, and an alert ends with the next scrapes
            await until(is_quiet, deadline_s=60, what="no alert is raised")
            assert (await values("sum(kvatlas_index_size)"))[0] > 0
            assert await values("sum(kvatlas_indexer_partitions_owned)") == [64]
            saved = await values("sum(kvatlas_router_saved_tokens_total)")

            async def is_traced() -> bool:
                """Each exemplar on a panel leads to a trace. Spans are sent a moment after they end."""
                exemplars = await client.get(
                    f"{prometheus.url}/api/v1/query_exemplars",
                    params={"query": "gen_ai_server_time_to_first_token_seconds_bucket", "start": "0", "end": "4e9"},
                )
                traces = {one["labels"]["trace_id"] for found in exemplars.json()["data"] for one in found["exemplars"]}
                return bool(traces) and traces <= {span.trace for span in receiver.spans()}

            await until(is_traced, what="points of a panel have their traces")
            assert saved[0] > 0 and (await values("sum(kvatlas_router_saved_time_seconds_total)"))[0] > 0


def test_the_fleet_of_compose_is_scraped_and_its_rules_are_these() -> None:
    compose = yaml.safe_load((FILE.parents[2] / "docker-compose.yml").read_text())
    volumes = compose["services"]["prometheus"]["volumes"]
    assert "./k8s/alerts/rules.yaml:/etc/prometheus/rules/kvatlas.yaml:ro" in volumes
    read = yaml.safe_load((FILE.parents[2] / "compose/prometheus.yaml").read_text())
    assert read["rule_files"] == ["/etc/prometheus/rules/*.yaml"]
