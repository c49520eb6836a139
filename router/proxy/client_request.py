"""A client's request to the proxy, how answers and errors are sent back (ASGI), and its line in the access log."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any
from urllib.parse import unquote

from opentelemetry.trace import INVALID_SPAN, Span
from starlette.types import Message, Send

from kvatlas.http.error_form import error_form
from kvatlas_router.admission.queue import Wait
from kvatlas_router.answers.cached_counts import events_without_cached_counts, without_cached_counts
from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.answers.error_events import error_event, is_seen
from kvatlas_router.answers.event_parser import can_be_read
from kvatlas_router.engine_objects.object_use import ObjectUse
from kvatlas_router.proxy.headers import RawHeaders, for_client, queue_header
from kvatlas_router.proxy.request_trace import describe_answer
from kvatlas_router.tenancy.caller import ANYBODY, Caller
from kvatlas_router.tenancy.limits import Permit
from kvatlas_router.tokens.text_request import TextRequest
from kvatlas_router.upstream.engine_answer import EngineRequest, StreamedAnswer, WholeAnswer
from router_client.learning.token_counts import Usage
from router_client.prompt import Prompt

_access_log = logging.getLogger("router_client.access")


class ErrorKind(Enum):
    """The proxy's own errors: their status, and their code in OpenAI's API."""

    INVALID = 400, None
    UNPROVEN = 401, "invalid_api_key"
    FOREIGN = 403, "tenant_not_allowed"
    NO_MODEL = 404, "model_not_found"
    NO_PATH = 404, "unknown_url"
    NO_OBJECT = 404, "not_found"
    METHOD = 405, "method_not_supported"
    TOO_LONG = 413, "request_too_large"
    BUSY = 429, "rate_limit_exceeded"
    BAD_GATEWAY = 502, "bad_gateway"
    UNAVAILABLE = 503, "service_unavailable"

    @property
    def status(self) -> int:
        status: int = self.value[0]
        return status


@dataclass(slots=True)
class ClientRequest:
    """A complete request, and the way back to its client.

    `text`: the parsed request for tokens; None for any other call, whose prompt is not read. `model`: the model name that it
    asks for. `letters`: approximate length of its prompt. What has been sent back so far: `status`, `events` (an event stream
    has begun), `sent_events` (events with data), `in_event` (only part of an event), `begun_with` (a decision's header) and
    `complete`. `decision`: the last attempt's decision header. `priority`: the request's own priority in the queue; None: it
    gives none. `prompt_tokens`: the number of tokens in its prompts, or a guess; 0 until read. `span`: the router's own span.
    `objects`: the objects, kept by engines, that it names or creates. `on_leave`: takes a function to call if its client
    disconnects (`ON_LEAVE`); `gone`: the client disconnected before it had its whole answer. `permit`: the client's permit, if
    clients must prove who they are. `shows_decision`: the client sees the decision in a header. `shows_cached`: the client
    sees engines' counts of cached tokens. `failure`: why the router could not answer. `wait`: the request's wait in the pool's
    queue, if any.
    """

    text: TextRequest | None
    model: str | None
    letters: int
    for_engine: EngineRequest
    headers: RawHeaders
    on_leave: Callable[[Callable[[], None]], None]
    to_client: Send
    began_ns: int = field(default_factory=time.perf_counter_ns)
    status: int | None = None
    first_byte_ns: int | None = None
    objects: ObjectUse | None = field(init=False)
    sent_bytes: int = 0
    events: bool = False
    sent_events: int = 0
    in_event: bool = False
    begun_with: tuple[bytes, bytes] | None = None
    complete: bool = False
    gone: bool = False
    decision: str = ""
    priority: int | None = None
    prompt_tokens: int = 0
    span: Span = INVALID_SPAN
    permit: Permit | None = None
    shows_decision: bool = True
    shows_cached: bool = True
    failure: str = ""
    wait: Wait = field(default_factory=Wait)

    def __post_init__(self) -> None:
        sent = self.for_engine
        decoded = None if self.text is None else self.text.body
        self.objects = ObjectUse.of(sent.method, unquote(sent.path), sent.body, decoded)

    @property
    def caller(self) -> Caller:
        """The request's sender."""
        return ANYBODY if self.permit is None else self.permit.caller

    @property
    def id(self) -> str | None:
        return self.header(b"x-request-id")

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self.status, self.first_byte_ns = message["status"], time.perf_counter_ns()
            self.events = can_be_read(message["headers"])
        else:
            message["body"] = self._of_client(message.get("body", b""))
            self.sent_bytes += len(message["body"])
            if not message.get("more_body", False):
                self.complete = True
        await self.to_client(message)

    async def begin(self, answer: StreamedAnswer, header: tuple[bytes, bytes]) -> None:
        """Send an answer's status and headers, once. If those of another engine have already been sent with keep-alive
        comments, send the new decision as a comment in the stream."""
        before, self.begun_with = self.begun_with, header
        if self.status is None:
            headers = [*for_client(answer.headers), *self._shown(header)]
            await self.send({"type": "http.response.start", "status": answer.status, "headers": headers})
        elif before != header and self.shows_decision:
            await self.send_part(b": " + header[0] + b": " + header[1] + b"\n\n")

    async def send_part(self, body: bytes) -> None:
        """Send a part of the body; more follows. If the client may not see counts in an event stream: only whole events."""
        body = self._of_client(body)
        self.sent_bytes += len(body)
        await self.to_client({"type": "http.response.body", "body": body, "more_body": True})

    async def answer_whole(self, answer: WholeAnswer, header: tuple[bytes, bytes]) -> None:
        """Send an engine's whole answer; if a stream has begun, send the answer's error in it instead."""
        if not self.shows_cached:
            answer = replace(answer, body=without_cached_counts(answer.body))
        if self.status is None:
            await send_answer(self.send, answer, self._shown(header))
            return
        said = EngineError.of_body(answer.body)
        await self.break_off(ErrorKind.BAD_GATEWAY, f"status {answer.status}" if said is None else said.line)

    async def end_failed(self, error: EngineError, rest: bytes) -> None:
        """End a stream with the rest of what the engine sent, including the error. If the client would not recognize that
        error, repeat it in the form of the client's protocol."""
        if is_seen(self.for_engine.path, error):
            await self.send({"type": "http.response.body", "body": rest})
        else:
            await self.send_part(rest)
            await self.break_off(ErrorKind.BAD_GATEWAY, error.line)

    async def refuse(
        self, kind: ErrorKind, line: str, *, param: str | None = None, retry_after_s: int | None = 1
    ) -> None:
        """Send one of the router's own errors; see `send_error`."""
        describe_answer(self.span, kind.status, None)
        if self.status is None:
            line = self._told(kind, line)
            path, added = self.for_engine.path, self._shown()
            await send_error(self.send, path, kind, line, param=param, retry_after_s=retry_after_s, added=added)
        else:
            await self.break_off(kind, line)

    async def break_off(self, kind: ErrorKind, line: str) -> None:
        """End the answer with an error: as a normal error answer if nothing has been sent yet, or as an event if an event
        stream has begun and its last event is complete. For any other incomplete answer, the server closes the
        connection."""
        if self.complete:
            return
        path, line = self.for_engine.path, self._told(kind, line)
        if self.status is None:
            await send_error(self.send, path, kind, line)
            return
        event = error_event(path, error_body(path, kind, line), self.sent_events) if self.events else None
        if event is not None and not self.in_event:
            await self.send({"type": "http.response.body", "body": event})

    def _of_client(self, part: bytes) -> bytes:
        """The part without the counts that this client may not see."""
        return part if self.shows_cached or not self.events else events_without_cached_counts(part)

    def _shown(self, *headers: tuple[bytes, bytes]) -> RawHeaders:
        """Headers that explain the choice, if the client may see them, including the queue's header if the request waited."""
        if not self.shows_decision:
            return ()
        return (*headers, queue_header(self.wait)) if self.wait else headers

    def _told(self, kind: ErrorKind, line: str) -> str:
        """The line that is shown to the client. Clients that must not see decisions must not see the names and addresses
        of workers either."""
        self.failure = line
        hidden = kind.status >= 500 and not self.shows_decision
        return "no engine can answer this request now; try again later" if hidden else line

    def log(self) -> None:
        """`POST /v1/completions 200, first byte 12.3 ms, 250.1 ms, 4096 bytes; model m; "w1";cached=512;...`"""
        if not _access_log.isEnabledFor(logging.INFO):
            return
        now = time.perf_counter_ns()
        _access_log.info(
            "%s %s %s, %s, %.1f ms, %d bytes; model %s; %s",
            self.for_engine.method[:20],
            self.for_engine.path[:200],
            "client gone" if self.gone else self.status,
            "no answer"
            if self.first_byte_ns is None
            else f"first byte {(self.first_byte_ns - self.began_ns) / 1e6:.1f} ms",
            (now - self.began_ns) / 1e6,
            self.sent_bytes,
            None if self.model is None else self.model[:200],
            self.decision or self.failure or "no worker",
        )

    @property
    def is_trusted(self) -> bool:
        """True for any sender if there is no clients file; otherwise only for a gateway."""
        return self.caller.is_front or not self.caller.is_proven

    def trusted_header(self, name: bytes) -> str | None:
        """Like `header`, but returns None unless the sender is trusted."""
        return self.header(name) if self.is_trusted else None

    async def take_tokens(self, prompt: Prompt) -> None:
        """Count the request's prompts and its largest possible answers. Raises OverLimit."""
        if self.permit is not None:
            limits = prompt.output_limits
            output = prompt.output_tokens if limits is None else limits.largest(prompt.output_tokens)
            answers = 1 if self.text is None else self.text.all_choices
            await self.permit.take_tokens(self.prompt_tokens + output * answers)

    def count_usage(self, usage: Usage | None) -> None:
        """Count the usage that the engine reports, instead of the expected one."""
        if self.permit is not None and usage is not None:
            self.permit.correct(usage.prompt_tokens + usage.completion_tokens)

    def count_sent(self, parts: int) -> None:
        """Count the parts of the answer that were sent to the client, each at least one token."""
        if self.permit is not None:
            self.permit.note_sent(self.prompt_tokens + parts)

    def header(self, name: bytes) -> str | None:
        """A header's value, by its name in lower case; None if absent or empty."""
        for header, value in self.headers:
            if header == name and value:
                return value.decode("latin-1")
        return None


async def send_answer(send: Send, answer: WholeAnswer, added: RawHeaders = ()) -> None:
    """Send a whole answer with the `added` headers."""
    length = (b"content-length", str(len(answer.body)).encode())
    start: Message = {
        "type": "http.response.start",
        "status": answer.status,
        "headers": [*for_client(answer.headers), length, *added],
    }
    await send(start)
    await send({"type": "http.response.body", "body": answer.body})


async def send_error(
    send: Send,
    path: str,
    kind: ErrorKind,
    line: str,
    *,
    param: str | None = None,
    retry_after_s: int | None = 1,
    added: RawHeaders = (),
) -> None:
    """Send an error in the form of the path's API. `retry_after_s=None`: the same request will never succeed, so the SDKs of
    OpenAI and Anthropic must not send it again."""
    headers = [(b"content-type", b"application/json"), *added]
    if retry_after_s is None:
        headers.append((b"x-should-retry", b"false"))
    elif kind in (ErrorKind.BUSY, ErrorKind.UNAVAILABLE):
        headers.append((b"retry-after", str(retry_after_s).encode()))
    body = json.dumps(error_body(path, kind, line, param)).encode()
    await send_answer(send, WholeAnswer(kind.status, headers, body))


def error_body(path: str, kind: ErrorKind, line: str, param: str | None = None) -> Mapping[str, Any]:
    """The JSON body of an error in the form of the path's API, which is Anthropic's or OpenAI's."""
    status, code = kind.value
    return error_form(path, status, line, code=code, param=param)
