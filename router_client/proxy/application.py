"""The proxy's paths.

/v1/chat/completions, /v1/completions   to the best worker
/v1/models                              what the fleet serves
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
from router_client.decision.held_bookings import HeldRoutes, TooManyHeld
from router_client.decision.picker import Booked, Shed
from router_client.errors import NoWorkers
from router_client.learning.prediction_accuracy import AnswerComparison
from router_client.learning.timings import Timings
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.slo import Advice
from router_client.prompt import Prompt
from router_client.proxy.catalogue import Catalogue
from router_client.proxy.counters import ProxyCounters
from router_client.proxy.exchange import Exchanges, Incoming, send_error
from router_client.proxy.request_reader import RequestReader, UnknownModel
from router_client.proxy.upstream import Question
from router_client.tokens.counters import TokenCounters
from router_client.tokens.prompt_reader import ReadRequest
from router_client.tokens.text_request import Api, TextRequest, parse_object
from router_client.tokens.usage import Usage

MOST_BODY_BYTES = 64 << 20


class ProxyApplication:
    """The routes over one proxy's parts; `asgi` is the application."""

    def __init__(
        self,
        exchanges: Exchanges,
        held: HeldRoutes,
        reader: RequestReader,
        catalogue: Catalogue,
        answers: AnswerComparison,
        tokens: TokenCounters,
        counters: ProxyCounters,
        *,
        sheds: bool = False,
    ) -> None:
        """`sheds`: refuse a request where that is the advice."""
        self._held = held
        self._reader = reader
        self._catalogue = catalogue
        self._answers = answers
        self._tokens = tokens
        self._counters = counters
        self._sheds = sheds
        self.asgi = Starlette(
            routes=[
                *(Route(api.value, _Completions(api, exchanges), methods=["POST"]) for api in Api),
                Route("/v1/models", _one_line(self._models)),
                Route("/v1/route", _one_line(self._route), methods=["POST"]),
                Route("/v1/done", _one_line(self._done), methods=["POST"]),
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
        """Counters, and what somebody should look at."""
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
        """Pick and book a worker for a request that somebody else sends.

        The body is an OpenAI request (with `messages` or `prompt`), or the hints of `kvatlas.request.RequestHints`.
        `avoid`: workers not to be picked. `pd`: true, to get the worker that computes the prompt too, where that is
        another one.
        """
        body = parse_object(await _body(request))
        pd = body.pop("pd", False)
        if not isinstance(pd, bool):
            raise InvalidValue(f"pd is {pd!r:.80}; expected true or false")
        avoid = body.pop("avoid", [])
        if not isinstance(avoid, list) or not all(isinstance(one, str) for one in avoid):
            raise InvalidValue(f"avoid is {avoid!r:.80}; expected a list of worker ids")
        read = await self._read(body)
        held_id, booked = await self._held.route(read.prompt, frozenset(avoid), pd=pd)
        if self._sheds and booked.advice == Advice.SHED:
            self._held.done(held_id, None, well=False)
            self._counters.shed += 1
            raise Shed(booked.retry_after_s)
        return JSONResponse(_told(held_id, booked, read))

    async def _read(self, body: dict[str, Any]) -> ReadRequest:
        for api, name in ((Api.CHAT, "messages"), (Api.COMPLETIONS, "prompt")):
            if name in body:
                return await self._reader.read(TextRequest.parse(api, json.dumps(body).encode()))
        hints = RequestHints.parse({"request_id": "route", **body})
        scope = await self._catalogue.scope_of(hints.model_id)
        if scope is None and hints.model_id is None:
            raise InvalidValue("model_id is missing; the fleet serves more than one model, or none")
        prompt = Prompt.of_hints(hints, _fallbacks(hints, scope))
        return ReadRequest(prompt, prompt.input_tokens)

    async def _done(self, request: Request) -> Response:
        """`id`: of `/v1/route`. `phase`: `first_token` or `done` (default). `usage`: as the engine said; `failed`: true.

        `timings`: `ttft_us` and `tpot_us` (the median), as measured.
        """
        body = parse_object(await _body(request))
        held_id, phase = body.get("id"), body.get("phase", "done")
        if not isinstance(held_id, str):
            raise InvalidValue(f"id is {held_id!r:.80}; expected the id that /v1/route gave")
        if phase not in ("first_token", "done"):
            raise InvalidValue(f"phase is {phase!r:.80}; expected first_token or done")
        if phase == "first_token":
            known = await self._held.first_token(held_id)
        else:
            known = self._held.done(held_id, Usage.of(body), Timings.of(body), well=body.get("failed") is not True)
        return JSONResponse({"known": known})


class _Completions:
    """One of OpenAI's calls, as an ASGI application: its answer is passed on while it comes."""

    def __init__(self, api: Api, exchanges: Exchanges) -> None:
        self._api = api
        self._exchanges = exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _body(Request(scope, receive))
            request = TextRequest.parse(self._api, body)
        except InvalidValue as error:
            await send_error(send, 400, "BadRequestError", str(error))
            return
        question = Question(self._api.value, scope["query_string"], body)
        await self._exchanges.run(Incoming(request, question, scope["headers"], receive, send))


async def _body(request: Request) -> bytes:
    """Raises InvalidValue for one that is too long; ClientDisconnect for a client that went away."""
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > MOST_BODY_BYTES:
            raise InvalidValue(f"the body has more than {MOST_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _one_line(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The errors of a plain call as JSON."""

    async def handled(request: Request) -> Response:
        try:
            return await handle(request)
        except UnknownModel as error:
            return JSONResponse({"error": str(error)}, status_code=404)
        except InvalidValue as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except (NoWorkers, Unreachable, TooManyHeld, Shed) as error:
            retry_after_s = error.retry_after_s if isinstance(error, Shed) else 1
            return JSONResponse({"error": str(error)}, status_code=503, headers={"Retry-After": str(retry_after_s)})

    return handled


def _fallbacks(hints: RequestHints, scope: IdentityScope | None) -> Fallbacks:
    """A model's name alone is enough: its tokenizer, and whether it is an adapter, is the fleet's to say."""
    if scope is None:
        return Fallbacks()
    return Fallbacks(scope.model_id, scope.tokenizer_id, scope.adapter_id, scope.tenant_id)


def _told(held_id: str, booked: Booked, read: ReadRequest) -> dict[str, Any]:
    return {
        "id": held_id,
        "worker": booked.worker_id,
        "url": booked.url,
        "headers": dict(booked.headers),
        "prompt_tokens": read.prompt_tokens,
        "predicted_cached_tokens": booked.predicted_cached_tokens,
        "unconfirmed_tokens": booked.unconfirmed_tokens,
        "score_us": booked.score_us,
        "by": booked.mode,
        "advice": booked.advice,
        "explanation": booked.explain(),
        **({"prefill": _partner(booked)} if isinstance(booked, PairChoice) else {}),
    }


def _partner(pair: PairChoice) -> dict[str, Any] | None:
    """Where the prompt is to be computed; None where the other worker does."""
    prefill = pair.prefill
    if prefill is None:
        return None
    return {"worker": prefill.worker_id, "url": prefill.url, "headers": dict(prefill.headers)}
