"""Real servers, a small known fleet in the store, and the command line, in this process or as a child."""

import asyncio
import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.embedded import ServerProcess
from kvatlas.embedded.nats import NatsProcess
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.events import ScopeUse
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Liveness, WorkerState
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import connected_store
from kvatlas_cli import logs, main
from kvatlas_cli.logs import OWN
from tests.end_to_end.processes import environment, kvatlas_command
from tests.eventually import until_sync

SCOPE = Scope("m", "m")
BLOCK_SIZE = 4
TOKENS = list(range(1, 17))
CHAIN = extend_chain(TOKENS, BLOCK_SIZE)
UNUSED_ADDRESS = "127.0.0.1:1"


@dataclass(frozen=True, slots=True)
class Done:
    """A finished command: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture(autouse=True)
def restored_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the levels and handlers that a command sets in this process, so that later tests don't have them."""
    root = logging.getLogger()
    handlers, level, levels = root.handlers[:], root.level, {name: logging.getLogger(name).level for name in OWN}
    monkeypatch.setattr(logs, "_formatter", logs._formatter)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, own_level in levels.items():
        logging.getLogger(name).setLevel(own_level)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run one command to its end, in this process, from an unrelated folder, without a terminal."""
    for name in os.environ:
        if name == "COLUMNS" or name.startswith(("KVATLAS_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*words: str, stdin: str = "", **variables: str) -> Done:
        with monkeypatch.context() as here:
            here.setattr(sys, "stdin", io.StringIO(stdin))
            for name, value in variables.items():
                here.setenv(name, value)
            code = _run(words)
        output = capsys.readouterr()
        return Done(code, output.out, output.err)

    return run


def _run(words: tuple[str, ...]) -> int:
    """Run a command, and return its exit code. It must leave no thread behind except the one that starts this process's
    children."""
    before = set(threading.enumerate())
    code = main.run(words)

    def is_alone() -> bool:
        left = set(threading.enumerate()) - before
        return all(thread.name.startswith("child-processes-") for thread in left)

    until_sync(is_alone, what=f"the threads of kvatlas {' '.join(words)} have ended")
    return code


_started: list[subprocess.Popen[str]] = []


def start_command(*words: str, **variables: str) -> subprocess.Popen[str]:
    """Start a command as a child process. It ends with the test."""
    process = subprocess.Popen(
        kvatlas_command(*words),
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _started.append(process)
    return process


@pytest.fixture(autouse=True)
def _no_command_left() -> Iterator[None]:
    """End the commands that a test started, even if it failed."""
    yield
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def valkey_server() -> Iterator[ServerProcess]:
    with ValkeyProcess() as server:
        yield server


@pytest.fixture(scope="module")
def nats_server() -> Iterator[ServerProcess]:
    with NatsProcess() as server:
        yield server


@pytest.fixture(scope="module")
def fleet_store_url(valkey_server: ServerProcess) -> str:
    """The URL of a store in which w1 holds all four blocks of TOKENS and w2 the first one."""
    asyncio.run(_fill(valkey_server.url))
    return valkey_server.url


async def _fill(url: str) -> None:
    async with connected_store(url, wait=False) as store:
        index = await open_redis_index(store, writer=True)
        use = ScopeUse(SCOPE, BLOCK_SIZE, 1024)
        await index.put(use, "w1", Tier.HBM, CHAIN)
        await index.put(use, "w2", Tier.CPU_DRAM, CHAIN[:8])
        await FleetStore(store).write({worker_id: _fleet_record(worker_id) for worker_id in ("w1", "w2")})


def _fleet_record(worker_id: str) -> FleetRecord:
    endpoint = EngineEndpoint(
        id=worker_id,
        kind=EngineKind.VLLM,
        base_url=f"http://{worker_id}:8000",
        model_id=SCOPE.model_id,
        tokenizer_id=SCOPE.tokenizer_id,
        block_size=BLOCK_SIZE,
    )
    load = WorkerState(id=worker_id, running_decodes=3)
    return FleetRecord(
        endpoint=endpoint,
        state=EngineState.UP,
        liveness=Liveness.ALIVE,
        load=load,
        incarnation=(1 << 63) + 1,
        heard_us=1,
    )
