"""OpenAI-style responses of one engine: a JSON body, or server-sent events."""

import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.block_hash import Namespace
from kvatlas_simulator.engine.generation_request import GeneratedToken, GenerationRequest, QueueFull
from kvatlas_simulator.engine.loop import EngineLoop
from kvatlas_simulator.engine.tokenizer import decode
from kvatlas_simulator.http.kv_fetch import KvFetches
from kvatlas_simulator.http.kv_transfer import KvTransfers, Transfer, TransferFailed
from kvatlas_simulator.http.request_bodies import ChatRequest, CompletionRequest
from kvatlas_simulator.http.stop_strings import StopStrings

_STOPPING = "the engine is stopping"
DONE = b"data: [DONE]\n\n"


def error_response(status: int, message: str) -> JSONResponse:
    """An error in vLLM's format."""
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse({"error": _error_body(status, message)}, status_code=status, headers=headers)


class CompletionResponse(Response):
    """A response that is generated while it is being sent, and aborts the request if the client disconnects."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    gives_prompt_ids_in_choice = True
    """True if streams send the prompt's ids in a choice. Chats send them along with the role."""

    def __init__(
        self,
        engine: EngineLoop,
        body: CompletionRequest | ChatRequest,
        *,
        model: str,
        adapter: str | None,
        transfers: KvTransfers,
        fetches: KvFetches,
        keep_alive_s: float = 0.0,
    ) -> None:
        """`keep_alive_s`: a stream that has waited this long sends a comment; 0: never."""
        super().__init__()
        self._keep_alive_s = keep_alive_s
        self._transfers = transfers
        self._fetches = fetches
        self._transfer = Transfer()
        self._address = "", 0
        self._engine = engine
        self._body = body
        self._completion_id = f"{self.id_prefix}-{uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._request = GenerationRequest(
            request_id=self._completion_id,
            prompt=body.token_ids,
            max_tokens=body.max_tokens,
            namespace=Namespace(adapter=adapter, cache_salt=body.cache_salt),
            choices=body.n,
            seed=body.seed or 0,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = scope.get("server") or ("127.0.0.1", 0)
        self._address = server[0], server[1] or 0
        with ExitStack() as generation:
            response: Response | None
            try:
                self._transfer = await self._transfers.receive(self._body)
                generation.callback(self._transfers.end, self._transfer)
                fetched = await self._fetches.fetch(self._body, self._request.namespace)
                self._request = replace(
                    self._request,
                    received_tokens=max(self._transfer.received_tokens, fetched),
                    holds=self._transfer.holds,
                    max_tokens=1 if self._transfer.holds else self._request.max_tokens,
                )
                tokens = generation.enter_context(self._engine.generate(self._request))
            except QueueFull as error:
                response = error_response(503, str(error))
            except InvalidValue as error:  # RequestTooLarge is one
                response = error_response(400, str(error))
            except TransferFailed as error:
                response = error_response(500, str(error))
            else:
                if self._body.stream:
                    response = StreamingResponse(self._stream(tokens), media_type="text/event-stream")
                else:
                    response = await self._collect(tokens, receive)
            if response is not None:
                await response(scope, receive, send)

    async def _collect(self, tokens: MemoryObjectReceiveStream[GeneratedToken], receive: Receive) -> Response | None:
        """The response with all tokens; None if the client disconnected first."""
        answer = Answer.of(self._request, self._body.stops)
        disconnected = False

        async def watch_client() -> None:
            nonlocal disconnected
            while (await receive())["type"] != "http.disconnect":
                pass
            disconnected = True
            watch.cancel_scope.cancel()

        async with anyio.create_task_group() as watch:
            watch.start_soon(watch_client)
            async for token in tokens:
                answer.add(token)
                if answer.complete:
                    break
            watch.cancel_scope.cancel()
        if not answer.complete:
            return None if disconnected else error_response(503, _STOPPING)
        choices = [self._choice(choice, answer) for choice in range(self._request.choices)]
        if self._body.return_token_ids:
            for each in choices:
                each["prompt_token_ids"] = list(self._request.prompt)
        try:
            told = await self._hand_over()
        except TransferFailed as error:
            return error_response(500, str(error))
        return JSONResponse({**self._whole(choices, answer), **told})

    async def _hand_over(self) -> dict[str, Any]:
        request = self._request
        return await self._transfers.hand_over(self._transfer, request.request_id, len(request.prompt), self._address)

    async def _stream(self, tokens: MemoryObjectReceiveStream[GeneratedToken]) -> AsyncIterator[bytes]:
        answer = Answer.of(self._request, self._body.stops)
        async for token in self._with_pauses(tokens):
            if token is None:
                yield b": keep-alive\n\n"
                continue
            first = not answer.token_ids[token.choice]
            begins = not any(answer.token_ids)
            if not answer.add(token):
                continue
            for event in self._events(token, answer, begins=begins, first=first):
                yield event
            if answer.complete:
                break
        try:
            if answer.complete:
                await self._hand_over()
        except TransferFailed as error:
            yield server_sent_event({"error": _error_body(500, str(error))})
            return
        if not answer.complete:
            yield server_sent_event({"error": _error_body(503, _STOPPING)})
            yield DONE
            return
        for event in self._end_events(answer):
            yield event

    def _whole(self, choices: list[dict[str, Any]], answer: "Answer") -> dict[str, Any]:
        """The JSON of a non-streamed answer."""
        return self._response_body(choices, answer.usage(), self.object_name)

    def _events(self, token: GeneratedToken, answer: "Answer", *, begins: bool, first: bool) -> Iterator[bytes]:
        """Events for one token. `begins`: it is the first token of the answer. `first`: it is the first token of its
        choice."""
        if first:
            for opening in self._opening(token.choice):
                usage = answer.usage(tokens=0) if self._body.counts_usage else None
                body = self._response_body([opening], usage, self.chunk_object_name)
                yield server_sent_event({**body, "prompt_token_ids": self._prompt_ids})
        choice = self._choice(token.choice, answer, streamed=True)
        if self.gives_prompt_ids_in_choice:
            choice["prompt_token_ids"] = self._prompt_ids if first else None
        usage = answer.usage(tokens=len(answer.token_ids[token.choice])) if self._body.counts_usage else None
        yield server_sent_event(self._response_body([choice], usage, self.chunk_object_name))

    def _end_events(self, answer: "Answer") -> Iterator[bytes]:
        """Events after the last token."""
        if self._body.include_usage:
            yield server_sent_event(self._response_body([], answer.usage(), self.chunk_object_name))
        yield DONE

    async def _with_pauses(
        self, tokens: MemoryObjectReceiveStream[GeneratedToken]
    ) -> AsyncIterator[GeneratedToken | None]:
        """Yield tokens, and None for each pause that is to be filled by a comment."""
        while True:
            token: GeneratedToken | None = None
            try:
                with anyio.move_on_after(self._keep_alive_s or None):
                    token = await tokens.receive()
            except anyio.EndOfStream:
                return
            yield token

    def _content(self, text: str, *, streamed: bool) -> dict[str, Any]:
        """The field of a choice that holds the text."""
        return {"text": text}

    def _opening(self, index: int) -> list[dict[str, Any]]:
        """Chunks for a choice before its first token."""
        return []

    def _choice(self, index: int, answer: "Answer", *, streamed: bool = False) -> dict[str, Any]:
        """A choice of the whole answer, or its last part."""
        choice: dict[str, Any] = {
            "index": index,
            **self._content(answer.parts[index] if streamed else answer.texts[index], streamed=streamed),
            "logprobs": None,
            "finish_reason": answer.finish_reasons[index],
            "stop_reason": answer.stops[index].matched,
        }
        if self._body.return_token_ids or streamed:
            ids = answer.token_ids[index][-1:] if streamed else answer.token_ids[index]
            choice["token_ids"] = ids if self._body.return_token_ids else None
        return choice

    @property
    def _prompt_ids(self) -> list[int] | None:
        return list(self._request.prompt) if self._body.return_token_ids else None

    def _response_body(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, object_name: str
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": self._completion_id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        return body if usage is None else {**body, "usage": usage}


class ChatResponse(CompletionResponse):
    """A completion response as assistant messages."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    gives_prompt_ids_in_choice = False

    def _content(self, text: str, *, streamed: bool) -> dict[str, Any]:
        return {"delta": {"content": text}} if streamed else {"message": {"role": "assistant", "content": text}}

    def _opening(self, index: int) -> list[dict[str, Any]]:
        """vLLM and SGLang send the role in a separate chunk, without text."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]


@dataclass(slots=True)
class Answer:
    """The tokens that a request has generated so far."""

    request: GenerationRequest
    stops: list[StopStrings]
    token_ids: list[list[int]] = field(init=False)
    texts: list[str] = field(init=False)
    parts: list[str] = field(init=False)
    """The text of each choice's last token, as far as it may be sent already."""
    finish_reasons: list[str | None] = field(init=False)
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        choices = self.request.choices
        self.token_ids = [[] for _ in range(choices)]
        self.texts, self.parts, self.finish_reasons = [""] * choices, [""] * choices, [None] * choices

    @classmethod
    def of(cls, request: GenerationRequest, stops: Sequence[str] = ()) -> "Answer":
        return cls(request, [StopStrings(stops) for _ in range(request.choices)])

    def add(self, token: GeneratedToken) -> bool:
        """Add a token. Returns False if its choice has ended."""
        choice, stops = token.choice, self.stops[token.choice]
        if self.finish_reasons[choice] is not None:
            return False
        self.token_ids[choice].append(token.token_id)
        self.parts[choice] = stops.feed(decode([token.token_id]), last=token.finish_reason is not None)
        self.texts[choice] += self.parts[choice]
        self.cached_tokens = token.cached_tokens
        self.finish_reasons[choice] = token.finish_reason if stops.matched is None else "stop"
        return True

    @property
    def complete(self) -> bool:
        return all(self.finish_reasons)

    def usage(self, *, tokens: int | None = None) -> dict[str, Any]:
        """The usage to report. `tokens`: the number of tokens of one choice so far; default: all of the answer."""
        prompt = len(self.request.prompt)
        completion = sum(map(len, self.token_ids)) if tokens is None else tokens
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def server_sent_event(body: dict[str, Any], name: str | None = None) -> bytes:
    """Format an event; `name`: its type."""
    return (
        (f"event: {name}\n".encode() if name else b"")
        + b"data: "
        + json.dumps(body, separators=(",", ":")).encode()
        + b"\n\n"
    )


def _error_body(status: int, message: str) -> dict[str, Any]:
    kinds = {404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}
    return {"message": message, "type": kinds.get(status, "BadRequestError"), "param": None, "code": status}
