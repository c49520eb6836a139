"""OpenAI-style completions of one engine: a JSON answer, or server-sent events."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from simulator.cache.block_hash import Namespace
from simulator.engine.generation import GeneratedToken, GenerationRequest, QueueFull, RequestTooLarge
from simulator.engine.loop import EngineLoop
from simulator.engine.tokenizer import decode
from simulator.http.completion_request import ChatRequest, CompletionRequest

_STOPPED = "the engine is stopping"


def error_response(status: int, message: str) -> JSONResponse:
    """An error as vLLM words it."""
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse({"error": _error(status, message)}, status_code=status, headers=headers)


class CompletionResponse(Response):
    """Generates while it is sent; gives the request up when the client goes away."""

    id_prefix = "cmpl"
    kind = "text_completion"
    kind_streamed = "text_completion"

    def __init__(
        self, engine: EngineLoop, asked: CompletionRequest | ChatRequest, *, model: str, adapter: str | None
    ) -> None:
        super().__init__()
        self._engine = engine
        self._asked = asked
        self._completion_id = f"{self.id_prefix}-{uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._request = GenerationRequest(
            request_id=self._completion_id,
            prompt=asked.token_ids,
            max_tokens=asked.max_tokens,
            namespace=Namespace(adapter=adapter, cache_salt=asked.cache_salt),
            choices=asked.n,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as generation:
            response: Response | None
            try:
                tokens = generation.enter_context(self._engine.generate(self._request))
            except QueueFull as error:
                response = error_response(503, str(error))
            except RequestTooLarge as error:
                response = error_response(400, str(error))
            else:
                if self._asked.stream:
                    response = StreamingResponse(self._events(tokens), media_type="text/event-stream")
                else:
                    response = await self._whole(tokens, receive)
            if response is not None:
                await response(scope, receive, send)

    async def _whole(self, tokens: MemoryObjectReceiveStream[GeneratedToken], receive: Receive) -> Response | None:
        """The answer at its end; None when the client didn't wait for it."""
        answer = _Answer.of(self._request)
        gone = False

        async def watch_client() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            watching.cancel_scope.cancel()

        async with anyio.create_task_group() as watching:
            watching.start_soon(watch_client)
            async for token in tokens:
                answer.add(token)
                if answer.complete:
                    break
            watching.cancel_scope.cancel()
        if not answer.complete:
            return None if gone else error_response(503, _STOPPED)
        choices = [self._choice(choice, answer.token_ids[choice], "length") for choice in range(self._request.choices)]
        if self._asked.return_token_ids:
            for body in choices:
                body["prompt_token_ids"] = list(self._request.prompt)
        return JSONResponse(self._body(choices, answer.usage(), self.kind))

    async def _events(self, tokens: MemoryObjectReceiveStream[GeneratedToken]) -> AsyncIterator[bytes]:
        answer = _Answer.of(self._request)
        async for token in tokens:
            choice = self._choice(token.choice, [token.token_id], token.finish_reason, streamed=True)
            if self._asked.return_token_ids and not answer.token_ids[token.choice]:
                choice["prompt_token_ids"] = list(self._request.prompt)
            answer.add(token)
            yield _event(self._body([choice], None, self.kind_streamed))
            if answer.complete:
                break
        if not answer.complete:
            yield _event({"error": _error(503, _STOPPED)})
        elif self._asked.include_usage:
            yield _event(self._body([], answer.usage(), self.kind_streamed))
        yield b"data: [DONE]\n\n"

    def _said(self, text: str, *, streamed: bool) -> dict[str, Any]:
        """The part of a choice that holds the text."""
        return {"text": text}

    def _choice(
        self, index: int, token_ids: list[int], finish_reason: str | None, *, streamed: bool = False
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            **self._said(decode(token_ids), streamed=streamed),
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": None,
        }
        if self._asked.return_token_ids:
            choice["token_ids"] = token_ids
        return choice

    def _body(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, kind: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": self._completion_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        return body if usage is None else {**body, "usage": usage}


class ChatResponse(CompletionResponse):
    """The same as messages of an assistant."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    kind_streamed = "chat.completion.chunk"

    def _said(self, text: str, *, streamed: bool) -> dict[str, Any]:
        return {"delta" if streamed else "message": {"role": "assistant", "content": text}}


@dataclass(slots=True)
class _Answer:
    """What has come of a request so far."""

    request: GenerationRequest
    token_ids: list[list[int]]
    cached_tokens: int = 0
    finished: int = 0

    @classmethod
    def of(cls, request: GenerationRequest) -> "_Answer":
        return cls(request, [[] for _ in range(request.choices)])

    def add(self, token: GeneratedToken) -> None:
        self.token_ids[token.choice].append(token.token_id)
        self.cached_tokens = token.cached_tokens
        self.finished += token.finish_reason is not None

    @property
    def complete(self) -> bool:
        return self.finished == self.request.choices

    def usage(self) -> dict[str, Any]:
        prompt, completion = len(self.request.prompt), sum(map(len, self.token_ids))
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _error(status: int, message: str) -> dict[str, Any]:
    kinds = {404: "NotFoundError", 503: "ServiceUnavailableError"}
    return {"message": message, "type": kinds.get(status, "BadRequestError"), "param": None, "code": status}
