"""Routers as processes: several that share a port, and one with few file descriptors."""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from kvatlas.embedded.free_port import free_port
from kvatlas.store.connection import Store
from tests.end_to_end.processes import environment, kvatlas_command, line_with
from tests.eventually import until
from tests.http_client import http_client
from tests.router.proxy.engines import MODEL, running_fleet
from tests.router.proxy.test_proxy import PROMPT

pytestmark = pytest.mark.anyio

BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}


@asynccontextmanager
async def router(
    valkey_url: str, *flags: str, descriptors: int | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A router that may open this many file descriptors."""
    words = ["router", "--redis-url", valkey_url, "--tokenizer", "none", "--decision-header", "always", *flags]

    def limit() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    process = await asyncio.create_subprocess_exec(
        *kvatlas_command(*words),
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
        preexec_fn=limit,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        with anyio.CancelScope(shield=True):
            await process.wait()


async def proxied(at: httpx.AsyncClient) -> int:
    """Number of requests that this process has got."""
    return int((await at.get("/status")).json()["proxy"]["requests"])


async def test_several_share_a_port_and_one_that_crashes_is_started_again(store: Store, valkey_url: str) -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_fleet(store, {"w1": {}, "w2": {}}))
        flags = ["--port", str(port), "--processes", "2", "--control-port", "0"]
        process = await stack.enter_async_context(router(valkey_url, *flags))
        lines = [await line_with("http://127.0.0.1", process.stderr) for _ in range(4)]  # two of each, in any order
        assert sum(f"router at http://127.0.0.1:{port}" in line for line in lines) == 2
        urls = [line.rpartition(" ")[2].strip() for line in lines if "operators' port" in line]
        operators = [await stack.enter_async_context(http_client(base_url=url, timeout=60)) for url in urls]

        async def ask() -> int:
            async with http_client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                return (await client.post("/v1/completions", json=BODY)).status_code

        async def both_served() -> bool:
            assert await ask() == 200
            return min([await proxied(one) for one in operators]) > 0

        await until(both_served, what="both processes get requests")
        # a booking made by one router is ended by the other
        held = await operators[0].post("/kvatlas/route", json=BODY)
        assert held.status_code == 200, held.text
        done = await operators[1].post("/kvatlas/done", json={"id": held.json()["id"]})
        assert done.status_code == 200, done.text

        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[0]), signal.SIGKILL)
        await line_with("was ended by signal 9; starting another", process.stderr)
        await line_with("router at", process.stderr)
        assert {await ask() for _ in range(10)} == {200}
        process.terminate()
        assert await process.wait() == 0


async def test_without_descriptors_for_more_it_is_not_ready_and_refuses_and_blames_no_engine(
    store: Store, valkey_url: str
) -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            running_fleet(store, {"w1": {"speed_up": 1.0, "decode_step_us": 200_000, "num_gpu_blocks": 65_536}})
        )
        flags = ["--port", str(port), "--http-address-connections", "1000"]
        process = await stack.enter_async_context(router(valkey_url, *flags, descriptors=160))
        await line_with("at most 60 client connections: this process may open 160", process.stderr)
        await line_with("router at", process.stderr)
        client = await stack.enter_async_context(
            http_client(
                base_url=f"http://127.0.0.1:{port}", timeout=60, limits=httpx.Limits(max_keepalive_connections=0)
            )
        )
        answers: list[int] = []

        async def stream() -> None:
            async with client.stream(
                "POST", "/v1/completions", json={**BODY, "max_tokens": 600, "stream": True}
            ) as got:
                answers.append(got.status_code)
                async for _ in got.aiter_raw():
                    pass

        async def is_ready() -> bool:
            return (await client.get("/ready")).status_code == 200

        async with anyio.create_task_group() as tasks:
            for _ in range(58):
                tasks.start_soon(stream)
            await until(lambda: answers == [200] * 58, what="they run")
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["full"]) == (503, True)
            for _ in range(10):
                tasks.start_soon(stream)
            await until(lambda: len(answers) == 68, what="each is answered")
            assert answers.count(503) >= 8
            tasks.cancel_scope.cancel()
        await until(is_ready, what="there is room again")
        page = (await client.get("/status")).json()
        assert page["ejected"] == page["stalled"] == {} and page["proxy"]["retried"] == page["proxy"]["broken"] == 0
