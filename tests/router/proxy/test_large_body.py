"""Large JSON bodies, of which only the model's name is read, in slices and with little memory; and what the proxy's server
refuses."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvatlas.errors import InvalidValue
from kvatlas.store.connection import Store
from kvatlas_router.proxy import large_body
from kvatlas_router.proxy.engine_call import read_call
from kvatlas_router.proxy.json_body import UnreadableBody
from kvatlas_router.proxy.large_body import find_model
from router_client.pricing.transfer_protocol import WITHHELD
from tests.http_client import http_client
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy

pytestmark = pytest.mark.anyio

MIB = 1 << 20
LONG = 9 * MIB
RUNNER = asyncio.Runner()
CHAT = ("POST", "/v1/chat/completions", b"", "application/json")

texts = st.text().filter(lambda text: text not in WITHHELD) | st.sampled_from(
    ["model", '"model":"x"', "\\", '\\"', "[{", "}]", ":,"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=50)
@given(
    body=st.dictionaries(texts, values, max_size=5),
    model=st.none() | values,
    ascii_only=st.booleans(),
    indent=st.none() | st.just(1),
    slice_bytes=st.sampled_from([1, 7, large_body.SLICE_BYTES]),
)
@example(body={"a": "\\" * 100}, model="m", ascii_only=True, indent=None, slice_bytes=7)
def test_the_model_is_found_as_a_json_decoder_finds_it(
    body: dict[str, Any], model: Any, ascii_only: bool, indent: int | None, slice_bytes: int
) -> None:
    raw = json.dumps({**body, "model": model}, ensure_ascii=ascii_only, indent=indent).encode(errors="surrogatepass")
    decoded = json.loads(raw)["model"]
    expected = decoded if isinstance(decoded, str) and decoded else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_body, "SLICE_BYTES", slice_bytes)
        assert RUNNER.run(find_model(raw)) == expected


async def test_the_last_of_two_models_counts_as_for_a_json_decoder() -> None:
    assert await find_model(b'{"model":"a","model":"b"}') == "b"
    assert await find_model(b'{"model":"a","mod\\u0065l":["b"]}') is None


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"1", b'{"model":"m"', b'{"model":"m', b'{"model":"m"} x', b'{"a":"b\\"}']
)
async def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidValue, match="the body is not a JSON object"):
        await find_model(body)


async def test_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_body, "MAX_STEPS", 1_000)
    with pytest.raises(InvalidValue, match="more than 1000 JSON values"):
        await find_model(b'{"a":[' + b"[]," * 1_000 + b"1]}")
    with pytest.raises(InvalidValue, match="more than 1000 quotes"):
        await find_model(b'{"a":"' + b'\\"' * 1_000 + b'"}')


@pytest.mark.parametrize("prompt", [b'"' + b"A" * (16 * MIB) + b'"', b"[" + b"123456," * (2 * MIB) + b"1]"])
async def test_others_are_served_while_a_large_body_is_read(prompt: bytes) -> None:
    body = b'{"messages":' + prompt + b',"model":"m"}'
    served = 0

    async def serve_others() -> None:
        nonlocal served
        while True:
            await asyncio.sleep(0)
            served += 1

    others = asyncio.create_task(serve_others())
    call = await read_call(*CHAT, body)
    others.cancel()
    assert (call.model, call.text) == ("m", None)
    assert served > 50


def test_a_body_of_57_mib_takes_little_more_than_itself() -> None:
    """It runs in a separate process, whose peak memory is measured."""
    code = """
import asyncio, resource
from kvatlas_router.proxy.engine_call import read_call
body = b'{"model":"m","messages":[' + b'123456,' * (57 * 1024 * 1024 // 7) + b'1]}'
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
assert asyncio.run(read_call("POST", "/v1/chat/completions", b"", "application/json", body)).model == "m"
print(peak() - before)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 57


async def test_a_form_of_many_parts_is_not_cut_into_them() -> None:
    kind = "multipart/form-data; boundary=a"
    field = b'--a\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    audio = field % (b"file", b"--a" * MIB)
    call = await read_call(
        "POST", "/v1/audio/transcriptions", b"", kind, field % (b"model", b"m") + audio + b"--a--\r\n"
    )
    assert call.model == "m"
    with pytest.raises(UnreadableBody, match="more than 1000 fields"):
        await read_call("POST", "/v1/audio/transcriptions", b"", kind, field % (b"x", b"") * MIB + b"--a--\r\n")


async def test_a_long_chat_goes_to_its_model_by_load(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}}) as fleet, running_proxy(valkey_url) as client:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "model": MODEL, "user": "A" * LONG}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert "untokenized=unread" in answer.headers["x-kvatlas-decision"]
        answer = await client.post("/v1/chat/completions", json={**body, "model": "other"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.post("/kvatlas/route", json=body)).status_code == 400
        assert len(fleet.urls) == 1


async def test_a_body_above_the_limit_is_an_error_in_openais_form(valkey_url: str, store: Store) -> None:
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url, http_body_bytes=100) as client:
        for path in ("/v1/chat/completions", "/kvatlas/route"):
            answer = await client.post(path, content=b"x" * 101)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
            assert "expected at most 100" in answer.json()["error"]["message"]


async def test_a_proxy_with_tokens_asks_for_one(valkey_url: str, store: Store, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("sesame\n")
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url, http_token_file=str(file)) as client:
        assert (await client.get("/readyz")).status_code == 200
        for path in ("/status", "/v1/models"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        async with http_client(base_url=client.base_url, headers={"authorization": "Bearer sesame"}) as knowing:
            assert (await knowing.get("/v1/models")).status_code == 200
