"""LiteLLM's Router, with kvatlas to choose its deployments (extra `litellm`).

with (
    SyncRouterClient.open("redis://127.0.0.1:6379") as client,
    KvatlasRouting(litellm_router, client, tokenizer),
):
    ...  # litellm_router.acompletion(...), litellm_router.completion(...)

LiteLLM filters the deployments as ever: health checks, cooldowns, tags, what a retry excludes. Of those that are left the
one is taken whose worker is cheapest, and booked there until LiteLLM's callbacks tell of its end. Where kvatlas has no
answer, LiteLLM's own strategy chooses.

LiteLLM asks its strategy in the caller's loop or thread and calls its callbacks in others, so all of this runs in the loop
that the client brings along.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar
from uuid import uuid4

import litellm
from litellm.integrations.custom_logger import CustomLogger
from litellm.types.router import CustomRoutingStrategyBase

from kvatlas.errors import KvatlasError
from kvatlas.identity import Scope
from router_client.chain_cache import ChainMemory
from router_client.client import RouterClient
from router_client.decision.held_bookings import HELD_S, HeldRoutes
from router_client.decision.picker import ClientPicker
from router_client.decision.selector import Selector
from router_client.errors import ClientClosed
from router_client.learning.timings import Timings
from router_client.litellm.deployments import (
    RESERVATION,
    Deployment,
    by_engine_model,
    by_worker,
    carrying,
    put_headers,
    read_request,
    reservation_of,
    told_timings,
    told_usage,
)
from router_client.sync import SyncRouterClient
from router_client.tokens.budget import BudgetedTokenizer
from router_client.tokens.prompt_reader import PromptReader, ReadingSettings
from router_client.tokens.text_request import Api
from router_client.tokens.usage import Usage

P = ParamSpec("P")
T = TypeVar("T")

STARTED = "kvatlas_started"
"""Beside the reservation, once the first token was told."""

_api: ContextVar[Api] = ContextVar("kvatlas_litellm_api", default=Api.CHAT)
_providers = frozenset(provider.value for provider in litellm.LlmProviders)
_log = logging.getLogger("router_client.litellm")


@dataclass(slots=True)
class LitellmCounters:
    """Plain integers. `held`: deployments that kvatlas chose and booked, `held_done` those whose end LiteLLM told,
    `held_expired` those where it never did. `left`: choices left to LiteLLM's own strategy."""

    held: int = 0
    held_done: int = 0
    held_expired: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """What LiteLLM asks its strategy."""

    model: str
    messages: list[dict[str, Any]] | None
    input: str | list[Any] | None
    specific_deployment: bool | None
    request_kwargs: dict[str, Any] | None


def own_pool(model: str) -> Scope:
    """The scope of an engine's model whose tokenizer is named like it, which is what publishers do by default."""
    return Scope(model, model)


