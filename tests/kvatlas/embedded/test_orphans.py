import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.embedded.nats import NatsProcess
from tests.eventually import until_sync
from tests.kvatlas.embedded.process_table import is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux' own")

# The thread that asks for the servers ends at once, and one server is paused: neither may matter.
OWNER = """
import sys, threading
from kvatlas.embedded.nats import NatsProcess
from kvatlas.embedded.valkey import ValkeyProcess

servers = [NatsProcess(), ValkeyProcess(), ValkeyProcess()]

def start():
    for server in servers:
        server.start()

thread = threading.Thread(target=start)
thread.start()
thread.join()
for server in servers[1:]:
    server.command("PING")
servers[2].pause()
print(*(server.pid for server in servers), servers[0].data_dir, flush=True)
sys.stdin.read()
for server in servers:
    server.close()
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def servers_of(owner: subprocess.Popen[str]) -> tuple[list[int], Path]:
    """Their process ids, and the first one's directory."""
    assert owner.stdout is not None
    *told, directory = owner.stdout.readline().split()
    pids = [int(pid) for pid in told]
    assert len(pids) == 3
    assert all(is_alive(pid) for pid in pids)
    return pids, Path(directory)


def test_no_server_outlives_a_killed_owner(owner: subprocess.Popen[str]) -> None:
    pids, _ = servers_of(owner)
    owner.kill()
    owner.wait()
    until_sync(lambda: not any(is_alive(pid) for pid in pids), what="every server is gone")


def test_the_data_of_a_killed_owner_is_removed_by_the_next_one_and_no_other(owner: subprocess.Popen[str]) -> None:
    _, directory = servers_of(owner)
    with NatsProcess():
        assert directory.exists()
    owner.kill()
    owner.wait()
    with NatsProcess():
        assert not directory.exists()


def test_no_server_outlives_an_owner_that_ends_by_itself(owner: subprocess.Popen[str]) -> None:
    pids, _ = servers_of(owner)
    assert owner.stdin is not None
    owner.stdin.close()
    assert owner.wait(30) == 0
    assert not any(is_alive(pid) for pid in pids)


def test_a_terminal_interrupt_does_not_reach_the_servers(owner: subprocess.Popen[str]) -> None:
    pids, _ = servers_of(owner)
    assert all(os.getsid(pid) == pid for pid in pids)
    owner.send_signal(signal.SIGINT)
    owner.wait(30)
    until_sync(lambda: not any(is_alive(pid) for pid in pids), what="every server is gone")


def test_any_program_can_be_owned() -> None:
    code = "from kvatlas.embedded import spawn_child; print(spawn_child(['sleep', '600']).pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_alive(pid)
        owner.kill()
    until_sync(lambda: not is_alive(pid), what="the owned program is gone")
