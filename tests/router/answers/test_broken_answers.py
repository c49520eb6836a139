"""Answers whose engine goes away in the middle: clients of each protocol can see that the answer is not whole."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvatlas.store.connection import Store
from tests.lazy_module import LazyModule
from tests.router.answers.test_answer_errors import BODY, PART
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router.proxy.raw_engine import HEAD, chunk, raw_engine, read_cut
from tests.router.proxy.test_openai_client import openai_client
from tests.router.proxy.test_proxy import MESSAGES, PROMPT

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("path", "body"),
    [("/other", {}), ("/v1/audio/speech", {"input": "a"}), ("/generate", {"text": "a"})],
)
async def test_a_broken_answer_of_an_unknown_protocol_is_cut(
    store: Store, valkey_url: str, path: str, body: dict[str, Any]
) -> None:
    async with (
        raw_engine(HEAD + chunk(PART)) as rude,
        running_fleet(store, {}, {"w1": {"url": rude.url}}),
        running_proxy(valkey_url, allow_path="/other") as client,
    ):
        assert await read_cut(client, path, {"model": MODEL, **body}) == PART


async def test_a_broken_answer_that_is_compressed_is_cut(store: Store, valkey_url: str) -> None:
    head = HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: br\r\n\r\n")
    async with (
        raw_engine(head + chunk(b"\x1f\x8b")) as rude,
        running_fleet(store, {}, {"w1": {"url": rude.url}}),
        running_proxy(valkey_url) as client,
    ):
        assert await read_cut(client, "/v1/completions", {**BODY, "stream": True}) == b"\x1f\x8b"


MESSAGE_START = b'event: message_start\ndata: {"type": "message_start", "message": {"id": "m", "content": []}}\n\n'
DELTA = b'event: content_block_delta\ndata: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}\n\n'


async def test_a_broken_message_ends_with_the_error_event_of_its_protocol(store: Store, valkey_url: str) -> None:
    """Anthropic's client raises an error only for an event of that type, and takes any other end for a complete answer."""
    async with (
        raw_engine(HEAD + chunk(MESSAGE_START) + chunk(DELTA)) as rude,
        running_fleet(store, {}, {"w1": {"url": rude.url}}),
        running_proxy(valkey_url) as client,
    ):
        answer = await client.post("/v1/messages", json={"model": MODEL, "messages": MESSAGES, "stream": True})
        begin, field, data = answer.content.rpartition(b"event: error\ndata: ")
        assert begin == MESSAGE_START + DELTA and field
        said = json.loads(data)
        assert (said["type"], said["error"]["type"]) == ("error", "api_error") and "mid-answer" in said["error"][
            "message"
        ]


CREATED = (
    b'event: response.created\ndata: {"type": "response.created", "response": {"id": "r1"}, "sequence_number": 0}\n\n'
)
TEXT = b'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "a"}\n\n'
Ask = Callable[["openai.AsyncOpenAI"], Any]
CHAT: Any = MESSAGES
ASKS: dict[str, tuple[Ask, bytes]] = {
    "chat": (lambda client: client.chat.completions.create(model=MODEL, messages=CHAT, stream=True), chunk(PART)),
    "completions": (lambda client: client.completions.create(model=MODEL, prompt=PROMPT, stream=True), chunk(PART)),
    "responses": (
        lambda client: client.responses.create(model=MODEL, input="a", stream=True),
        chunk(CREATED) + chunk(TEXT),
    ),
}


@pytest.mark.parametrize("api", ASKS)
@pytest.mark.parametrize("in_event", [False, True])
async def test_openais_client_sees_that_an_answer_is_broken(
    store: Store, valkey_url: str, api: str, in_event: bool
) -> None:
    ask, parts = ASKS[api]
    half = chunk(b'data: {"choices": [{"ind') if in_event else b""
    async with (
        raw_engine(HEAD + parts + half) as rude,
        running_fleet(store, {}, {"w1": {"url": rude.url}}),
        running_proxy(valkey_url) as client,
        openai_client(client) as openais,
    ):
        stream, events = await ask(openais), 0

        async def read() -> None:
            nonlocal events
            async for _ in stream:
                events += 1

        with pytest.raises((openai.APIError, httpx.RemoteProtocolError), match="closed" if in_event else "mid-answer"):
            await read()
        assert events >= 1
