"""A client's request to the proxy, and how answers and errors are sent back to it (ASGI)."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Receive, Send

from router_client.proxy.headers import RawHeaders, for_client
from router_client.proxy.upstream import EngineRequest, WholeAnswer
from router_client.tokens.text_request import TextRequest


@dataclass(slots=True)
class ClientRequest:
    """A request, read to its end, and the way back to its client."""

    text: TextRequest
    for_engine: EngineRequest
    headers: RawHeaders
    receive: Receive
    send: Send
    began_ns: int = field(default_factory=time.perf_counter_ns)

    @property
    def id(self) -> str | None:
        return self._header(b"x-request-id")

    @property
    def session_id(self) -> str | None:
        return self._header(b"x-session-id")

    async def wait_until_gone(self) -> None:
        """Returns when the client disconnects."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def _header(self, name: bytes) -> str | None:
        return next((value.decode("latin-1") for header, value in self.headers if header == name and value), None)


async def send_answer(send: Send, answer: WholeAnswer, added: RawHeaders = ()) -> None:
    """A whole answer of an engine, with `added` headers."""
    length = (b"content-length", str(len(answer.body)).encode())
    start: Message = {
        "type": "http.response.start",
        "status": answer.status,
        "headers": [*for_client(answer.headers), length, *added],
    }
    await send(start)
    await send({"type": "http.response.body", "body": answer.body})


async def send_error(send: Send, status: int, kind: str, line: str, retry_after_s: int = 1) -> None:
    """An error in the words of OpenAI's API."""
    headers = [(b"content-type", b"application/json")]
    if status == 503:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    await send_answer(send, WholeAnswer(status, headers, json.dumps(error_body(status, kind, line)).encode()))


def error_body(status: int, kind: str, line: str) -> Mapping[str, Any]:
    """The JSON of such an error."""
    return {"error": {"message": line, "type": kind, "param": None, "code": status}}
