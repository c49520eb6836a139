"""Traces and metrics leave a command by OTLP when the standard variables say so; without a collector it works on."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvatlas.embedded import ServerProcess
from tests.eventually import until_sync
from tests.kvatlas_cli.conftest import TOKENS, UNUSED_ADDRESS, child


@pytest.fixture
def route(tmp_path: Path) -> list[str]:
    """The words of a `route` for the prompt that w1 holds."""
    (tmp_path / "tokens").write_text(json.dumps(TOKENS))
    return ["route", "--tokens", str(tmp_path / "tokens"), "--model-id", "m", "--json"]


class Collector:
    """Takes OTLP over HTTP and keeps the bytes by path."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.taken: list[tuple[str, bytes]] = []

    def has(self, path: str, *texts: str) -> bool:
        return any(where == path and all(text.encode() in body for text in texts) for where, body in self.taken)


@contextmanager
def collecting() -> Iterator[Collector]:
    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.taken.append((self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Take)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_decision_is_traced_before_the_command_ends(route: list[str], fleet: str) -> None:
    with collecting() as collector:
        process = child(*route, KVATLAS_REDIS_URL=fleet, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "") and json.loads(out)["worker"] == "w1"
        assert collector.has("/v1/traces", "route kvatlas", "kvatlas-route", "w1")


def test_without_a_collector_the_answer_is_the_same(route: list[str], fleet: str) -> None:
    endpoint = f"http://{UNUSED_ADDRESS}"
    process = child(*route, KVATLAS_REDIS_URL=fleet, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and json.loads(out)["worker"] == "w1"
    assert "Traceback" not in err and UNUSED_ADDRESS.partition(":")[0] in err


def test_an_indexer_tells_the_size_of_the_index(nats: ServerProcess, fleet: str) -> None:
    with collecting() as collector:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_METRIC_EXPORT_INTERVAL": "100"}
        process = child("indexer", KVATLAS_NATS_URL=nats.url, KVATLAS_REDIS_URL=fleet, **variables)
        assert process.stdout is not None and process.stderr is not None
        with process.stdout, process.stderr:
            until_sync(
                lambda: collector.has(
                    "/v1/metrics", "kvatlas-indexer", "kvatlas.index.size", "kvatlas.indexer.partitions.owned"
                ),
                deadline_s=30,
                what="the metrics of an indexer",
            )
            process.terminate()
            assert "Traceback" not in process.stderr.read()
        assert process.wait(timeout=30) == 0
