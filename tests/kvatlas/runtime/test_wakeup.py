import anyio
import pytest

from kvatlas.runtime.wakeup import Wakeup

pytestmark = pytest.mark.anyio


async def test_a_wait_without_a_call_ends_by_time() -> None:
    assert not await Wakeup().wait(0.0)


async def test_a_call_without_a_waiter_ends_the_next_wait_at_once_and_only_that() -> None:
    wakeup = Wakeup()
    wakeup.wake()
    wakeup.wake()
    assert await wakeup.wait(0.0)
    assert not await wakeup.wait(0.0)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
async def test_a_call_ends_a_wait(timeout_s: float | None) -> None:
    wakeup = Wakeup()
    woken: list[bool] = []

    async def wait() -> None:
        woken.append(await wakeup.wait(timeout_s))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            wakeup.wake()
    assert woken == [True]
