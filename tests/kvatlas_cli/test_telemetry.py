"""Commands export traces and metrics by OTLP if the standard variables say so, and work without a collector."""

import json
from pathlib import Path

import pytest

from kvatlas.embedded import ServerProcess
from tests.eventually import until_sync
from tests.kvatlas_cli.conftest import TOKENS, UNUSED_ADDRESS, start_command
from tests.trace_receiver import running_receiver


@pytest.fixture
def route(tmp_path: Path) -> list[str]:
    """The command line of a `route` for the prompt that w1 holds."""
    (tmp_path / "tokens").write_text(json.dumps(TOKENS))
    return ["route", "--tokens", str(tmp_path / "tokens"), "--model-id", "m", "--json"]


def test_the_span_of_a_decision_is_exported_before_the_command_ends(route: list[str], fleet_store_url: str) -> None:
    with running_receiver() as collector:
        process = start_command(*route, KVATLAS_REDIS_URL=fleet_store_url, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "") and json.loads(out)["worker"] == "w1"
        assert collector.has("/v1/traces", "route kvatlas", "kvatlas-route", "w1")


def test_an_unreachable_collector_does_not_change_the_answer(route: list[str], fleet_store_url: str) -> None:
    endpoint = f"http://{UNUSED_ADDRESS}"
    process = start_command(*route, KVATLAS_REDIS_URL=fleet_store_url, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and json.loads(out)["worker"] == "w1"
    assert "Traceback" not in err and UNUSED_ADDRESS.partition(":")[0] in err


def test_an_indexer_exports_the_size_of_the_index(nats_server: ServerProcess, fleet_store_url: str) -> None:
    with running_receiver() as collector:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_METRIC_EXPORT_INTERVAL": "100"}
        process = start_command(
            "indexer", KVATLAS_NATS_URL=nats_server.url, KVATLAS_REDIS_URL=fleet_store_url, **variables
        )
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
