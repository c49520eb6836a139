"""Settles clients' use with the fleet's allowances in the store: every EVERY_S, and immediately if a request is waiting.

A request waits only if its client has used little here recently, or is near its limit. While the store is down, each process
counts on its own, starting from what was left of the fleet's allowances.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from kvatlas.fleet_store.allowances import ALLOWANCES_A_CALL, Draw, Drawn, SharedAllowances
from kvatlas.runtime.background_task import BackgroundTask
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.store.connection import reason
from kvatlas.store.deadline import STORE_FAILURES
from kvatlas_router.tenancy.allowance import Allowance, LocalAllowances

EVERY_S = 0.5
CALL_S = 0.1
"""A store that takes longer counts as down."""
MOST_KNOWN = 100_000

_log = logging.getLogger("kvatlas_router.tenancy")


class AllowanceExchange:
    """Call `take` for each request. Allowances are shared between `start` and `stop`."""

    def __init__(self, shared: SharedAllowances | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`shared=None`: this process counts on its own."""
        self.clock = clock
        self.is_shared = False
        """True if the store took part in the last exchange."""
        self._shared = shared
        self._local = LocalAllowances(MOST_KNOWN)
        self._used: dict[str, Allowance] = {}
        self._wake = asyncio.Event()
        self._next = asyncio.Event()
        self._lines = RateLimitedLog(_log)
        self._task = BackgroundTask(self._run, "kvatlas limits")

    def start(self) -> None:
        self.is_shared = self._shared is not None
        if self._shared is not None:
            self._task.start()

    async def stop(self) -> None:
        """Stop, and return what is unused."""
        if await self._task.stop():
            self._end_round()
            await self._exchange(ends=True)
        self.is_shared = False

    async def take(self, allowance: Allowance, amount: int) -> bool:
        """Use this amount of an allowance. Returns False if it is not available."""
        self._note(allowance)
        now_s = self.clock()
        if allowance.take(amount, now_s):
            return True
        if allowance.wait_s(amount, now_s) > 0:
            return False
        allowance.waiting += amount
        try:
            if not (self.is_shared and await self._is_answered()):
                self._draw_here(allowance)
        finally:
            allowance.waiting -= amount
        return allowance.take(amount, self.clock())

    def correct(self, allowance: Allowance, amount: int) -> None:
        """Record that this much more was used than was taken (negative: less)."""
        self._note(allowance)
        allowance.correct(amount)
        if not self.is_shared:
            self._draw_here(allowance)

    def _note(self, allowance: Allowance) -> None:
        if self._shared is not None:
            self._used[allowance.name] = allowance

    async def _is_answered(self) -> bool:
        """Wait briefly for the next exchange to end. Returns True if it did."""
        self._wake.set()
        try:
            async with asyncio.timeout(2 * CALL_S):
                return await self._next.wait()
        except TimeoutError:
            return False

    def _draw_here(self, allowance: Allowance) -> None:
        now_s = self.clock()
        allowance.add(self._local.draw([allowance.next_draw(now_s)], now_s)[0], now_s)

    async def _run(self) -> None:
        while self._task.running:
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            ended, self._next = self._next, asyncio.Event()
            try:
                await self._exchange()
            finally:
                ended.set()

    def _end_round(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def _exchange(self, *, ends: bool = False) -> None:
        used = list(self._used.values())
        for first in range(0, len(used), ALLOWANCES_A_CALL):
            some = used[first : first + ALLOWANCES_A_CALL]
            now_s = self.clock()
            answers = await self._draw([one.next_draw(now_s, ends=ends) for one in some])
            for one, drawn in zip(some, answers, strict=True):
                one.add(drawn, now_s)
                if one.is_idle:
                    self._used.pop(one.name, None)

    async def _draw(self, draws: Sequence[Draw]) -> Sequence[Drawn]:
        assert self._shared is not None
        try:
            async with asyncio.timeout(CALL_S):
                drawn = await self._shared.draw(draws)
        except STORE_FAILURES as error:
            self.is_shared = False
            self._lines.report(
                "away", f"clients' limits per minute are not shared between routers now: {reason(error)}"
            )
            return self._local.draw(draws, self.clock())
        self.is_shared = True
        for one, answer in zip(draws, drawn, strict=True):
            self._local.see(one.name, answer.left, self.clock())
        return drawn
