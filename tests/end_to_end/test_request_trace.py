"""One request's path as a trace store receives it: from the engine's batch to the answer."""

from pathlib import Path

import anyio
import pytest

from kvatlas.embedded.free_port import LOOPBACK, free_port
from tests.end_to_end.processes import service
from tests.eventually import until
from tests.http_client import http_client
from tests.trace_receiver import ReceivedSpan, TraceReceiver, running_receiver

pytestmark = pytest.mark.anyio

SEND = "send kvatlas.events.{partition}.{worker}"
PROCESS = "process kvatlas.events.{partition}.{worker}"
BODY = {"model": "m", "prompt": "The quick brown fox jumps. " * 40, "max_tokens": 4, "stream": True}


class Traces:
    """The traces that the receiver has."""

    def __init__(self, receiver: TraceReceiver) -> None:
        self._receiver = receiver

    def spans(self, name: str, trace: str = "") -> list[ReceivedSpan]:
        return [span for span in self._receiver.spans() if span.name.startswith(name) and trace in span.trace]

    def linked(self, spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
        links = frozenset[str]().union(*(span.links for span in spans))
        return [span for span in self.spans(name) if span.id in links]


async def test_one_request_is_followed_from_the_engines_batch_to_its_answer(tmp_path: Path) -> None:
    engine, events, replay, nats, redis, port = (free_port() for _ in range(6))
    with running_receiver() as receiver:
        traces = Traces(receiver)
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        sockets = ["--endpoint", f"tcp://{LOOPBACK}:{events}", "--replay-endpoint", f"tcp://{LOOPBACK}:{replay}"]
        flags = ["--model", "m", "--port", str(engine), *sockets, "--speed-up", "100"]
        servers = ["--redis-port", str(redis), "--nats-port", str(nats), "--state-dir", str(tmp_path / "state")]
        up = ["up", "--engine", f"http://{LOOPBACK}:{engine},worker=w1", *servers]
        store = ["--redis-url", f"redis://{LOOPBACK}:{redis}/0"]
        router = ["router", *store, "--port", str(port), "--drain-s", "0"]
        async with (
            service("simulate-engine", *flags, ready="at http://", cwd=tmp_path),
            service(*up, ready="stop with Ctrl-C", cwd=tmp_path, variables=variables),
            service(*router, ready="router at", cwd=tmp_path, variables=variables),
            http_client(base_url=f"http://{LOOPBACK}:{port}", timeout=30) as client,
        ):
            number = 0

            async def is_reused() -> str:
                """The trace of a request whose blocks the index had from a known batch; requests are sent until there is
                one."""
                nonlocal number
                number += 1
                trace = f"{number:032x}"
                headers = {"traceparent": f"00-{trace}-{number:016x}-01"}
                if (await client.post("/v1/completions", json=BODY, headers=headers)).status_code != 200:
                    return ""
                await until(lambda: traces.spans("POST ", trace)[1:], what="its spans")
                (route,) = traces.spans("route kvatlas", trace)
                origin = traces.linked(traces.linked([route], PROCESS), SEND)
                batches = [span for span in origin if span.attributes["kvatlas.blocks"]]
                return trace if route.attributes["kvatlas.overlap_blocks"] and batches else ""

            with anyio.fail_after(60):
                while not (trace := await is_reused()):
                    await anyio.sleep(0.2)

        # caller -> router -> its steps -> engine, in one trace
        (server,) = [span for span in traces.spans("POST /v1/completions", trace) if span.kind == "SERVER"]
        assert server.parent == f"{int(trace, 16):016x}", "the caller's span"
        assert server.service == "kvatlas-router" and server.attributes["gen_ai.request.model"] == "m"
        (read,), (route,) = traces.spans("read prompt", trace), traces.spans("route kvatlas", trace)
        assert {read.parent, route.parent} == {server.id} and read.attributes["kvatlas.prompt_tokens"] > 0
        assert route.attributes["kvatlas.worker"] == "w1" and "kvatlas.explanation" in route.attributes
        steps = [span for span in traces.spans("FCALL", trace) if span.parent == route.id]
        assert {span.name for span in steps} == {"FCALL kvatlas_pool_book"}, "it also looks up what workers hold"
        for step in steps:
            assert step.kind == "CLIENT" and step.attributes["db.system.name"] == "redis"
            assert (step.attributes["server.address"], step.attributes["server.port"]) == (LOOPBACK, redis)
        (sent,) = [span for span in traces.spans("POST /v1/completions", trace) if span.kind == "CLIENT"]
        assert sent.parent == server.id
        assert (sent.attributes["server.address"], sent.attributes["server.port"]) == (LOOPBACK, engine)
        assert (sent.attributes["kvatlas.worker"], sent.attributes["http.response.status_code"]) == ("w1", 200)
        assert sent.attributes["gen_ai.provider.name"] == "vllm" and sent.attributes["gen_ai.usage.output_tokens"] == 4
        assert sent.events["first token"]["kvatlas.time_to_first_token"] > 0

        # the choice -> the applied batch that it was based on -> the batch as the publisher sent it
        (batch,) = traces.linked([route], PROCESS)
        origin = traces.linked([batch], SEND)
        assert {span.attributes["kvatlas.worker"] for span in [batch, *origin]} == {"w1"}
        (incarnation,) = {span.attributes["kvatlas.incarnation"] for span in [batch, *origin]}
        assert batch.parent in {span.id for span in origin}
        (applying,) = [span for span in traces.spans("FCALL kvatlas_apply") if span.parent == batch.id]
        assert applying.attributes["server.port"] == redis

        # and the snapshot with which that incarnation began
        (snapshot,) = [span for span in traces.spans(SEND) if "kvatlas.snapshot" in span.attributes]
        assert snapshot.attributes["kvatlas.incarnation"] == incarnation
        assert snapshot.attributes["kvatlas.snapshot"] == "publisher start"
        assert any(snapshot.id in span.links for span in traces.spans(PROCESS))
