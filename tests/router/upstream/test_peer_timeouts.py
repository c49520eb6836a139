"""A busy router does not blame engines for its own delays."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from kvatlas_router.upstream.engine_client import EngineClient, EngineUnreachable
from kvatlas_router.upstream.peer_timeouts import wait_patiently
from tests.router.proxy.faulty_engine import faulty_engine, well
from tests.router.upstream.nearby_engines import engine_client

pytestmark = pytest.mark.anyio

LIMIT_S = 0.05
TURN_S = 0.1
"""Each turn of the busy loop takes longer than the limit."""


@asynccontextmanager
async def busy_loop() -> AsyncIterator[None]:
    async def compute() -> None:
        while True:
            time.sleep(TURN_S)  # noqa: ASYNC251 - as in a busy router
            await asyncio.sleep(0)

    task = asyncio.create_task(compute())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextmanager
def address_that_does_not_answer() -> Iterator[str]:
    """Its queue of connections is full, so another one is neither accepted nor refused."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(8)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for one in waiting:
                one.close()


def client() -> EngineClient:
    return engine_client(connect_s=LIMIT_S)


async def test_a_connection_that_is_there_is_used_however_late_the_router_looks() -> None:
    async with faulty_engine(well) as engine, client() as engines, busy_loop():
        assert (await engines.call("GET", f"{engine.url}/health")).status == 200


async def test_an_engine_that_takes_no_connection_is_still_given_up() -> None:
    with address_that_does_not_answer() as url:
        async with client() as engines:
            with pytest.raises(EngineUnreachable, match=r"no connection within 0\.05 s") as raised:
                await engines.call("GET", url)
            assert not raised.value.connected


async def test_a_call_that_takes_too_long_is_cancelled() -> None:
    cancelled = False

    async def hang() -> None:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    with pytest.raises(TimeoutError):
        await wait_patiently(hang(), 0.01)
    assert cancelled
