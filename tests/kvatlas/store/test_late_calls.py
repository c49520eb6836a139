"""Calls to the store that continue after their callers have given up."""

import asyncio
import gc

import pytest

from kvatlas.store.deadline import LateCalls

pytestmark = pytest.mark.anyio


async def test_a_call_that_fails_as_its_caller_is_cancelled_leaves_no_error_behind() -> None:
    loose: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: loose.append(context["message"]))
    answers = asyncio.Event()

    async def fail() -> None:
        await answers.wait()
        raise ValueError("refused")

    caller = asyncio.create_task(LateCalls().wait_for(fail(), 60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answers.set()
    await asyncio.sleep(0)  # the call fails; its caller does not know yet
    caller.cancel()
    assert isinstance((await asyncio.gather(caller, return_exceptions=True))[0], asyncio.CancelledError)
    del caller
    await asyncio.sleep(0)
    gc.collect()
    assert loose == []
