"""The proxy's paths.

/v1/chat/completions, /v1/completions   to the best worker
/v1/models                              the fleet's models
/v1/route, /v1/done                     the same choice for routers in other languages
/health, /readyz, /status               for probes and people
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvatlas.errors import InvalidValue, Unreachable
from kvatlas.identity import Scope as IdentityScope
from kvatlas.request import Fallbacks, RequestHints
from router_client.errors import NoWorkers
from router_client.held_bookings import HeldBookings, TooManyHeld
from router_client.learning.prediction_accuracy import PredictionAccuracy
from router_client.learning.timings import Timings
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.slo import Advice
from router_client.prompt import Prompt
from router_client.proxy.catalogue import Catalogue
from router_client.proxy.client_request import ClientRequest, send_error
from router_client.proxy.counters import ProxyCounters
from router_client.proxy.exchange import Exchange, RequestShed
from router_client.proxy.request_reader import RequestReader, UnknownModel
from router_client.proxy.upstream import EngineRequest
from router_client.results import Choice
from router_client.tokens.counters import TokenCounters
from router_client.tokens.prompt_reader import RequestPrompt
from router_client.tokens.text_request import Api, TextRequest, parse_object
from router_client.tokens.usage import Usage

MOST_BODY_BYTES = 64 << 20


class ProxyApplication:
    """The routes over the parts of one proxy; `asgi` is the application."""

    def __init__(
        self,
        exchange: Exchange,
        held: HeldBookings,
        reader: RequestReader,
        catalogue: Catalogue,
        answers: PredictionAccuracy,
        tokens: TokenCounters,
        counters: ProxyCounters,
        *,
        shed: bool = False,
    ) -> None:
        """`shed`: refuse a request at `/v1/route` if that is the advice."""
        self._held = held
        self._reader = reader
        self._catalogue = catalogue
        self._answers = answers
        self._tokens = tokens
        self._counters = counters
        self._shed = shed
        self.asgi = Starlette(
            routes=[
                *(Route(api.value, _Completions(api, exchange), methods=["POST"]) for api in Api),
                Route("/v1/models", _with_json_errors(self._models)),
                Route("/v1/route", _with_json_errors(self._route), methods=["POST"]),
                Route("/v1/done", _with_json_errors(self._done), methods=["POST"]),
                Route("/health", self._health),
                Route("/readyz", self._ready),
                Route("/status", self._status),
            ]
        )

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _ready(self, _: Request) -> Response:
        workers = await self._catalogue.routable()
        return JSONResponse({"workers": workers}, status_code=200 if workers else 503)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(await self._catalogue.cards())})

    async def _status(self, _: Request) -> Response:
        """Counters, and findings that need attention."""
        return JSONResponse(
            {
                "workers": await self._catalogue.routable(),
                "held": len(self._held),
                "proxy": asdict(self._counters),
                "tokens": asdict(self._tokens),
                "answers": asdict(self._answers.counts),
                "findings": [*self._answers.findings(), *self._tokens.findings()],
            }
        )

    async def _route(self, request: Request) -> Response:
        """Choose and book a worker for a request that the caller sends.

        The body is an OpenAI request (with `messages` or `prompt`), or the hints of `kvatlas.request.RequestHints`.
        `avoid`: workers that are no candidates. `pd`: true, to get the prefill worker too, if that is another one.
        """
        body = parse_object(await _body(request))
        pd = body.pop("pd", False)
        if not isinstance(pd, bool):
            raise InvalidValue(f"pd is {pd!r:.80}; expected true or false")
        avoid = body.pop("avoid", [])
        if not isinstance(avoid, list) or not all(isinstance(one, str) for one in avoid):
            raise InvalidValue(f"avoid is {avoid!r:.80}; expected a list of worker ids")
        read = await self._read(body)
        held_id, choice = await self._held.book(read.prompt, frozenset(avoid), pd=pd)
        if self._shed and choice.advice is Advice.SHED:
            self._held.end(held_id, None, well=False)
            self._counters.shed += 1
            raise RequestShed(choice.retry_after_s)
        return JSONResponse(_choice_json(held_id, choice, read))

    async def _read(self, body: dict[str, Any]) -> RequestPrompt:
        for api, name in ((Api.CHAT, "messages"), (Api.COMPLETIONS, "prompt")):
            if name in body:
                return await self._reader.read(TextRequest.parse(api, json.dumps(body).encode()))
        hints = RequestHints.parse({"request_id": "route", **body})
        scope = await self._catalogue.scope_of(hints.model_id)
        if scope is None and hints.model_id is None:
            raise InvalidValue("model_id is missing; the fleet serves more than one model, or none")
        prompt = Prompt.of_hints(hints, _fallbacks(hints, scope))
        return RequestPrompt(prompt, prompt.input_tokens)

    async def _done(self, request: Request) -> Response:
        """`id`: from `/v1/route`. `phase`: `first_token` or `done` (default). `usage`: from the engine's answer. `failed`:
        true if the request failed. `timings`: the measured `ttft_us` and `tpot_us` (the median)."""
        body = parse_object(await _body(request))
        held_id, phase = body.get("id"), body.get("phase", "done")
        if not isinstance(held_id, str):
            raise InvalidValue(f"id is {held_id!r:.80}; expected the id from /v1/route")
        if phase not in ("first_token", "done"):
            raise InvalidValue(f"phase is {phase!r:.80}; expected first_token or done")
        if phase == "first_token":
            known = await self._held.first_token(held_id)
        else:
            known = self._held.end(held_id, Usage.of(body), Timings.of(body), well=body.get("failed") is not True)
        return JSONResponse({"known": known})


class _Completions:
    """One of OpenAI's calls, as an ASGI application: its answer is passed on while it comes."""

    def __init__(self, api: Api, exchange: Exchange) -> None:
        self._api = api
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _body(Request(scope, receive))
            text = TextRequest.parse(self._api, body)
        except InvalidValue as error:
            await send_error(send, 400, "BadRequestError", str(error))
            return
        for_engine = EngineRequest(self._api.value, scope["query_string"], body)
        await self._exchange.run(ClientRequest(text, for_engine, scope["headers"], receive, send))


