"""Choices that skip workers that are failing, have stalled, or have asked for a pause."""

from collections.abc import Awaitable, Callable, Collection
from math import ceil
from typing import TypeVar

from kvatlas.errors import KvatlasError
from kvatlas.identity import Scope
from kvatlas_router.ejection.monitor import EjectionMonitor
from kvatlas_router.ejection.pool_ejections import Avoided
from router_client.errors import NoWorkers
from router_client.prompt import Prompt

T = TypeVar("T")


class EnginesRest(KvatlasError):
    """Every engine has asked for a pause that is not over yet."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"every engine asked for a pause; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Avoidance:
    """Makes choices that avoid the workers that the monitor reports."""

    def __init__(
        self,
        ejections: EjectionMonitor,
        workers_of: Callable[[Scope], Awaitable[Collection[str]]],
        stalled_in: Callable[[str], frozenset[str]] = lambda _: frozenset(),
    ) -> None:
        """`workers_of`: ids of a pool's workers that may get requests. `stalled_in`: ids of the workers in a pool that make
        no progress."""
        self._stalled_in = stalled_in
        self._ejections = ejections
        self._workers_of = workers_of

    async def choose(
        self, prompt: Prompt, tried: frozenset[str], choose: Callable[[frozenset[str]], Awaitable[T]]
    ) -> T:
        """The result of `choose`, called with the workers to skip. Workers that fail or stall are skipped only if others
        remain; those that asked for a pause are always skipped. Raises NoWorkers, or EnginesRest if only resting workers
        remain."""
        avoided = await self._avoided(prompt)
        if stalled := self._stalled_in(prompt.scope.pool_id) - tried:
            for others in (avoided.resting | avoided.failing, avoided.resting):  # a failing worker may still answer
                try:
                    return await choose(tried | others | stalled)
                except NoWorkers:
                    continue
        try:
            return await choose(tried | avoided.resting | avoided.failing)
        except NoWorkers:
            if not (avoided.resting | avoided.failing) - tried:
                raise
        try:
            return await choose(tried | avoided.resting)
        except NoWorkers:
            if not avoided.resting - tried:
                raise
        raise EnginesRest(max(1, ceil(avoided.retry_after_s)))

    async def _avoided(self, prompt: Prompt) -> Avoided:
        pool_id = prompt.scope.pool_id
        if not self._ejections.suspects(pool_id):
            return Avoided()
        workers = await self._workers_of(prompt.scope)
        unfit = prompt.select.unfit if prompt.select is not None else {}
        return self._ejections.avoid(pool_id, set(workers) - unfit.keys())
