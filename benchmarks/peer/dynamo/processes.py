"""Starting the peer's processes."""

import http.client
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from benchmarks.child_processes import Child, child_process
from benchmarks.peer.dynamo.queries import MODEL, DynamoQueries
from kvatlas.embedded import spawn_child
from kvatlas.embedded.free_port import free_port

PYTHON = Path(".bench-peer/bin/python")
QUIET = {"DYN_LOG": "error"}
READY_S = 30
POLL_S = 0.05


def dynamo_child(module: str, args: Sequence[str], *, ready_s: float = READY_S) -> AbstractAsyncContextManager[Child]:
    """A benchmark module in the peer's Python; it may import only the standard library and what the peer installs."""
    return child_process(module, args, ready_s=ready_s, python=str(PYTHON), environment=QUIET)


@dataclass(frozen=True, slots=True)
class DynamoIndexer:
    """A running `dynamo.indexer`."""

    pid: int
    port: int
    queries: DynamoQueries


@asynccontextmanager
async def dynamo_indexer(endpoints: Sequence[str], block_size: int) -> AsyncIterator[DynamoIndexer]:
    """`python -m dynamo.indexer` with its defaults, following these engines as workers 0, 1, ..."""
    port = free_port()
    workers = ",".join(f"{number}={endpoint}" for number, endpoint in enumerate(endpoints))
    args = ["--port", str(port), "--block-size", str(block_size), "--model-name", MODEL, "--workers", workers]
    command = [str(PYTHON), "-m", "dynamo.indexer", *args]
    process = await anyio.to_thread.run_sync(lambda: spawn_child(command, env={**os.environ, **QUIET}))
    try:
        with anyio.fail_after(READY_S):
            while not await anyio.to_thread.run_sync(_answers, port):
                if process.poll() is not None:
                    raise RuntimeError(f"dynamo.indexer exited with {process.returncode} before it was ready")
                await anyio.sleep(POLL_S)
        yield DynamoIndexer(process.pid, port, DynamoQueries(port))
    finally:
        process.terminate()
        await anyio.to_thread.run_sync(process.wait)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()
