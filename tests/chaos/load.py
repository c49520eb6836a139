"""Sends requests to the engines, so that their caches change all the time: shared prefixes, branches, evictions, two tiers."""

import random
from collections.abc import Mapping

import anyio
import httpx

from tests.eventually import until
from tests.http_client import http_client

REQUESTS_PER_S = 25.0
"""Rate for each engine: faults are tested here, not speed."""
VOCABULARY = 50_000
BLOCK = 16
FILL_BLOCKS = 500


class Load:
    """Call `run` in a task group; the load is paused at first. An engine that does not answer is skipped."""

    def __init__(self, engines: Mapping[str, str], adapters: tuple[str | None, ...], seed: int) -> None:
        """`engines`: base URL by worker id."""
        self._engines = engines
        self._adapters = adapters
        self._rng = random.Random(seed)
        self._heads = [self._tokens(BLOCK * self._rng.randint(4, 12)) for _ in range(6)]
        self._running = anyio.Event()
        self._open = 0
        self.answered = dict.fromkeys(engines, 0)

    async def run(self) -> None:
        """Send requests until cancelled."""
        async with http_client(timeout=3) as client, anyio.create_task_group() as tasks:
            for worker_id in self._engines:
                tasks.start_soon(self._drive, client, worker_id)

    def resume(self) -> None:
        self._running.set()

    async def pause(self) -> None:
        """Send no more requests, and wait until none is open."""
        if self._running.is_set():
            self._running = anyio.Event()
        await until(lambda: not self._open, what="no request is open")

    async def fill(self, worker_id: str, blocks: int) -> None:
        """Send long prompts of `blocks` blocks in total."""
        async with http_client(timeout=60) as client:
            for _ in range(0, blocks, FILL_BLOCKS):
                request = {"prompt": self._tokens(FILL_BLOCKS * BLOCK), "max_tokens": 1}
                answer = await client.post(f"{self._engines[worker_id]}/v1/completions", json=request)
                answer.raise_for_status()

    async def wait_for_answers(self, worker_id: str, answers: int, deadline_s: float = 60.0) -> None:
        """Wait until this engine has answered this many more requests."""
        goal = self.answered[worker_id] + answers
        await until(
            lambda: self.answered[worker_id] >= goal, deadline_s=deadline_s, what=f"{worker_id} answers {answers} more"
        )

    async def _drive(self, client: httpx.AsyncClient, worker_id: str) -> None:
        while True:
            await self._running.wait()
            self._open += 1
            try:
                answer = await client.post(f"{self._engines[worker_id]}/v1/completions", json=self._request())
                self.answered[worker_id] += answer.is_success
            except httpx.HTTPError:
                pass  # it is down, on purpose
            finally:
                self._open -= 1
            await anyio.sleep(self._rng.expovariate(REQUESTS_PER_S))  # a paced load

    def _request(self) -> dict[str, object]:
        rng = self._rng
        head = rng.choice(self._heads)
        prompt = head[: BLOCK * rng.randint(2, len(head) // BLOCK)] + self._tokens(rng.randint(1, 6 * BLOCK))
        request: dict[str, object] = {"prompt": prompt, "max_tokens": rng.randint(1, 2 * BLOCK)}
        adapter = rng.choice(self._adapters)
        return request if adapter is None else {**request, "model": adapter}

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(count)]
