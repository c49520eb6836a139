"""Lets kvatlas choose the deployments of LiteLLM's Router (extra `litellm`).

with (
    SyncRouterClient.open("redis://127.0.0.1:6379") as client,
    KvatlasRouting(litellm_router, client, tokenizer),
):
    ...  # litellm_router.acompletion(...), litellm_router.completion(...)

LiteLLM filters the deployments as usual, by health checks, cooldowns, tags and a retry's exclusions. Among the rest, kvatlas
chooses the deployment with the cheapest worker, and books it until LiteLLM's callbacks report the request's end. If kvatlas
can't choose, LiteLLM's own strategy does.

LiteLLM calls its strategy in the caller's loop or thread and its callbacks in others, so the work runs in the client's own
loop (`DeploymentChooser`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar
from uuid import uuid4

import litellm
from litellm.integrations.custom_logger import CustomLogger
from litellm.types.router import CustomRoutingStrategyBase

from kvatlas.identity import Scope
from kvatlas_router.held_bookings import HELD_S
from kvatlas_router.litellm.deployment_chooser import DeploymentChooser
from kvatlas_router.litellm.deployments import (
    RESERVATION,
    Deployment,
    engine_usage,
    reservation_of,
    stream_timings,
)
from kvatlas_router.tokens.budget import BudgetedTokenizer
from kvatlas_router.tokens.prompt_reader import PromptReader, PromptSettings
from kvatlas_router.tokens.text_request import Api
from router_client.client import RouterClient
from router_client.errors import ClientClosed
from router_client.learning.timings import Timings
from router_client.learning.token_counts import Usage
from router_client.sync import SyncRouterClient

P = ParamSpec("P")
T = TypeVar("T")

STARTED = "kvatlas_started"
"""Key next to the reservation's, set once the first token has been reported."""

_api: ContextVar[Api] = ContextVar("kvatlas_litellm_api", default=Api.CHAT)
_providers = frozenset(provider.value for provider in litellm.LlmProviders)


@dataclass(slots=True)
class LitellmCounters:
    """Plain integers. `held`: deployments that kvatlas chose and booked. `held_done`: bookings whose end LiteLLM
    reported; `held_expired`: bookings whose end it never reported. `left`: choices that LiteLLM's own strategy made."""

    held: int = 0
    held_done: int = 0
    held_expired: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class _StrategyCall:
    """The arguments with which LiteLLM calls its strategy."""

    model: str
    messages: list[dict[str, Any]] | None
    input: str | list[Any] | None
    specific_deployment: bool | None
    request_kwargs: dict[str, Any] | None


def own_pool(model: str) -> Scope:
    """The scope of an engine's model whose tokenizer has the same name, as is the publishers' default."""
    return Scope(model, model)


