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

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal exists on Linux only")

# The thread that starts the servers ends at once, and one server is paused; neither may matter.
PARENT = """
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
def parent() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def read_servers(parent: subprocess.Popen[str]) -> tuple[list[int], Path]:
    """The servers' process ids, and the directory of the first one."""
    assert parent.stdout is not None
    *words, directory = parent.stdout.readline().split()
    pids = [int(pid) for pid in words]
    assert len(pids) == 3
    assert all(is_alive(pid) for pid in pids)
    return pids, Path(directory)


def test_no_server_outlives_a_killed_parent(parent: subprocess.Popen[str]) -> None:
    pids, _ = read_servers(parent)
    parent.kill()
    parent.wait()
    until_sync(lambda: not any(is_alive(pid) for pid in pids), what="every server is gone")


def test_temporary_data_is_removed_only_after_its_process_was_killed(parent: subprocess.Popen[str]) -> None:
    _, directory = read_servers(parent)
    with NatsProcess():
        assert directory.exists()
    parent.kill()
    parent.wait()
    with NatsProcess():
        assert not directory.exists()


def test_no_server_outlives_a_parent_that_exits(parent: subprocess.Popen[str]) -> None:
    pids, _ = read_servers(parent)
    assert parent.stdin is not None
    parent.stdin.close()
    assert parent.wait(30) == 0
    assert not any(is_alive(pid) for pid in pids)


def test_a_terminal_interrupt_does_not_reach_the_servers(parent: subprocess.Popen[str]) -> None:
    pids, _ = read_servers(parent)
    assert all(os.getsid(pid) == pid for pid in pids)
    parent.send_signal(signal.SIGINT)
    parent.wait(30)
    until_sync(lambda: not any(is_alive(pid) for pid in pids), what="every server is gone")


def test_any_program_can_be_spawned_as_a_child() -> None:
    code = "from kvatlas.embedded import spawn_child; print(spawn_child(['sleep', '600']).pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    until_sync(lambda: not is_alive(pid), what="the child is gone")
