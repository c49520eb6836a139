"""The expected workers, from a file and from the pods in a Kubernetes API."""

import io
from pathlib import Path

import pytest

from kvatlas.errors import KvatlasError, SettingsError
from kvatlas.fleet_store.departures import Departure
from kvatlas_cli.doctor import Level
from kvatlas_cli.doctor.expected_workers import list_expected, read_expected
from kvatlas_cli.doctor.workers import judge_missing
from tests.kvatlas_cli.test_collector import pod_object
from tests.router.gateway.kubernetes import namespace_of

pytestmark = pytest.mark.anyio

NOW_US = 1_800_000_000_000_000


async def test_each_pod_with_the_labels_should_be_a_worker(tmp_path: Path) -> None:
    pods = [
        pod_object("llama-3.1-a"),
        pod_object("llama-3.1-b"),
        pod_object("ranks"),
        pod_object("waits", phase="Pending"),
        pod_object("done", phase="Succeeded"),
        pod_object("other", app="other"),
        pod_object("ends", deletionTimestamp="2026-01-01T00:00:00Z"),
    ]
    namespace = namespace_of(tmp_path, [], pods)
    async with namespace.open() as api:
        expected = await list_expected(api, "app=engine")
        namespace.status = 403
        with pytest.raises(KvatlasError, match="403"):
            await list_expected(api, "app=engine")
    assert expected == {"llama-3_1-a": "", "llama-3_1-b": "", "ranks": "", "waits": "its pod is Pending"}
    (found,) = judge_missing({"llama-3_1-a", "ranks-dp0", "ranks-dp1"}, {}, expected, NOW_US)
    assert found.level is Level.ERROR
    assert found.line == "expected workers are missing: llama-3_1-b, waits (its pod is Pending)"


def test_a_file_has_worker_ids_or_pods_as_kubectl_prints_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "expected"
    file.write_text("# all\nw0\n\npod/llama-3.1-a\n")
    assert read_expected(file) == {"w0": "", "llama-3_1-a": ""}
    monkeypatch.setattr("sys.stdin", io.StringIO("pod/w1\n"))
    assert read_expected(Path("-")) == {"w1": ""}
    file.write_text("not an id\n")
    with pytest.raises(SettingsError, match="not an id"):
        read_expected(file)
    with pytest.raises(SettingsError, match="No such file"):
        read_expected(tmp_path / "none")


def test_who_fell_silent_within_the_hour_is_named_once() -> None:
    gone = Departure(worker_id="w1", model_id="m", at_us=NOW_US - 60_000_000, drained=False)
    (found,) = judge_missing({"w0"}, {"w1": gone}, {"w0": "", "w1": ""}, NOW_US)
    assert "w1 (the last one was retired 60 s ago)" in found.line
