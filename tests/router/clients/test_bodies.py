"""Bodies in every form that clients send: routed as engines read them, or refused in one line; never passed on unread."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvatlas.errors import InvalidValue
from kvatlas.store.connection import Store
from kvatlas_router.proxy.engine_call import FORMS, INFERENCE, read_call
from kvatlas_router.tenancy.withheld_fields import FIELDS as TENANTS_FIELDS
from router_client.pricing.transfer_protocol import WITHHELD, WITHHELD_HEADERS
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import FaultyEngine, faulty_engine
from tests.router.tokens.small_model import save_simulators

pytestmark = pytest.mark.anyio

CHAT_PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hellö 😀"}]}
SECRET = "10.9.9.9"
RUNNER = asyncio.Runner()

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "model", "image_url"]), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = ("model", "messages", "prompt", "prompt_embeds", "stream", "stream_options", "max_tokens", "min_tokens", "n",
          "cache_salt", "prompt_cache_key", "tools", "echo", "logprobs", "prompt_logprobs", "return_logprob",
          "logprob_start_len", "skip_reading_prefix_cache", "vllm_xargs", "sampling_params", "kv_transfer_params")  # fmt: skip


def read(path: str, body: bytes, kind: str = "application/json", *, of_tenant: bool = False) -> Any:
    return RUNNER.run(read_call("POST", path, b"", kind, body, of_tenant=of_tenant))


async def answer_well(_: Request) -> Response:
    return JSONResponse({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}})


@asynccontextmanager
async def one_engine(
    store: Store, valkey_url: str, **changed: Any
) -> AsyncIterator[tuple[FaultyEngine, httpx.AsyncClient]]:
    async with running_fleet(store, {}) as fleet, faulty_engine(answer_well) as engine:
        await fleet.report("w1", engine.url)
        async with running_proxy(valkey_url, tokenizer="none", **changed) as client:
            yield engine, client


@given(st.dictionaries(st.sampled_from(FIELDS), values), st.sampled_from(sorted(INFERENCE - FORMS)))
@settings(max_examples=150)
def test_a_body_of_any_values_is_read_or_refused_in_one_line(body: Mapping[str, Any], path: str) -> None:
    line, text = "one", None
    try:
        text = read(path, json.dumps(body).encode()).text
    except InvalidValue as error:
        line = str(error)
    assert len(line.splitlines()) == 1
    if text is not None:
        _ = (text.model, text.session_id, text.output_limits, text.cache_salt, text.cache_reading, text.prompts)
        _ = (text.choices, text.wants_usage, text.streamed)


@given(
    body=st.dictionaries(st.text(max_size=5), values, max_size=3),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]),
    ascii_only=st.booleans(),
)
def test_every_encoding_of_json_reaches_engines_as_plain_utf_8(
    body: Mapping[str, Any], encoding: str, ascii_only: bool
) -> None:
    text = json.dumps({**body, "model": MODEL, "é": "x"}, ensure_ascii=ascii_only)
    call = read("/v1/embeddings", text.encode(encoding))
    assert call.model == MODEL
    assert json.dumps(json.loads(call.body.decode())) == json.dumps(json.loads(text))


@given(st.sampled_from(sorted(WITHHELD)), st.sampled_from(sorted(INFERENCE - FORMS)), st.integers(0, 3), st.booleans())
def test_what_is_withheld_is_withheld_on_every_path_in_every_place(
    name: str, path: str, place: int, escaped: bool
) -> None:
    field: dict[str, Any] = {name: {"do_remote_prefill": True, "remote_host": SECRET} if "params" in name else SECRET}
    inside = ({}, {"vllm_xargs": field}, {"sampling_params": {"extra_args": field}}, {"sampling_params": [field]})[
        place
    ]
    for prompt in (CHAT, *({"model": MODEL, word: "Hi"} for word in ("prompt", "input", "text")), {"token_ids": [1]}):
        raw = json.dumps({**prompt, **(inside or field)})
        raw = raw.replace(name, f"\\u{ord(name[0]):04x}{name[1:]}") if escaped else raw
        try:
            call = read(path, raw.encode())
            assert SECRET.encode() not in call.body and (call.text is None or SECRET not in json.dumps(call.text.body))
        except InvalidValue:
            assert path in ("/v1/completions", CHAT_PATH)


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-8-sig"])
def test_a_large_body_with_what_is_withheld_is_refused_on_every_path(
    monkeypatch: pytest.MonkeyPatch, encoding: str, escaped: bool
) -> None:
    """It is not decoded. In this test, small bodies count as large."""
    monkeypatch.setattr("kvatlas_router.tokens.text_request.MAX_PARSED_BYTES", 1_000)
    monkeypatch.setattr("kvatlas_router.tokens.text_request.MAX_PARSED_CONTAINERS", 100)
    for name, inside in product(WITHHELD, (False, True)):
        field = {"sampling_params": {"extra_args": {name: SECRET}}} if inside else {name: SECRET}
        raw = json.dumps({**CHAT, "prompt": "Hi", "padding": "x" * 1_000, **field})
        raw = raw.replace(name, f"\\u{ord(name[0]):04x}{name[1:]}") if escaped else raw
        for path in INFERENCE - FORMS:
            with pytest.raises(InvalidValue):
                read(path, raw.encode(encoding))


@given(st.sampled_from(sorted(TENANTS_FIELDS)), st.sampled_from(sorted(INFERENCE - FORMS)), st.booleans())
def test_what_a_tenant_may_not_say_is_withheld_on_every_path(name: str, path: str, escaped: bool) -> None:
    """Deeper inside, such as in a tool's schema, such a name has no meaning for us."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {name: {"type": "string"}}}}}]
    raw = json.dumps(
        {**CHAT, "prompt": "Hi", "input": "Hi", "text": "Hi", "token_ids": [1], "tools": tools, name: [SECRET]}
    )
    raw = raw.replace(f'"{name}": [', f'"\\u{ord(name[0]):04x}{name[1:]}": [') if escaped else raw
    call = read(path, raw.encode(), of_tenant=True)
    assert SECRET.encode() not in call.body and json.loads(call.body)["tools"] == tools
    assert call.text is None or name not in call.text.body
    assert SECRET.encode() in read(path, raw.encode()).body