async def _body(request: Request) -> bytes:
    """Raises InvalidValue for a body that is too long, and ClientDisconnect if the client goes away."""
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > MOST_BODY_BYTES:
            raise InvalidValue(f"the body has more than {MOST_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _with_json_errors(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A handler whose errors become JSON, one line each."""

    async def handled(request: Request) -> Response:
        try:
            return await handle(request)
        except UnknownModel as error:
            return JSONResponse({"error": str(error)}, status_code=404)
        except InvalidValue as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except (NoWorkers, Unreachable, TooManyHeld, RequestShed) as error:
            retry_after_s = error.retry_after_s if isinstance(error, RequestShed) else 1
            return JSONResponse({"error": str(error)}, status_code=503, headers={"Retry-After": str(retry_after_s)})

    return handled


def _fallbacks(hints: RequestHints, scope: IdentityScope | None) -> Fallbacks:
    """The model's name is enough: its tokenizer, and whether it is an adapter, follow from the fleet."""
    if scope is None:
        return Fallbacks()
    return Fallbacks(scope.model_id, scope.tokenizer_id, scope.adapter_id, scope.tenant_id)


def _choice_json(held_id: str, choice: Choice | PairChoice, read: RequestPrompt) -> dict[str, Any]:
    return {
        "id": held_id,
        "worker": choice.worker_id,
        "url": choice.url,
        "headers": dict(choice.headers),
        "prompt_tokens": read.prompt_tokens,
        "predicted_cached_tokens": choice.predicted_cached_tokens,
        "unconfirmed_tokens": choice.unconfirmed_tokens,
        "score_us": choice.score_us,
        "by": choice.mode,
        "advice": choice.advice,
        "explanation": choice.explain(),
        **({"prefill": _prefill_json(choice)} if isinstance(choice, PairChoice) else {}),
    }


def _prefill_json(pair: PairChoice) -> dict[str, Any] | None:
    """The worker that computes the prompt; None if the other one does."""
    prefill = pair.prefill
    if prefill is None:
        return None
    return {"worker": prefill.worker_id, "url": prefill.url, "headers": dict(prefill.headers)}
