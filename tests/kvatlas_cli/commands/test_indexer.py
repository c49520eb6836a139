"""`kvatlas indexer` as a child process."""

import re
import signal

import pytest
from redis import Redis

from kvatlas.embedded import ServerProcess
from tests.kvatlas_cli.conftest import UNUSED_ADDRESS, start_command

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_indexer_reports_that_it_is_ready_and_stops_cleanly(
    nats_server: ServerProcess, valkey_server: ServerProcess, number: signal.Signals
) -> None:
    words = ("--member-id", "i1", "--status-port", "0")
    process = start_command("indexer", *words, KVATLAS_NATS_URL=nats_server.url, KVATLAS_REDIS_URL=valkey_server.url)
    assert process.stderr is not None and process.stdout is not None
    with process.stderr as errors, process.stdout as output:
        assert any("indexer i1 is ready" in line for line in errors)
        with Redis.from_url(valkey_server.url) as store:
            assert store.hgetall("kva:{fleet}:leases")
            process.send_signal(number)
            remaining = errors.read()
            assert (process.wait(timeout=30), output.read()) == (0, "")
            assert re.fullmatch(rf"{TIME} info indexer: member i1: stopped reading 64 partitions \(0-63\)\n", remaining)
            assert not store.hgetall("kva:{fleet}:leases")


def test_an_unreachable_server_is_retried_until_the_command_is_stopped(valkey_server: ServerProcess) -> None:
    process = start_command("indexer", "--redis-url", valkey_server.url, "--nats-url", f"nats://{UNUSED_ADDRESS}")
    assert process.stderr is not None and process.stdout is not None
    with process.stderr as errors, process.stdout:
        lines = [errors.readline(), errors.readline()]
        assert all(f": NATS at nats://{UNUSED_ADDRESS}: " in line for line in lines)
        assert all("retrying in" in line for line in lines)
        process.terminate()
        assert "Traceback" not in errors.read()
    assert process.wait(timeout=30) == 0
