"""`kvatlas up` as a child process."""

import json
import os
import signal
from pathlib import Path

import httpx
import pytest
from redis import Redis

from kvatlas.embedded import ServerProcess
from kvatlas.embedded.free_port import free_port
from tests.kvatlas_cli.conftest import Cli, start_command


def test_up_prints_its_addresses_shares_its_folder_with_none_and_leaves_no_process_behind(
    cli: Cli, tmp_path: Path
) -> None:
    process = start_command("up", "--state-dir", str(tmp_path / "state"))
    assert process.stderr is not None and process.stdout is not None
    with process.stderr as errors, process.stdout as output:
        exported = dict(output.readline().removeprefix("export ").strip().split("=") for _ in range(2))
        assert set(exported) == {"KVATLAS_NATS_URL", "KVATLAS_REDIS_URL"}
        with Redis.from_url(exported["KVATLAS_REDIS_URL"]) as store:
            assert store.hgetall("kva:{fleet}:layout")
            server = int(store.info()["process_id"])
        second = cli("up", "--state-dir", str(tmp_path / "state"))
        line = f"--state-dir (or KVATLAS_STATE_DIR) is {tmp_path}/state, which another `kvatlas up` uses; expected a separate"
        assert (second.code, second.out, second.err) == (2, "", f"kvatlas up: {line} folder\n")
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in errors.read()
    assert process.wait(timeout=30) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
    assert (tmp_path / "state" / "valkey").is_dir()


def test_up_prints_one_line_as_json(tmp_path: Path, nats_server: ServerProcess, valkey_server: ServerProcess) -> None:
    process = start_command("up", "--json", "--nats-url", nats_server.url, "--redis-url", valkey_server.url)
    assert process.stderr is not None and process.stdout is not None
    with process.stderr as errors, process.stdout as output:
        printed = json.loads(output.readline())
        process.terminate()
        lines = errors.read().splitlines()
    assert lines[:2] == [
        f"kvatlas: using the NATS at {nats_server.url} (--nats-url or KVATLAS_NATS_URL); starting none here",
        f"kvatlas: using the Redis at {valkey_server.url} (--redis-url or KVATLAS_REDIS_URL); starting none here",
    ]
    assert process.wait(timeout=30) == 0
    assert printed == {"nats_url": nats_server.url, "redis_url": valkey_server.url, "state_dir": None, "workers": []}


def test_the_status_page_of_up_has_its_metrics(
    tmp_path: Path, nats_server: ServerProcess, valkey_server: ServerProcess
) -> None:
    port = free_port()
    servers = ["--nats-url", nats_server.url, "--redis-url", valkey_server.url]
    process = start_command("up", "--json", *servers, "--status-port", str(port))
    assert process.stderr is not None and process.stdout is not None
    with process.stderr, process.stdout as output, httpx.Client(trust_env=False) as client:
        assert output.readline()
        page = client.get(f"http://127.0.0.1:{port}/metrics").text
        process.terminate()
        process.wait(timeout=30)
    assert "kvatlas_indexer_partitions_owned" in page and 'service_name="kvatlas-up"' in page
