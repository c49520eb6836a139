"""The official OpenAI client, and every other call that engines serve, through the proxy."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from kvatlas.store.connection import Store
from tests.eventually import until
from tests.http_client import http_client
from tests.lazy_module import LazyModule
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import Answer, FaultyEngine, faulty_engine
from tests.router.proxy.test_proxy import MESSAGES, decision
from tests.router.proxy.test_proxy import status as proxy_status

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

pytestmark = pytest.mark.anyio

TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"who": "w1"}'}}
CHAT: Any = MESSAGES
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


@asynccontextmanager
async def openai_client(proxy: httpx.AsyncClient) -> AsyncIterator["openai.AsyncOpenAI"]:
    async with http_client() as http:
        yield openai.AsyncOpenAI(base_url=f"{proxy.base_url}/v1", api_key="key", http_client=http, max_retries=0)


async def serve_everything(request: Request) -> Response:
    """Answer like an engine with every API, repeating what was sent."""
    if request.url.path == "/v1/audio/transcriptions":
        form = await request.body()
        return JSONResponse({"text": f"{len(form)} bytes"})
    if request.url.path == "/v1/audio/speech":
        return Response(b"\x00\x01" * 9, media_type="audio/wav")
    if request.url.path == "/redirected":
        return RedirectResponse(request.url.replace(path="/other", query=""))
    body = json.loads(await request.body())
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
    if request.url.path == "/v1/chat/completions":
        tool_calls = [TOOL_CALL] if body.get("tools") else None
        message = {"role": "assistant", "content": json.dumps(body["messages"]), "tool_calls": tool_calls}
        choices = [{"index": i, "message": message, "finish_reason": "stop"} for i in range(body.get("n", 1))]
        return JSONResponse(
            {"id": "x", "object": "chat.completion", "created": 1, "model": MODEL, "choices": choices, "usage": usage}
        )
    if request.url.path == "/v1/completions":
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        choices = [{"index": i, "text": text, "finish_reason": "stop"} for i, text in enumerate(prompts)]
        return JSONResponse(
            {"id": "x", "object": "text_completion", "created": 1, "model": MODEL, "choices": choices, "usage": usage}
        )
    if request.url.path == "/v1/embeddings":
        data = [{"object": "embedding", "index": 0, "embedding": [0.5]}]
        return JSONResponse({"object": "list", "model": MODEL, "data": data, "usage": usage})
    return JSONResponse({"path": request.url.path, "method": request.method, "body": body})


@asynccontextmanager
async def one_engine(
    store: Store, valkey_url: str, **changed: Any
) -> AsyncIterator[tuple[FaultyEngine, httpx.AsyncClient]]:
    async with running_fleet(store, {}) as fleet, faulty_engine(serve_everything) as engine:
        await fleet.report("w1", engine.url)
        async with running_proxy(valkey_url, tokenizer="none", credentials_to=("*",), **changed) as client:
            yield engine, client


async def test_chats_and_streams_of_the_official_client(store: Store, valkey_url: str) -> None:
    async with (
        running_fleet(store, {"w1": {}, "w2": {}}),
        running_proxy(valkey_url) as proxy,
        openai_client(proxy) as client,
    ):
        whole = await client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3)
        assert whole.usage is not None and whole.usage.completion_tokens == 3
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
        events = [event async for event in stream]
        assert events[-1].usage is not None and events[-1].usage.completion_tokens == 4
        text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
        assert text
        responses = await client.responses.create(model=MODEL, input="a", max_output_tokens=4, stream=True)
        assert [event.type async for event in responses][-1] == "response.incomplete"
        models = await client.models.list()
        assert [model.id for model in models.data] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_tools_images_several_answers_and_embeddings_pass_unchanged(store: Store, valkey_url: str) -> None:
    async with one_engine(store, valkey_url) as (engine, proxy), openai_client(proxy) as client:
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, IMAGE]}]
        chat = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, n=2)
        message = chat.choices[0].message
        assert len(chat.choices) == 2 and json.loads(message.content or "") == messages
        assert message.tool_calls is not None and message.tool_calls[0].type == "function"
        assert message.tool_calls[0].function.name == "look_up"
        completion = await client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in completion.choices] == ["a", "b"]
        embedding = await client.embeddings.create(model=MODEL, input="a", encoding_format="float")
        assert embedding.data[0].embedding == [0.5]
        transcription = await client.audio.transcriptions.create(model=MODEL, file=("a.wav", b"RIFF" * 10))
        assert transcription.text.endswith("bytes")
        speech = await client.audio.speech.create(model=MODEL, voice="alloy", input="hi")
        assert speech.content == b"\x00\x01" * 9
        assert engine.requests[0].headers["authorization"] == "Bearer key"
        assert (await proxy_status(proxy))["proxy"]["answered"] == 5


async def test_inference_calls_of_every_engine_go_to_workers_of_their_model(store: Store, valkey_url: str) -> None:
    async with one_engine(store, valkey_url) as (_, client):
        for path in ("/v1/responses", "/v1/messages", "/v1/rerank", "/score", "/pooling", "/tokenize", "/generate"):
            answer = await client.post(f"{path}?a=b", json={"model": MODEL, "x": 1})
            assert answer.json() == {"path": path, "method": "POST", "body": {"model": MODEL, "x": 1}}
            worker, parameters = decision(answer)
            assert (worker, parameters["untokenized"], parameters["cached"]) == ("w1", "unread", "0")
        # the only model need not be named
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200


async def test_further_paths_can_be_allowed(store: Store, valkey_url: str) -> None:
    allowed = "/v1/new/thing,/v1/responses/*,/redirected"
    dotted = "/v1/responses/%2e%2e/%2e%2e/pause", "/v1/responses//x", "/v1/responses/%2e/x"
    async with one_engine(store, valkey_url, allow_path=allowed) as (_, client):
        answer = await client.post("/v1/new/thing", json={"model": MODEL, "x": 1})
        assert answer.json() == {"path": "/v1/new/thing", "method": "POST", "body": {"model": MODEL, "x": 1}}
        answer = await client.request("DELETE", f"/v1/responses/r1?model={MODEL}", json={})
        assert answer.json()["method"] == "DELETE"
        answer = await client.post(f"/redirected?model={MODEL}")
        assert (answer.status_code, answer.headers["location"]) == (307, "/other")
        for path in ("/v1/new/thing/else", *dotted):
            assert (await client.post(path, json={"model": MODEL})).status_code == 404, path


async def test_errors_are_those_of_the_official_client(store: Store, valkey_url: str) -> None:
    async with one_engine(store, valkey_url) as (engine, proxy), openai_client(proxy) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="other", prompt="a")
        assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model=MODEL, messages=[])
        assert wrong.value.type == "invalid_request_error" and "messages" in wrong.value.message

        async def busy(_: Request) -> Response:
            return JSONResponse({"error": {"message": "full", "type": "x", "code": None}}, 429)

        engine.answer = busy
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=MODEL, prompt="a")
        for method, path, code in (
            *(("POST", path, 404) for path in ("/reset_prefix_cache", "/v1/load_lora_adapter", "/pause", "/shutdown")),
            *(("GET", path, 404) for path in ("/nothing", "/is_paused", "/tokenizer_info")),
        ):
            answer = await proxy.request(method, path, json={"model": MODEL} if method == "POST" else None)
            assert (answer.status_code, answer.json()["error"]["code"]) == (code, "unknown_url")
            assert path in answer.json()["error"]["message"] and "--allow-path" in answer.json()["error"]["message"]
        assert engine.paths.keys() == {"/v1/completions"}


def endless(ended: anyio.Event, event: bytes) -> Answer:
    """An endless stream of the same event; `ended` is set when it is no longer read."""

    async def answer(_: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"data: " + event + b"\n\n"
                    await anyio.sleep(0.01)
            finally:
                ended.set()

        return StreamingResponse(events(), media_type="text/event-stream")

    return answer


async def test_a_cancelled_stream_ends_at_the_engine(store: Store, valkey_url: str) -> None:
    ended = anyio.Event()
    async with one_engine(store, valkey_url) as (engine, proxy), openai_client(proxy) as client:
        engine.answer = endless(ended, b'{"choices": [{"index": 0, "text": "a"}]}')
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(ended.is_set, what="the engine noticed")


CREATED = (
    b'event: response.created\ndata: {"type": "response.created", "sequence_number": 0, "response": {"id": "r1"}}\n\n'
)
PARTS = {
    "/v1/chat/completions": b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}\n\n',
    "/v1/completions": b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n',
    "/v1/responses": b'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "item_id": "m1",'
    b' "output_index": 0, "content_index": 0, "delta": "a", "sequence_number": 1, "logprobs": []}\n\n',
}
ENDS: dict[str, list[bytes | None]] = {
    "ends cleanly": [],
    "is lost": [None],
    "is lost in an event": [b'data: {"choi', None],
    "says an error": [
        b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}\n\n'
    ],
}


@pytest.mark.parametrize("end", ENDS)
async def test_no_unfinished_stream_is_a_whole_answer_for_the_official_client(
    store: Store, valkey_url: str, end: str
) -> None:
    async def answer(request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            path = request.url.path
            before: list[bytes | None] = [CREATED, PARTS[path]] if path == "/v1/responses" else [PARTS[path]]
            for part in before + ENDS[end]:
                if part is None:
                    raise ConnectionAbortedError("the engine is lost")
                yield part

        return StreamingResponse(events(), media_type="text/event-stream")

    async with one_engine(store, valkey_url) as (engine, proxy), openai_client(proxy) as client:
        engine.answer = answer
        for stream in (
            client.chat.completions.create(model=MODEL, messages=CHAT, stream=True),
            client.completions.create(model=MODEL, prompt="a", stream=True),
            client.responses.create(model=MODEL, input="a", stream=True),
        ):
            events = [await anext(streamed := aiter(await stream))]
            with pytest.raises((openai.APIError, httpx.RemoteProtocolError)):
                events += [event async for event in streamed]
        assert (await proxy_status(proxy))["proxy"]["broken"] == 3


async def test_web_pages_of_given_origins_may_ask(store: Store, valkey_url: str) -> None:
    asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    async with running_fleet(store, {"w1": {}}):
        async with running_proxy(valkey_url) as client:
            plain = await client.options("/v1/chat/completions", headers=asked)
            assert plain.status_code == 405 and "access-control-allow-origin" not in plain.headers
        async with running_proxy(valkey_url, cors_origins=("https://chat.example",)) as client:
            allowed = await client.options("/v1/chat/completions", headers=asked)
            assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
            assert (await client.get("/version")).json()["server"] == "kvatlas router"