def test_a_large_body_with_what_a_tenant_may_not_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas_router.tokens.text_request.MAX_PARSED_BYTES", 1_000)
    monkeypatch.setattr("kvatlas_router.tokens.text_request.MAX_PARSED_CONTAINERS", 100)
    for name in TENANTS_FIELDS:
        inside = json.dumps({**CHAT, "padding": "x" * 1_000, "tools": [{name: SECRET}]}).encode()
        assert read(CHAT_PATH, inside, of_tenant=True).body == inside
        raw = json.dumps({**CHAT, "padding": "x" * 1_000, name: SECRET}).encode()
        assert read(CHAT_PATH, raw).body == raw
        with pytest.raises(InvalidValue, match="remove it from large bodies"):
            read(CHAT_PATH, raw, of_tenant=True)


def test_the_last_of_two_equal_keys_counts_as_for_engines() -> None:
    call = read(CHAT_PATH, b'{"model":"a","messages":[{"role":"user","content":"x"}],"model":"b"}')
    assert call.model == "b" and call.text is not None and call.text.model == "b"
    twice = b'{"model":"b","kv_transfer_params":null,"kv_transfer_params":{"do_remote_prefill":true}}'
    assert json.loads(read("/v1/responses", twice).body) == {"model": "b", "kv_transfer_params": None}


def test_the_last_of_two_models_in_a_query_counts_as_for_engines() -> None:
    assert RUNNER.run(read_call("POST", "/v1/embeddings", b"model=a&model=b", "", b"")).model == "b"


def test_a_hint_of_the_cache_passes_and_the_rest_of_its_params_does_not() -> None:
    params = {"lmcache.tag": "a", "remote_host": SECRET}
    body = read("/v1/responses", json.dumps({"model": MODEL, "kv_transfer_params": params}).encode()).body
    assert json.loads(body)["kv_transfer_params"] == {"lmcache.tag": "a"}


FORM_HEAD = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'


@pytest.mark.parametrize(
    ("kind", "body", "why"),
    [
        ("application/json", json.dumps({"model": MODEL}).encode(), "expected multipart/form-data"),
        ("multipart/form-data", FORM_HEAD % (b"model", b"m"), "with a boundary"),
        ("multipart/form-data; boundary=b", FORM_HEAD % (b"model", b"m"), "field without an end"),
        ("multipart/form-data; boundary=b", b"x" + FORM_HEAD % (b"model", b"m") + b"--b--", "does not begin"),
        ("multipart/form-data; boundary=b", FORM_HEAD % (b"vllm_xargs", b"{}") + b"--b--", ""),
        ("multipart/form-data; boundary=b", FORM_HEAD % (b"bootstrap_host", b"x") + b"--b--", "clients must not send"),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nx\r\n--b--", "without a plain name"),
    ],
)
def test_a_form_that_can_be_read_in_two_ways_is_refused(kind: str, body: bytes, why: str) -> None:
    if not why:
        assert read("/v1/audio/transcriptions", body, kind).model is None
        return
    with pytest.raises(InvalidValue, match=why):
        read("/v1/audio/transcriptions", body, kind)


def test_the_last_model_of_a_form_counts_as_for_engines() -> None:
    body = FORM_HEAD % (b"model", b"a") + FORM_HEAD % (b"model", b"b") + b"--b--\r\n"
    assert read("/v1/audio/transcriptions", body, "Multipart/Form-Data; boundary=b").model == "b"


