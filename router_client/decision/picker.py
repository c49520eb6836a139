"""What the proxy asks of the router client: a worker for a prompt, booked while the request runs."""

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from kvatlas.errors import KvatlasError
from router_client.client import RouterClient
from router_client.learning.timings import Timings
from router_client.prefill_decode_result import PairChoice
from router_client.prompt import Prompt
from router_client.tokens.usage import Usage


class Shed(KvatlasError):
    """Every engine would miss the SLO by far: the request is refused, and what was booked for it is given back."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("every engine would miss the SLO by far; try again later")
        self.retry_after_s = retry_after_s


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

    @property
    def advice(self) -> str:
        """`go`; or `queue` or `shed` where every engine is full or would miss the SLO."""
        ...

    @property
    def retry_after_s(self) -> int:
        """When a request that is not sent should come again."""
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

    def route_pd(self, prompt: Prompt, avoid: Collection[str] = ()) -> AbstractAsyncContextManager[PairChoice]:
        """The same of the workers that compute prompt and answer."""
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

    def route_pd(self, prompt: Prompt, avoid: Collection[str] = ()) -> AbstractAsyncContextManager[PairChoice]:
        """As `Picker.route_pd`."""
        return self._client.route_pd(prompt, avoid=avoid)
