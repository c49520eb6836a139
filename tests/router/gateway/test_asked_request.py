"""The requests that a picker passes on to engines, whatever a gateway lets through."""

import gzip
import json

import pytest

from kvatlas.errors import InvalidValue
from kvatlas_router.gateway.asked_request import AdministrationPath, AskedRequest
from kvatlas_router.gateway.extension_objects import PoolObjects
from kvatlas_router.gateway.picker import RequestHead
from kvatlas_router.gateway.sender import SenderTrust
from kvatlas_router.proxy.json_body import UnreadableBody

pytestmark = pytest.mark.anyio

HALF_A_PAIR = b'{"a": "\\ud800", "kv_transfer_params": {"remote_host": "10.9.9.9"}}'


async def read(path: str, body: bytes, kind: str = "application/json", *more: tuple[bytes, bytes]) -> AskedRequest:
    headers = [(b":method", b"POST"), (b":path", path.encode()), (b"content-type", kind.encode()), *more]
    return await AskedRequest.read(RequestHead(headers), body, PoolObjects(), SenderTrust())


@pytest.mark.parametrize(
    "path", ["/sleep", "/%73leep", "/v1/..%2fsleep", "/v1//sleep", "/v1/./sleep", "/pause?x=1", "/sleep/%2e%2e/sleep"]
)
async def test_administration_is_passed_on_in_no_spelling(path: str) -> None:
    with pytest.raises(AdministrationPath):
        await read(path, b"{}")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/%63ompletions", "/invocations", "/v1/completions/"])
@pytest.mark.parametrize("kind", ["application/json", "text/plain", ""])
async def test_json_that_can_not_be_read_is_passed_on_nowhere(path: str, kind: str) -> None:
    for body in (
        HALF_A_PAIR,
        b" \n" * 99 + HALF_A_PAIR,
        b"\xef\xbb\xbf" + HALF_A_PAIR,
        HALF_A_PAIR.decode().encode("utf-16"),
    ):
        with pytest.raises(InvalidValue):
            await read(path, body, kind)


async def test_what_is_withheld_is_withheld_on_a_path_in_any_spelling() -> None:
    body = json.dumps({"model": "m", "prompt": "a", "kv_transfer_params": {"remote_host": "10.9.9.9"}}).encode()
    asked = await read("/v1/%63ompletions", body, "text/plain")
    assert asked.call.text is not None and b"10.9.9.9" not in asked.call.body


async def test_what_is_no_json_passes_as_it_is_on_a_path_of_its_own() -> None:
    for body in (gzip.compress(b"a"), b"\x89PNG", b"a=b"):
        asked = await read("/upload", body, "application/octet-stream")
        assert asked.call.body == body and asked.changed is None


@pytest.mark.parametrize("path", ["/upload", "/v1/completions"])
@pytest.mark.parametrize(
    "header",
    [(b"content-encoding", b"gzip"), (b"x-body-compressed", b"zstd"), (b"content-type", b"application/json")],
    ids=lambda one: one[0].decode(),
)
async def test_a_body_that_engines_may_read_otherwise_is_passed_on_nowhere(
    path: str, header: tuple[bytes, bytes]
) -> None:
    with pytest.raises(UnreadableBody):
        await read(path, gzip.compress(b"{}"), "image/png", header)
