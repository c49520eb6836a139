"""What the proxy asks of the router client: a worker for a prompt, booked while the request runs."""

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from router_client.answers import RANK_HEADER
from router_client.client import RouterClient
from router_client.errors import NoWorkers
from router_client.fleet import FleetReader
from router_client.prompt import Prompt
from router_client.tokens.usage import Usage


class Booked(Protocol):
    """A worker that a request may go to now. `score_us`: what it is expected to cost there; `text` explains why."""

    @property
    def worker_id(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def predicted_cached_tokens(self) -> int: ...
    @property
    def score_us(self) -> int: ...
    @property
    def mode(self) -> str:
        """How it was found: `cost`, or what stood in for it."""
        ...

    def explain(self) -> str: ...

    async def first_token(self) -> None:
        """Its prefill is over."""
        ...

    async def finish(self, usage: Usage | None) -> None:
        """The request ended well, with what the engine said of it."""
        ...


class Picker(Protocol):
    """Finds workers."""

    def route(self, prompt: Prompt, avoid: Collection[str] = ()) -> AbstractAsyncContextManager[Booked]:
        """The best worker that is not to be avoided; leaving the block gives back what was booked.

        Raises NoWorkers, and Unreachable where the router client does.
        """
        ...


@dataclass(frozen=True, slots=True)
class Pick:
    """A worker without a booking."""

    worker_id: str
    url: str
    predicted_cached_tokens: int
    score_us: int
    explanation: str
    headers: Mapping[str, str] = field(default_factory=dict)
    mode: str = "cost"

    def explain(self) -> str:
        return self.explanation

    async def first_token(self) -> None:
        """Nothing is booked."""

    async def finish(self, usage: Usage | None) -> None:
        """Nothing is booked."""


class ClientPicker:
    """Over a router client; `fleet` gives the addresses of those that are picked beside the best."""

    def __init__(self, client: RouterClient, fleet: FleetReader) -> None:
        self._client = client
        self._fleet = fleet

    @asynccontextmanager
    async def route(self, prompt: Prompt, avoid: Collection[str] = ()) -> AsyncIterator[Booked]:
        """As `Picker.route`."""
        yield await self._pick(prompt, avoid)

    async def _pick(self, prompt: Prompt, avoid: Collection[str]) -> Pick:
        if not avoid:
            choice = await self._client.route(prompt)
            predicted, score_us = choice.predicted_cached_tokens, choice.cost.score_us
            return Pick(choice.worker_id, choice.url, predicted, score_us, choice.explain(), choice.headers)
        ranking = await self._client.rank(prompt)
        records = await self._fleet.pool(prompt.scope.pool_id)
        for result in ranking:
            if result.worker_id in avoid or (record := records.get(result.worker_id)) is None:
                continue
            endpoint = record.endpoint
            predicted = result.usable_tokens + result.transferred_tokens
            headers = {} if endpoint.dp_rank is None else {RANK_HEADER: str(endpoint.dp_rank)}
            return Pick(result.worker_id, endpoint.url, predicted, result.score_us, result.explain(), headers)
        raise NoWorkers(f"no worker is left: {len(ranking)} serve prompts now, {len(avoid)} are to be avoided")