class KvatlasRouting(CustomRoutingStrategyBase, CustomLogger):  # type: ignore[misc]  # LiteLLM's types are not read
    """The routing strategy and callback of one LiteLLM Router, while it is entered.

    A deployment belongs to a worker if its `api_base` is the worker's advertised address, or its `model_info.id` is the
    worker's id. `scope_of` maps an engine's model to its scope. LiteLLM's own strategy chooses if no healthy deployment
    belongs to a worker, if the workers' deployments serve several models, and for calls without messages.
    """

    def __init__(
        self,
        router: litellm.Router,
        client: SyncRouterClient,
        tokenizer: BudgetedTokenizer | None = None,
        *,
        scope_of: Callable[[str], Scope] = own_pool,
        reading: PromptSettings | None = None,
        held_s: float = HELD_S,
    ) -> None:
        """`client` must stay open while this is entered. Without a tokenizer, requests are routed by load. `held_s`: a booking
        is released after this time if LiteLLM does not report its end, as happens with streams that are not read to the
        end."""
        super().__init__()
        self.counters = LitellmCounters()
        self.instance = (
            uuid4().hex
        )  # LiteLLM drops a callback that equals another of its class in all public attributes
        self._router = router
        self._client = client
        self._prompts = PromptReader(tokenizer, reading)
        self._scope_of = scope_of
        self._held_s = held_s

    def __enter__(self) -> Self:
        self._chooser = self._client.submit(self._open_chooser).result()
        self._router.set_custom_routing_strategy(self)
        self._router.atext_completion = _mark_completion(self._router.atext_completion)
        callbacks = litellm.logging_callback_manager
        callbacks.add_litellm_callback(self)
        # LiteLLM does this only when a request begins: running requests would not be reported
        callbacks.add_litellm_success_callback(self)
        callbacks.add_litellm_failure_callback(self)
        callbacks.add_litellm_async_success_callback(self)
        callbacks.add_litellm_async_failure_callback(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Hand the choice back to LiteLLM, and release all bookings."""
        for name in ("get_available_deployment", "async_get_available_deployment", "atext_completion"):
            vars(self._router).pop(name, None)
        litellm.logging_callback_manager.remove_callback_from_all_lists(self)
        with suppress(ClientClosed):
            self._client.submit(lambda _: self._chooser.close()).result()

    @property
    def held(self) -> int:
        """Number of bookings whose end LiteLLM has not reported yet."""
        return len(self._chooser)

    # ------------------------------------------------------------ the strategy: LiteLLM asks for a deployment

    async def async_get_available_deployment(
        self,
        model: str,
        messages: list[dict[str, Any]] | None = None,
        input: str | list[Any] | None = None,
        specific_deployment: bool | None = False,
        request_kwargs: dict[str, Any] | None = None,
    ) -> Deployment:
        """One of the deployments that LiteLLM considers healthy. Raises whatever LiteLLM raises if there is none."""
        call = _StrategyCall(model, messages, input, specific_deployment, request_kwargs)
        given = dict(request_kwargs or {})
        if messages and request_kwargs is not None:
            changed = await self._router.async_pre_routing_hook(**_arguments(call))  # plugins narrow the candidates
            if changed is not None:
                call = replace(call, model=changed.model, messages=changed.messages)
            healthy = await self._healthy(call)
            if isinstance(healthy, dict):
                return healthy
            with suppress(ClientClosed):
                chosen = await asyncio.wrap_future(self._choose(healthy, call))
                if chosen is not None:
                    return chosen
        own = type(self._router).async_get_available_deployment
        deployment: Deployment = await own(self._router, **self._leave_to_litellm(call, given))
        return deployment

    def get_available_deployment(
        self,
        model: str,
        messages: list[dict[str, Any]] | None = None,
        input: str | list[Any] | None = None,
        specific_deployment: bool | None = False,
        request_kwargs: dict[str, Any] | None = None,
    ) -> Deployment:
        """Like `async_get_available_deployment`, for synchronous calls. LiteLLM refuses such calls if it has routing
        plugins."""
        call = _StrategyCall(model, messages, input, specific_deployment, request_kwargs)
        given = dict(request_kwargs or {})
        if messages and request_kwargs is not None and not self._router.routing_plugins:
            with suppress(ClientClosed):
                healthy = self._client.submit(lambda _: self._healthy(call)).result()
                chosen = healthy if isinstance(healthy, dict) else self._choose(healthy, call).result()
                if chosen is not None:
                    return chosen
        own = type(self._router).get_available_deployment
        deployment: Deployment = own(self._router, **self._leave_to_litellm(call, given))
        return deployment

    async def _healthy(self, call: _StrategyCall) -> Deployment | Sequence[Deployment]:
        """The deployments that pass LiteLLM's filters; a single one if the request names a deployment."""
        healthy: Deployment | Sequence[Deployment] = await self._router.async_get_healthy_deployments(
            **_arguments(call)
        )
        return healthy

    def _choose(self, healthy: Sequence[Deployment], call: _StrategyCall) -> Future[Deployment | None]:
        assert call.messages is not None and call.request_kwargs is not None
        messages, request_kwargs, api = call.messages, call.request_kwargs, _api.get()
        return self._client.submit(lambda _: self._chooser.choose(healthy, messages, request_kwargs, api))

    def _leave_to_litellm(self, call: _StrategyCall, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments for LiteLLM's own choice. Its filters run again, so what they removed from the arguments is restored."""
        self.counters.left += 1
        if call.request_kwargs is not None:
            call.request_kwargs.update(given)
        return _arguments(call)

    # ------------------------------------------------------------ the callback: LiteLLM reports a request's progress

    def log_stream_event(self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any) -> None:
        """Handle a chunk of a stream; LiteLLM reports chunks of synchronous streams."""
        info = reservation_of(kwargs)
        if info is not None and STARTED not in info:
            info[STARTED] = True
            held_id = info[RESERVATION]
            self._report(lambda _: self._chooser.first_token(held_id))

    def log_success_event(self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any) -> None:
        """Handle a whole answer, or the end of a stream. An answer from LiteLLM's cache was not computed by any engine."""
        usage, timings = engine_usage(kwargs, response_obj), stream_timings(kwargs)
        self._end(kwargs, usage, timings, well=not kwargs.get("cache_hit"))

    def log_failure_event(self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any) -> None:
        """Handle a missing or incomplete answer."""
        self._end(kwargs, None, None, well=False)

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

    def _end(self, kwargs: dict[str, Any], usage: Usage | None, timings: Timings | None, *, well: bool) -> None:
        info = reservation_of(kwargs)
        if info is not None:
            held_id = info[RESERVATION]
            self._report(lambda _: self._chooser.end(held_id, usage, timings, well=well))

    def _report(self, report: Callable[[RouterClient], Coroutine[Any, Any, None]]) -> None:
        """Report without waiting, because some callbacks run in the caller's event loop. A closed client has already released
        its bookings."""
        with suppress(ClientClosed):
            self._client.submit(report)

    async def _open_chooser(self, client: RouterClient) -> DeploymentChooser:
        return DeploymentChooser(client, self._prompts, self._scope_of, _providers, self.counters, self._held_s)


def _arguments(call: _StrategyCall) -> dict[str, Any]:
    return {name: getattr(call, name) for name in _StrategyCall.__slots__}


def _mark_completion(call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Mark completions, since LiteLLM calls its strategy for them with the arguments of a chat."""

    @wraps(call)
    async def completion(*args: P.args, **kwargs: P.kwargs) -> T:
        before = _api.set(Api.COMPLETIONS)
        try:
            return await call(*args, **kwargs)
        finally:
            _api.reset(before)

    return completion
