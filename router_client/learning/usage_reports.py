"""Counts the usage of answers by tenant, adapter and program, and reports it to the store, which keeps it."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from kvatlas.predictions.usage_counts import USERS_A_REPORT, AnswerUse, User
from kvatlas.runtime.background_task import BackgroundTask
from kvatlas.store.connection import reason
from kvatlas.store.deadline import STORE_FAILURES

REPORT_S = 2.0
CALL_S = 1.0
MOST_REPORTS = 1_000
"""Maximum number of reports that may wait for the store; beyond that, the oldest are dropped."""

Report = Callable[[int, str, Mapping[User, AnswerUse]], Awaitable[None]]
"""Adds usage to a pool's totals, given the report's number, the pool's id and the usage."""

_log = logging.getLogger("router_client")


class AnswerUsage:
    """Counts each answer with `count`; reports from `start` to `stop`. A report that may have been lost is sent again under
    the same number."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._used: dict[User, AnswerUse] = {}
        self._waiting: deque[tuple[int, str, dict[User, AnswerUse]]] = deque()
        self._number = time.time_ns() // 1_000  # higher than those of an earlier router of the same name
        self._task = BackgroundTask(self._run, "kvatlas router usage")

    def count(self, user: User, use: AnswerUse) -> None:
        self._used[user] = self._used.get(user, AnswerUse()).plus(use)

    def start(self) -> None:
        self._task.start()

    async def stop(self) -> None:
        """Stop, and report the rest if the store answers."""
        await self._task.stop()
        await self.report()

    async def report(self) -> bool:
        """Send everything pending. Returns False if the store does not answer."""
        self._cut()
        try:
            async with asyncio.timeout(CALL_S):
                while self._waiting:
                    await self._report(*self._waiting[0])
                    self._waiting.popleft()
        except STORE_FAILURES as error:
            _log.debug("usage was not reported: %s", reason(error))
            return False
        return True

    def _cut(self) -> None:
        """Turn what has been counted since the previous reports into new ones."""
        used, self._used = self._used, {}
        by_pool: dict[str, list[tuple[User, AnswerUse]]] = {}
        for user, use in used.items():
            by_pool.setdefault(user.scope.pool_id, []).append((user, use))
        for pool_id, uses in by_pool.items():
            for first in range(0, len(uses), USERS_A_REPORT):
                self._number += 1
                self._waiting.append((self._number, pool_id, dict(uses[first : first + USERS_A_REPORT])))
        if (dropped := len(self._waiting) - MOST_REPORTS) > 0:
            _log.warning("usage: %d reports dropped: the store has not answered for a long time", dropped)
            for _ in range(dropped):
                self._waiting.popleft()

    async def _run(self) -> None:
        reachable = True
        while self._task.running:
            await asyncio.sleep(REPORT_S)
            was, reachable = reachable, await self.report()
            if was and not reachable:
                _log.warning("usage was not reported: the store does not answer; trying again every %g s", REPORT_S)
