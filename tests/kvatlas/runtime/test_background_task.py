import asyncio
import contextlib

import anyio
import pytest

from kvatlas.runtime import background_task
from kvatlas.runtime.background_task import BackgroundTask, end_tasks

pytestmark = pytest.mark.anyio


class Worker:
    def __init__(self) -> None:
        self.task = BackgroundTask(self.run, "worker")
        self.started = asyncio.Event()
        self.ended = False

    async def run(self) -> None:
        try:
            while self.task.running:
                self.started.set()
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    continue  # as a library may do
        finally:
            self.ended = True


async def test_stop_waits_for_the_end_even_if_the_body_swallows_the_cancellation() -> None:
    worker = Worker()
    assert not await worker.task.stop()
    for _ in range(2):
        worker.started.clear()
        worker.ended = False
        worker.task.start()
        await worker.started.wait()
        assert await worker.task.stop()
        assert worker.ended


async def test_a_body_that_waits_after_a_swallowed_cancellation_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background_task, "AGAIN_S", 0.01)
    waits = asyncio.Event()

    async def body() -> None:
        waits.set()
        with contextlib.suppress(asyncio.CancelledError):  # as `wait_for` may
            await asyncio.sleep(3600)
        await asyncio.sleep(3600)

    task = BackgroundTask(body, "worker")
    task.start()
    await waits.wait()
    with anyio.fail_after(60):
        assert await task.stop()


async def test_tasks_end_even_if_each_swallows_a_cancellation_or_fails() -> None:
    started = []

    async def swallow(times: int) -> None:
        started.append(times)
        for _ in range(times):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        raise ValueError("not raised to the caller")

    tasks = [asyncio.create_task(swallow(times)) for times in (0, 1, 3)]
    with anyio.fail_after(60):
        while len(started) < len(tasks):
            await asyncio.sleep(0)
        await end_tasks(tasks, again_s=0.01)
    assert all(task.done() for task in tasks)
