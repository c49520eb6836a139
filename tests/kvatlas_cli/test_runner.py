"""How commands stop."""

import asyncio
import contextlib
import os
import signal

import pytest

from kvatlas_cli.runner import _run_until_stopped, print_ready


def test_a_stop_that_a_library_swallowed_while_a_service_starts_counts_when_it_is_ready(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def starts() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(
            asyncio.CancelledError
        ):  # as Python 3.11's `wait_for` does if its result arrives at the same time
            await asyncio.sleep(60)
        print_ready("up")
        await asyncio.sleep(60)

    async def run() -> bool:
        async with asyncio.timeout(30):
            return await _run_until_stopped(starts())

    assert not asyncio.run(run())
    assert capsys.readouterr().err == "kvatlas: up\n"


def test_a_service_that_is_not_stopped_ends_on_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    async def starts() -> None:
        print_ready("up")
        await asyncio.sleep(0)

    assert asyncio.run(_run_until_stopped(starts()))
    assert capsys.readouterr().err == "kvatlas: up\n"