class KvatlasRouting(CustomRoutingStrategyBase, CustomLogger):  # type: ignore[misc]  # LiteLLM's types are not read
    """A routing strategy and a callback of one LiteLLM Router, from entering to leaving.

    A deployment is a worker's where its `api_base` is the worker's advertised address, or its `model_info.id` the
    worker's id. `scope_of` gives the scope of the model that an engine is asked for. LiteLLM's own strategy chooses where
    no deployment that is left is a worker's, where the workers' deployments serve several models, and for calls without
    messages.
    """

    def __init__(
        self,
        router: litellm.Router,
        client: SyncRouterClient,
        tokenizer: BudgetedTokenizer | None = None,
        *,
        scope_of: Callable[[str], Scope] = own_pool,
        reading: ReadingSettings | None = None,
        held_s: float = HELD_S,
    ) -> None:
        """`client` is open while this is entered. Without a tokenizer requests are routed by load. `held_s`: after which
        a booking is given back that LiteLLM tells no end of: it tells none of streams that nobody reads to the end."""
        super().__init__()
        self.counters = LitellmCounters()
        self.instance = uuid4().hex  # LiteLLM takes callbacks of one class with equal public values for the same
        self._router = router
        self._client = client
        self._prompts = PromptReader(tokenizer, ChainMemory(), reading)
        self._scope_of = scope_of
        self._held_s = held_s

    def __enter__(self) -> Self:
        self._held = self._client.submit(self._open).result()
        self._router.set_custom_routing_strategy(self)
        self._router.atext_completion = _as_completion(self._router.atext_completion)
        litellm.logging_callback_manager.add_litellm_callback(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """LiteLLM chooses as before, and what is booked is given back."""
        for name in ("get_available_deployment", "async_get_available_deployment", "atext_completion"):
            vars(self._router).pop(name, None)
        litellm.logging_callback_manager.remove_callback_from_all_lists(self)
        with suppress(ClientClosed):
            self._client.submit(self._close).result()

    @property
    def held(self) -> int:
        """Bookings whose end LiteLLM did not tell yet."""
        return len(self._held)

    # ------------------------------------------------------------ LiteLLM asks for a deployment

    async def async_get_available_deployment(
        self,
        model: str,
        messages: list[dict[str, Any]] | None = None,
        input: str | list[Any] | None = None,
        specific_deployment: bool | None = False,
        request_kwargs: dict[str, Any] | None = None,
    ) -> Deployment:
        """One of the deployments that LiteLLM finds healthy. Raises what LiteLLM raises where there is none."""
        asked = _Asked(model, messages, input, specific_deployment, request_kwargs)
        given = dict(request_kwargs or {})
        if messages and request_kwargs is not None:
            found = await self._router.async_pre_routing_hook(**_arguments(asked))  # plugins say who may get it
            if found is not None:
                asked = replace(asked, model=found.model, messages=found.messages)
            healthy = await self._healthy(asked)
            if isinstance(healthy, dict):
                return healthy
            with suppress(ClientClosed):
                chosen = await asyncio.wrap_future(self._choice(healthy, asked))
                if chosen is not None:
                    return chosen
        own = type(self._router).async_get_available_deployment
        deployment: Deployment = await own(self._router, **self._left(asked, given))
        return deployment

    def get_available_deployment(
        self,
        model: str,
        messages: list[dict[str, Any]] | None = None,
        input: str | list[Any] | None = None,
        specific_deployment: bool | None = False,
        request_kwargs: dict[str, Any] | None = None,
    ) -> Deployment:
        """The same for calls without `await`. LiteLLM refuses these where it has routing plugins."""
        asked = _Asked(model, messages, input, specific_deployment, request_kwargs)
        given = dict(request_kwargs or {})
        if messages and request_kwargs is not None and not self._router.routing_plugins:
            with suppress(ClientClosed):
                healthy = self._client.submit(lambda _: self._healthy(asked)).result()
                chosen = healthy if isinstance(healthy, dict) else self._choice(healthy, asked).result()
                if chosen is not None:
                    return chosen
        own = type(self._router).get_available_deployment
        deployment: Deployment = own(self._router, **self._left(asked, given))
        return deployment

    async def _healthy(self, asked: _Asked) -> Deployment | Sequence[Deployment]:
        """What LiteLLM's filters leave; one deployment where the request names it."""
        healthy: Deployment | Sequence[Deployment] = await self._router.async_get_healthy_deployments(
            **_arguments(asked)
        )
        return healthy

    def _choice(self, healthy: Sequence[Deployment], asked: _Asked) -> Future[Deployment | None]:
        return self._client.submit(self._choose, healthy, asked, _api.get())

    async def _choose(
        self, client: RouterClient, healthy: Sequence[Deployment], asked: _Asked, api: Api
    ) -> Deployment | None:
        """The deployment of the cheapest worker, booked; None where LiteLLM is to choose."""
        assert asked.messages is not None and asked.request_kwargs is not None
        try:
            request = read_request(api, asked.messages, asked.request_kwargs)
            ours = []
            for model, deployments in by_engine_model(healthy, _providers).items():
                scope = self._scope_of(model)
                if self._prompts.settings.salt_is_tenant and request.cache_salt is not None:
                    scope = replace(scope, tenant_id=request.cache_salt)
                if served := by_worker(deployments, await client.workers(scope)):
                    ours.append((model, scope, served))
            if len(ours) != 1:  # what a request costs on different models is no reason to choose one of them
                return None
            model, scope, served = ours[0]
            read = await self._prompts.read(replace(request, body={**request.body, "model": model}), scope)
            held_id, booked = await self._held.route(replace(read.prompt, select=Selector(allow=served.keys())))
        except KvatlasError as error:
            _log.warning("LiteLLM chooses: %s", error)
            return None
        put_headers(asked.request_kwargs, booked.headers)
        return carrying(served[booked.worker_id], held_id, booked.headers)

    def _left(self, asked: _Asked, given: dict[str, Any]) -> dict[str, Any]:
        """For LiteLLM to choose: its filters take out of the arguments what they used, and run again."""
        self.counters.left += 1
        if asked.request_kwargs is not None:
            asked.request_kwargs.update(given)
        return _arguments(asked)

    # ------------------------------------------------------------ LiteLLM tells how it went

    def log_stream_event(self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any) -> None:
        """A chunk of a stream; LiteLLM tells those that are read without `await`."""
        info = reservation_of(kwargs)
        if info is not None and STARTED not in info:
            info[STARTED] = True
            self._tell(self._first_token, info[RESERVATION])

    def log_success_event(self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any) -> None:
        """A whole answer, or the end of a stream. What LiteLLM's cache answered no engine has computed."""
        usage, timings = told_usage(kwargs, response_obj), told_timings(kwargs)
        self._ended(kwargs, usage, timings, well=not kwargs.get("cache_hit"))

    def log_failure_event(self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any) -> None:
        """No answer, or half of one."""
        self._ended(kwargs, None, None, well=False)

    async def async_log_stream_event(
        self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        self.log_stream_event(kwargs, response_obj, start_time, end_time)

    async def async_log_success_event(
        self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        self.log_success_event(kwargs, response_obj, start_time, end_time)

    async def async_log_failure_event(
        self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        self.log_failure_event(kwargs, response_obj, start_time, end_time)

    def _ended(self, kwargs: dict[str, Any], usage: Usage | None, timings: Timings | None, *, well: bool) -> None:
        info = reservation_of(kwargs)
        if info is not None:
            self._tell(self._done, info[RESERVATION], usage, timings, well)

    def _tell(
        self, told: Callable[Concatenate[RouterClient, P], Coroutine[Any, Any, None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Without waiting: some callbacks run in the caller's event loop. A closed client has given back what was booked."""
        with suppress(ClientClosed):
            self._client.submit(told, *args, **kwargs)

    # ------------------------------------------------------------ in the client's loop

    async def _open(self, client: RouterClient) -> HeldRoutes:
        return HeldRoutes(ClientPicker(client), self.counters, held_s=self._held_s)

    async def _close(self, _: RouterClient) -> None:
        await self._held.close()

    async def _first_token(self, _: RouterClient, held_id: str) -> None:
        await self._held.first_token(held_id)

    async def _done(
        self, _: RouterClient, held_id: str, usage: Usage | None, timings: Timings | None, well: bool
    ) -> None:
        self._held.done(held_id, usage, timings, well=well)


def _arguments(asked: _Asked) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in _Asked.__slots__}


def _as_completion(call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """LiteLLM asks its strategy for a completion with the arguments of a chat; this tells them apart."""

    @wraps(call)
    async def completion(*args: P.args, **kwargs: P.kwargs) -> T:
        before = _api.set(Api.COMPLETIONS)
        try:
            return await call(*args, **kwargs)
        finally:
            _api.reset(before)

    return completion
