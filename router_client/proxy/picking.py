"""What the proxy asks of the router client: a worker for a prompt, booked while the request runs."""

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from router_client.client import RouterClient
from router_client.prompt import Prompt
from router_client.timings import Timings
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
    def unconfirmed_tokens(self) -> int:
        """Of the predicted ones, those that no event has confirmed."""
        ...

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

    async def finish(self, usage: Usage | None, timings: Timings | None = None) -> None:
        """The request ended well, with what the engine said of it and what was measured."""
        ...

    async def fail(self) -> None:
        """The request did not end well."""
        ...


class Picker(Protocol):
    """Finds workers."""

    def route(self, prompt: Prompt, avoid: Collection[str] = ()) -> AbstractAsyncContextManager[Booked]:
        """The best worker that is not to be avoided; leaving the block gives back what was booked.

        Raises NoWorkers, and Unreachable where the router client does.
        """
        ...


class ClientPicker:
    """Over a router client."""

    def __init__(self, client: RouterClient) -> None:
        self._client = client

    @asynccontextmanager
    async def route(self, prompt: Prompt, avoid: Collection[str] = ()) -> AsyncIterator[Booked]:
        """As `Picker.route`."""
        async with self._client.route(prompt, avoid=avoid) as choice:
            yield choice
