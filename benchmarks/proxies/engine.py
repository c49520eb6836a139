"""An engine without a model that answers at once: `python -m benchmarks.proxies.engine PORT...`.

It answers `/tokenize`, `/v1/models`, status paths and chats. A stream has `max_tokens` events, `seed` milliseconds apart.
"""

import asyncio
import sys
from typing import Any, cast

import httptools
import orjson
import uvloop

MODEL = "bench"
LETTERS_A_TOKEN = 4


class _Connection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        self._parser = httptools.HttpRequestParser(self)
        self._stream: asyncio.Task[None] | None = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream is not None:
            self._stream.cancel()

    def on_message_begin(self) -> None:
        self._url, self._body = b"", bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path = self._url.partition(b"?")[0]
        asked = orjson.loads(self._body) if self._body else {}
        if path.endswith(b"/tokenize"):
            count = len(self._body) // LETTERS_A_TOKEN
            self._answer(
                {"count": count, "max_model_len": 131_072, "tokens": [at * 31 % 100_000 for at in range(count)]}
            )
        elif path.endswith(b"/models"):
            self._answer({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 131_072}]})
        elif not path.endswith(b"/completions"):
            self._answer({"model_path": MODEL, "served_model_name": MODEL, "is_generation": True, "version": "0"})
        elif asked.get("stream"):
            self._stream = asyncio.create_task(self._send_stream(asked))
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}
            self._answer(
                {"id": "c", "object": "chat.completion", "model": MODEL, "choices": [choice], "usage": _usage(asked)}
            )

    def _answer(self, value: Any) -> None:
        body = orjson.dumps(value)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    async def _send_stream(self, asked: Any) -> None:
        kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(b"HTTP/1.1 200 OK\r\n" + kind)
        for number in range(_length(asked)):
            choice = {"index": 0, "delta": {"content": f" token{number}"}, "logprobs": None, "finish_reason": None}
            self._event({"id": "c", "object": "chat.completion.chunk", "model": MODEL, "choices": [choice]})
            await asyncio.sleep(asked.get("seed", 0) / 1_000)
        if (asked.get("stream_options") or {}).get("include_usage"):
            self._event({"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": _usage(asked)})
        self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _event(self, value: Any) -> None:
        data = b"data: %b\n\n" % orjson.dumps(value)
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _usage(asked: Any) -> Any:
    return {"prompt_tokens": 100, "completion_tokens": _length(asked), "total_tokens": 100 + _length(asked)}


def _length(asked: Any) -> int:
    """The answer's length in tokens. sglang-router sends `max_tokens` under its new name."""
    return int(asked.get("max_completion_tokens") or asked.get("max_tokens", 16))


async def _serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(_Connection, "127.0.0.1", port, backlog=4_096)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve([int(word) for word in sys.argv[1:]]))
