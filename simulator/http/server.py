"""The engine's HTTP API, like vLLM's API server: health, version, metrics, models, the generation APIs and their rendering,
event sources, cache reset and sleep; and SGLang's `/generate`. `/kv_blocks`, `/kv_transfer`, `/kv_fetch`, `/hang` and `/resume`
are the simulator's own: a hung engine serves its status pages and accepts requests, but computes nothing.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvatlas.errors import InvalidValue
from kvatlas_router.tokens import Api
from kvatlas_simulator.cache.block_hash import SeededBlockHasher
from kvatlas_simulator.engine.loop import EngineLoop
from kvatlas_simulator.http.completion_response import error_response
from kvatlas_simulator.http.kv_fetch import KvFetches
from kvatlas_simulator.http.kv_transfer import Disaggregation, KvTransfers
from kvatlas_simulator.http.metrics import CONTENT_TYPE, EngineMetrics
from kvatlas_simulator.http.other_answers import RESPONSES
from kvatlas_simulator.http.request_bodies import parse_api, parse_tokenize

VLLM_VERSION = "0.33.0"
"""The vLLM version whose protocols the engine speaks."""

_RENDERED = (Api.COMPLETIONS, Api.CHAT, Api.MESSAGES, Api.RESPONSES)


class _UnknownModel(InvalidValue):
    """The request names a model that is not served."""


class EngineApi:
    """The HTTP routes of one engine."""

    def __init__(
        self,
        engine: EngineLoop,
        *,
        model: str,
        adapters: Sequence[str],
        vocab_size: int,
        resident_blocks: Callable[[], list[dict[str, Any]]],
        event_source: Mapping[str, Any] | None = None,
        transfers: KvTransfers | None = None,
        fetches: KvFetches | None = None,
        connector_config: Mapping[str, Any] | None = None,
        health_waits: bool = False,
        keep_alive_s: float = 0.0,
        scale_out: bool = True,
    ) -> None:
        """`resident_blocks`: lists what the cache holds. `event_source`: where to find its KV events, as described by vLLM's
        `/kv_event_sources`; None: there are no events. `transfers`, `fetches`: those to and from other engines; None: there are
        none. `connector_config`: like vLLM's `kv_transfer_config`. `health_waits`: `/health` answers only once the prompts in
        progress are computed. `keep_alive_s`: see `CompletionResponse`. `scale_out`: serve vLLM's calls with token ids, and
        those that render requests into such calls; False: refuse both."""
        self._connector_config = connector_config
        self._health_waits = health_waits
        self._page = b""
        self._engine = engine
        self._model = model
        self._adapters = tuple(adapters)
        self._vocab_size = vocab_size
        self._resident_blocks = resident_blocks
        self._event_source = event_source
        self._transfers = transfers or KvTransfers(engine, Disaggregation.NONE, 0, 1)
        self._fetches = fetches or KvFetches(engine, None, SeededBlockHasher(0), 0, 1)
        self._keep_alive_s = keep_alive_s
        self._apis = [api for api in Api if scale_out or api is not Api.TOKENS]
        self._rendered = [api for api in _RENDERED if scale_out]
        self._started_at = time.time()
        self._metrics = EngineMetrics(engine, model=model, started_at=self._started_at)

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics_page),
                Route("/v1/models", self._models),
                *(Route(api, partial(self._generate, api), methods=["POST"]) for api in self._apis),
                *(Route(f"{api}/render", partial(self._render, api), methods=["POST"]) for api in self._rendered),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/version", self._version),
                Route("/kv_event_sources", self._kv_event_sources),
                Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
                Route("/sleep", self._sleep, methods=["POST"]),
                Route("/wake_up", self._wake_up, methods=["POST"]),
                Route("/is_sleeping", self._is_sleeping),
                Route("/hang", self._hang, methods=["POST"]),
                Route("/resume", self._resume, methods=["POST"]),
                Route("/kv_blocks", self._kv_blocks),
                Route("/kv_transfer", self._transfers.serve, methods=["POST"]),
                Route("/kv_fetch", self._fetches.serve, methods=["POST"]),
                Route("/server_info", self._server_info),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    async def _health(self, _: Request) -> Response:
        if self._health_waits:
            await self._engine.wait_for_pass()
        return Response()

    async def _hang(self, _: Request) -> Response:
        self._page = self._metrics.page()  # the figures of a hung engine don't change
        self._engine.hang()
        return Response()

    async def _resume(self, _: Request) -> Response:
        self._engine.resume()
        return Response()

    async def _sleep(self, _: Request) -> Response:
        await self._engine.sleep()
        return Response()

    async def _wake_up(self, _: Request) -> Response:
        self._engine.wake_up()
        return Response()

    async def _is_sleeping(self, _: Request) -> Response:
        return JSONResponse({"is_sleeping": self._engine.asleep})

    async def _metrics_page(self, _: Request) -> Response:
        page = self._page if self._engine.hung else self._metrics.page()
        return Response(page, headers={"Content-Type": CONTENT_TYPE})

    async def _models(self, _: Request) -> Response:
        base = self._card(self._model, parent=None)
        return JSONResponse(
            {"object": "list", "data": [base, *(self._card(name, parent=self._model) for name in self._adapters)]}
        )

    def _card(self, name: str, *, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(self._started_at),
            "owned_by": "vllm",
            "root": name,
            "parent": parent,
            "max_model_len": self._engine.core.cache.capacity_tokens if parent is None else None,
            "permission": [],
        }

    async def _generate(self, api: Api, request: Request) -> Response:
        try:
            body = parse_api(api, await request.body(), vocab_size=self._vocab_size)
            model, adapter = self._resolve_model(body.model)
        except InvalidValue as error:
            return _invalid(error)
        return RESPONSES[api](
            self._engine,
            body,
            model=model,
            adapter=adapter,
            transfers=self._transfers,
            fetches=self._fetches,
            keep_alive_s=self._keep_alive_s,
        )

    async def _render(self, api: Api, request: Request) -> Response:
        """Render a request: return what the engine would compute, as vLLM's `GenerateRequest`; for completions, a list of
        them."""
        try:
            body = parse_api(api, await request.body(), vocab_size=self._vocab_size)
            model, _ = self._resolve_model(body.model)
        except InvalidValue as error:
            return _invalid(error)
        rendered = {
            "request_id": f"render-{uuid4().hex}",
            "token_ids": list(body.token_ids),
            "features": None,
            "sampling_params": {"max_tokens": body.max_tokens, "n": body.n},
            "model": model,
            "stream": body.stream,
            "cache_salt": body.cache_salt,
        }
        return JSONResponse([rendered] if api is Api.COMPLETIONS else rendered)

    async def _tokenize(self, request: Request) -> Response:
        try:
            body = parse_tokenize(await request.body(), vocab_size=self._vocab_size)
            self._resolve_model(body.model)
        except InvalidValue as error:
            return _invalid(error)
        tokens = body.token_ids
        capacity = self._engine.core.cache.capacity_tokens
        return JSONResponse({"count": len(tokens), "max_model_len": capacity, "tokens": tokens, "token_strs": None})

    def _resolve_model(self, name: str | None) -> tuple[str, str | None]:
        """The (model as named in the response, adapter). Raises _UnknownModel."""
        model = self._model if name is None else name
        if model != self._model and model not in self._adapters:
            served = ", ".join((self._model, *self._adapters))
            raise _UnknownModel(f"the model {model!r} does not exist; expected one of {served}")
        return model, None if model == self._model else model

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": VLLM_VERSION})

    async def _kv_event_sources(self, _: Request) -> Response:
        """The KV event sources of each rank, in vLLM's format."""
        return JSONResponse({} if self._event_source is None else {"0": self._event_source})

    async def _server_info(self, _: Request) -> Response:
        """The connector's configuration, as shown by vLLM's development server."""
        return JSONResponse({"vllm_config": {"kv_transfer_config": self._connector_config}})

    async def _kv_blocks(self, _: Request) -> Response:
        """The cache's content, in the terms of `kvatlas export`."""
        return JSONResponse({"idle": not self._engine.core.has_work, "blocks": self._resident_blocks()})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        try:
            preempt_running = _parse_flag(request, "reset_running_requests")
            include_cpu = _parse_flag(request, "reset_external")
        except InvalidValue as error:
            return _invalid(error)
        if await self._engine.reset_prefix_cache(preempt_running=preempt_running, include_cpu=include_cpu):
            return Response()
        return error_response(
            409, "running requests hold blocks; wait for them to end, or set reset_running_requests=true"
        )


def _invalid(error: InvalidValue) -> Response:
    return error_response(404 if isinstance(error, _UnknownModel) else 400, str(error))


def _parse_flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidValue(f"{name} is {text!r:.50}; expected true or false")
    return text in ("true", "1")


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response
