"""Routers' reports of answered requests, as `kvatlas record` writes and `kvatlas replay` reads them."""

import json
from base64 import b64encode
from pathlib import Path

import anyio
import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.errors import InvalidValue
from kvatlas.store.connection import Store
from kvatlas_simulator.lab.recorder import TraceRecorder
from kvatlas_simulator.lab.traces import read_trace
from router_client.request_feed import BLOCK_TOKENS, MOST_WAITING, RequestFeed
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy

pytestmark = pytest.mark.anyio

SHARED = list(range(1, 200))
PROMPTS = [[*SHARED, 7, 8], [*SHARED, 9], SHARED[:100]]


async def test_a_recorded_trace_has_each_request_and_what_they_share(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    recorder = TraceRecorder(tmp_path / "trace.jsonl.gz", 1 << 20)
    async with (
        running_fleet(store, {"w1": {}}),
        running_proxy(valkey_url, record=True) as client,
        client.stream("GET", "/kvatlas/requests") as told,
    ):
        lines = told.aiter_lines()
        with anyio.fail_after(60):
            assert await anext(lines) == ""
            for prompt in PROMPTS:
                ask = {"model": MODEL, "prompt": prompt, "max_tokens": 3}
                assert (await client.post("/v1/completions", json=ask)).status_code == 200
                line = (await anext(lines)).encode()
                assert str(prompt[0]) not in json.loads(line)
                recorder.add(line)
    recorder.close()
    workload = read_trace(tmp_path / "trace.jsonl.gz")
    assert workload.block_tokens == BLOCK_TOKENS
    first, second, third = (request.prompt_contents(BLOCK_TOKENS) for request in workload.requests)
    assert first == second and first[:1] == third and len(first) == 3
    assert [(one.input_tokens, one.output_tokens) for one in workload.requests] == [(201, 3), (200, 3), (100, 3)]


async def test_a_router_without_the_setting_tells_nothing(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url) as client:
        assert (await client.get("/kvatlas/requests")).status_code in (404, 405)


async def test_a_slow_follower_is_told_how_much_it_missed() -> None:
    feed = RequestFeed()
    assert not feed.followed
    lines = feed.follow()
    assert await anext(lines) == b"\n" and feed.followed
    for number in range(MOST_WAITING + 5):
        feed.publish({"n": number})
    assert await anext(lines) == b'{"n":0}\n'
    assert await anext(lines) == b'{"dropped":5}\n'
    feed.close()
    assert [line async for line in lines][-1] == b'{"n":%d}\n' % (MOST_WAITING - 1)
    assert not feed.followed
    assert [line async for line in feed.follow()] == []


def told(tokens: int, output: int = 1, **other: object) -> bytes:
    """A line from a router's feed."""
    hashes = extend_chain(list(range(tokens)), BLOCK_TOKENS)
    line = {"at_us": 1, "model": "m", "scope": "s", "input_length": tokens, "output_length": output}
    return json.dumps({**line, "block_tokens": BLOCK_TOKENS, "hashes": b64encode(hashes).decode(), **other}).encode()


def test_recordings_are_bounded_and_choose_models(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace.jsonl", 200, model="m")
    recorder.add(b"\n")
    recorder.add(told(64, model="other"))
    recorder.add(told(130, hashes=""))
    recorder.add(b'{"dropped":4}')
    assert (recorder.requests, recorder.unread, recorder.dropped, recorder.full) == (0, 1, 4, False)
    recorder.add(told(64))
    recorder.add(told(64, scope="t"))
    recorder.add(told(64))
    recorder.close()
    assert recorder.full and recorder.requests == 2
    assert len((tmp_path / "trace.jsonl").read_bytes()) <= 200


def test_tenants_share_nothing_in_a_recording(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace.jsonl", 1 << 20)
    for scope in ("s", "t", "s"):
        recorder.add(told(128, scope=scope))
    recorder.close()
    requests = read_trace(tmp_path / "trace.jsonl").requests
    contents = [(one.identity.tenant, one.prompt_contents(BLOCK_TOKENS)) for one in requests]
    assert contents == [("0", (0, 1)), ("1", (2, 3)), ("0", (0, 1))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{}", "at_us is missing"),
        (b"text", "the line is"),
        (told(64, input_length=0), "input_length is 0; expected at least 1"),
        (told(64, hashes="?"), "hashes is '[?]'; expected base64"),
        (told(64, ttft_ms=float("nan")), "ttft_ms is nan; expected a finite number"),
    ],
)
def test_anything_else_is_one_clear_error(tmp_path: Path, line: bytes, message: str) -> None:
    recorder = TraceRecorder(tmp_path / "trace.jsonl", 1 << 20)
    with pytest.raises(InvalidValue, match=message):
        recorder.add(line)
    recorder.close()
