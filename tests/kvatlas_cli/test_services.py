"""Commands that go on until they are stopped, as child processes."""

import json
import os
import signal
from pathlib import Path

import pytest
from redis import Redis

from kvatlas.embedded import ServerProcess
from tests.kvatlas_cli.conftest import UNUSED_ADDRESS, child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_indexer_says_when_it_is_ready_and_stops_cleanly(
    nats: ServerProcess, valkey: ServerProcess, number: signal.Signals
) -> None:
    words = ("--member-id", "i1", "--status-port", "0")
    process = child("indexer", *words, KVATLAS_NATS_URL=nats.url, KVATLAS_REDIS_URL=valkey.url)
    assert process.stderr is not None and process.stdout is not None
    with process.stderr as errors, process.stdout as output:
        assert any("indexer i1 is ready" in line for line in errors)
        with Redis.from_url(valkey.url) as store:
            assert store.hgetall("kva:{fleet}:leases")
            process.send_signal(number)
            rest = errors.read()
            assert (process.wait(timeout=30), output.read()) == (0, "")
            assert rest == "kvatlas: member i1: stopped reading 64 partitions (0-63)\n"
            assert not store.hgetall("kva:{fleet}:leases")


def test_an_unreachable_server_is_tried_again_until_stopped(valkey: ServerProcess) -> None:
    process = child("indexer", "--redis-url", valkey.url, "--nats-url", f"nats://{UNUSED_ADDRESS}")
    assert process.stderr is not None and process.stdout is not None
    with process.stderr as errors, process.stdout:
        lines = [errors.readline(), errors.readline()]
        assert all(line.startswith(f"kvatlas: NATS at nats://{UNUSED_ADDRESS}: ") for line in lines)
        assert all("trying again in" in line for line in lines)
        process.terminate()
        assert "Traceback" not in errors.read()
    assert process.wait(timeout=30) == 0


def test_a_question_that_waits_can_be_interrupted() -> None:
    process = child("export", "--redis-url", f"redis://{UNUSED_ADDRESS}")
    assert process.stderr is not None and process.stdout is not None
    with process.stderr as errors, process.stdout:
        assert "trying again in" in errors.readline()
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in errors.read()
    assert process.wait(timeout=30) == 130


def test_up_prints_how_to_reach_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process = child("up", "--state-dir", str(tmp_path / "state"))
    assert process.stderr is not None and process.stdout is not None
    with process.stderr as errors, process.stdout as output:
        exported = dict(output.readline().removeprefix("export ").strip().split("=") for _ in range(2))
        assert set(exported) == {"KVATLAS_NATS_URL", "KVATLAS_REDIS_URL"}
        with Redis.from_url(exported["KVATLAS_REDIS_URL"]) as store:
            assert store.hgetall("kva:{fleet}:layout")
            server = int(store.info()["process_id"])
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in errors.read()
    assert process.wait(timeout=30) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
    assert (tmp_path / "state" / "valkey").is_dir()


def test_up_as_json_is_one_line(tmp_path: Path, nats: ServerProcess, valkey: ServerProcess) -> None:
    process = child("up", "--json", "--nats-url", nats.url, "--redis-url", valkey.url)
    assert process.stderr is not None and process.stdout is not None
    with process.stderr as errors, process.stdout as output:
        told = json.loads(output.readline())
        process.terminate()
        assert "Traceback" not in errors.read()
    assert process.wait(timeout=30) == 0
    assert told == {"nats_url": nats.url, "redis_url": valkey.url, "state_dir": None, "workers": []}