REFUSED: Mapping[str, tuple[Mapping[str, str], bytes]] = {
    "half a pair": ({}, b'{"model":"%s","cache_salt":"\\ud83d","messages":[{"role":"user","content":"x"}]}'),
    "half a pair in UTF-8": ({}, b'{"model":"%s","messages":[{"role":"user","content":"\xed\xa0\xbd"}]}'),
    "not UTF-8": ({}, b'{"model":"%s","messages":[{"role":"user","content":"\xff"}]}'),
    "deep": (
        {},
        b'{"model":"%s","messages":[{"role":"user","content":"x"}],"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ),
    "less deep": (
        {},
        b'{"model":"%s","messages":[{"role":"user","content":"x"}],"a":' + b"[" * 300 + b"]" * 300 + b"}",
    ),
    "no JSON": ({}, b'{"model":"%s",'),
    "a list": ({}, b'["%s"]'),
    "gzip": ({"content-encoding": "gzip"}, gzip.compress(json.dumps(CHAT).encode())),
    "deflate": ({"content-encoding": "deflate"}, zlib.compress(json.dumps(CHAT).encode())),
    "br": ({"content-encoding": "br"}, b"\x8b\x00\x80%s\x03"),
    "zstd": ({"content-encoding": "zstd"}, b"\x28\xb5\x2f\xfd%s"),
    "SGLang's own compression": ({"x-body-compressed": "zstd"}, b"\x28\xb5\x2f\xfd%s"),
    "compressed and not said": ({}, gzip.compress(json.dumps(CHAT).encode())),
}


@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/responses", "/v1/messages", "/generate"])
async def test_what_the_router_can_not_read_no_engine_gets(store: Store, valkey_url: str, path: str) -> None:
    async with one_engine(store, valkey_url) as (engine, client):
        for what, (headers, body) in REFUSED.items():
            sent = body.replace(b"%s", MODEL.encode())
            answer = await client.post(path, content=sent, headers={"content-type": "application/json", **headers})
            assert answer.status_code == 400, what
            assert answer.json()["error"]["type"] == "invalid_request_error" and answer.json()["error"]["message"]
        assert engine.asked == 0


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "Application/JSON",
        "application/json ; charset=UTF-8",
        "application/vnd.api+json",
        "APPLICATION/JSON;x",
    ],
)
async def test_a_content_type_in_any_spelling_reaches_engines_in_the_usual_one(
    store: Store, valkey_url: str, kind: str
) -> None:
    async with one_engine(store, valkey_url) as (engine, client):
        for encoding in ("utf-8", "utf-16"):
            sent = json.dumps(CHAT, ensure_ascii=False).encode(encoding)
            own = dict.fromkeys(WITHHELD_HEADERS - {"x-body-compressed"}, "7")
            answer = await client.post(CHAT_PATH, content=sent, headers={"content-type": kind, **own})
            assert answer.status_code == 200
            received = engine.requests[-1]
            assert received.headers["content-type"] == "application/json"
            assert json.loads(await received.body()) == CHAT
            assert not own.keys() & received.headers.keys()


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/completions", "prompt"), ("/generate", "input_ids"), ("/inference/v1/generate", "token_ids")],
)
async def test_a_wrong_token_id_is_refused_in_one_line_wherever_it_stands(
    store: Store, valkey_url: str, path: str, field: str
) -> None:
    async with one_engine(store, valkey_url) as (engine, client):
        for wrong in ("a", None, -1, 1 << 32, 1.5, [2]):
            for tokens in ([1, wrong], [[1, wrong]], [*range(5_000), wrong]):
                answer = await client.post(path, json={"model": MODEL, field: tokens})
                assert answer.status_code == 400, (tokens[-1:], answer.text)
                assert f"token id {wrong!r}" in answer.json()["error"]["message"]
        assert engine.asked == 0


@pytest.mark.parametrize("tokenizer", ["none", "engine", "folder"])
async def test_values_of_the_wrong_kind_never_break_the_router(
    store: Store, valkey_url: str, tokenizer: str, tmp_path: Path
) -> None:
    chosen = str(save_simulators(tmp_path)) if tokenizer == "folder" else tokenizer
    wrong: tuple[Any, ...] = (5, None, [], [5], {"a": 1}, 1e400, -1)
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url, tokenizer=chosen) as client:
        for value in wrong:
            bodies: list[dict[str, Any]] = [
                {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": value}]}]},
                {**CHAT, "messages": [{"role": value, "content": value}]},
                {**CHAT, "messages": value},
                {"model": MODEL, "prompt": value},
                {"model": MODEL, "prompt": [value, 1]},
                {"model": MODEL, "prompt": [1, value]},
                {**CHAT, "model": value},
                *({**CHAT, name: value} for name in FIELDS),
            ]
            async with anyio.create_task_group() as tasks:
                for body in bodies:
                    tasks.start_soon(is_answered, client, body)


async def is_answered(client: httpx.AsyncClient, body: Mapping[str, Any]) -> None:
    path = "/v1/completions" if "prompt" in body and "messages" not in body else CHAT_PATH
    for one in (path, "/kvatlas/route"):
        answer = await client.post(one, content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code < 500 or "have not ended" in answer.text, (one, body, answer.text)
