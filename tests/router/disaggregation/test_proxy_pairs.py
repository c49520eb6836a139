"""Pairs through the proxy: simulated engines that hand KV over, and engines that answer in the real formats, or fail."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvatlas.fleet.records import EngineKind, FleetRecord, Role
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.reservations import Ask, RedisReservations
from kvatlas.store.connection import Store
from kvatlas_router.tokens.text_request import MAX_PARSED_BYTES
from tests.eventually import until
from tests.kvatlas.reservations.asks import offer
from tests.router.proxy.engines import MODEL, SCOPE, record, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import Answer, FaultyEngine, faulty_engine, status, well
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 900))
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
BUSY = {"queued_prefill_tokens": 200_000}
KV = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [7, 8, 9],
    "remote_engine_id": "7a2c",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
}
running_quiet_proxy = partial(running_proxy, tokenizer="none", learn=False, access_log=False)


def part(id: str, url: str, role: Role, kind: EngineKind = EngineKind.VLLM, **load: Any) -> FleetRecord:
    found = record(id, url, **load)
    changed = {"role": role, "kind": kind, "bootstrap_port": 9001 if kind is EngineKind.SGLANG else None}
    return found.model_copy(update={"endpoint": found.endpoint.model_copy(update=changed)})


class Pair:
    """Engines by worker id, written to the store with the roles that their names begin with."""

    def __init__(self, store: Store, kind: EngineKind) -> None:
        self.engines: dict[str, FaultyEngine] = {}
        self._store = store
        self._kind = kind

    async def write(self, urls: Mapping[str, str]) -> None:
        roles = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
        records = {
            id: part(id, url, roles[id[0]], self._kind, **(BUSY if id == "d" else {})) for id, url in urls.items()
        }
        await FleetStore(self._store).write(records)

    def bodies(self, id: str) -> list[dict[str, Any]]:
        return [json.loads(request._body) for request in self.engines[id].requests]

    async def nothing_is_booked(self) -> None:
        reservations = RedisReservations(self._store)

        async def is_free() -> bool:
            by_offer = (await reservations.evaluate(SCOPE.pool_id, Ask([offer(id) for id in self.engines]))).by_offer
            loads = [one.load for one in by_offer]  # a booking of PROMPT would add its tokens
            return all(
                load.running_decodes == 0 and load.queued_prefill_tokens in (0, *BUSY.values()) for load in loads
            )

        await until(is_free, what="both bookings ended")


@pytest.fixture
async def pair_of(store: Store) -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_fleet(store, {}))

        async def start(kind: EngineKind, **answers: Answer) -> Pair:
            pair = Pair(store, kind)
            for id, answer in answers.items():
                pair.engines[id] = await stack.enter_async_context(faulty_engine(answer))
            await pair.write({id: engine.url for id, engine in pair.engines.items()})
            return pair

        yield start


async def hand_over(request: Request) -> Response:
    """Answer like vLLM's prefill engine."""
    answer = json.loads(bytes((await well(request)).body))
    return JSONResponse({**answer, "kv_transfer_params": KV})


vllm = EngineKind.VLLM
sglang = EngineKind.SGLANG


@pytest.mark.parametrize("streamed", [False, True])
async def test_simulated_engines_share_a_request(store: Store, valkey_url: str, streamed: bool) -> None:
    engine = {"disaggregation": "vllm", "num_gpu_blocks": 512}
    async with running_fleet(store, {"p": engine, "d": engine}) as fleet, running_engine(**engine) as (_, other):
        await Pair(store, vllm).write(fleet.urls)
        alone = (await other.post("/v1/completions", json=BODY)).json()
        async with running_quiet_proxy(valkey_url) as client:
            answer = await client.post("/v1/completions", json={**BODY, "stream": streamed})
        assert answer.status_code == 200
        assert answer.headers["x-kvatlas-decision"].startswith('"d";cached=0;prefill="p"')
        if streamed:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            text = "".join(choice["text"] for event in events for choice in event["choices"])
        else:
            text = answer.json()["choices"][0]["text"]
        assert text == alone["choices"][0]["text"]
        page = (await fleet.clients["d"].get("/metrics")).text
        assert 'vllm:prompt_tokens_total{engine="0",model_name="mock-model"} 600.0' in page


async def test_vllms_request_forms(pair_of: Any, valkey_url: str) -> None:
    pair = await pair_of(vllm, p=hand_over, d=well)
    async with running_quiet_proxy(valkey_url) as client:
        asked = {"stream": True, "min_tokens": 3, "stream_options": {"include_usage": True}, "max_completion_tokens": 9}
        assert (await client.post("/v1/completions", json={**BODY, **asked})).text.endswith("data: [DONE]\n\n")
        ((first,), (second,)) = pair.bodies("p"), pair.bodies("d")
        assert (first["max_tokens"], first["max_completion_tokens"], first["stream"]) == (1, 1, False)
        assert "stream_options" not in first and "min_tokens" not in first
        assert first["kv_transfer_params"]["do_remote_decode"] and not first["kv_transfer_params"]["do_remote_prefill"]
        assert second == {**BODY, **asked, "kv_transfer_params": KV}
        await pair.nothing_is_booked()


async def test_a_prefill_engine_without_a_connector_costs_time_not_the_request(pair_of: Any, valkey_url: str) -> None:
    pair = await pair_of(vllm, p=well, d=well)
    async with running_quiet_proxy(valkey_url) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert pair.bodies("d") == [BODY]


async def break_off(_: Request) -> Response:
    raise ConnectionResetError("this engine dies here")


@pytest.mark.parametrize("fault", [status(500), status(400), break_off])
async def test_one_worker_serves_what_a_prefill_worker_fails(pair_of: Any, valkey_url: str, fault: Answer) -> None:
    pair = await pair_of(vllm, p=fault, d=well)
    async with running_quiet_proxy(valkey_url) as client:
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200 and "prefill=" not in answer.headers["x-kvatlas-decision"]
        assert "attempt=2" in answer.headers["x-kvatlas-decision"]
        assert pair.bodies("d") == [BODY] and pair.engines["p"].asked == 1
        await pair.nothing_is_booked()


async def test_a_refusal_of_what_the_client_did_not_send_is_not_its_answer(pair_of: Any, valkey_url: str) -> None:
    pair = await pair_of(vllm, p=status(400), d=well)
    async with running_quiet_proxy(valkey_url, max_attempts=1) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 503
        await pair.nothing_is_booked()


async def test_another_worker_serves_what_a_decode_worker_fails(pair_of: Any, valkey_url: str) -> None:
    pair = await pair_of(vllm, p=hand_over, d=status(500))
    async with running_quiet_proxy(valkey_url) as client:
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200 and answer.headers["x-kvatlas-decision"].startswith('"p"')
        assert pair.bodies("p")[1] == BODY
        await pair.nothing_is_booked()


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt_logprobs": 1}, {"prompt": PROMPT[:400]}])
async def test_vllm_computes_these_whole(pair_of: Any, valkey_url: str, fields: dict[str, Any]) -> None:
    pair = await pair_of(vllm, p=hand_over, d=well)
    async with running_quiet_proxy(valkey_url) as client:
        assert (await client.post("/v1/completions", json={**BODY, **fields})).status_code == 200
        assert pair.engines["p"].asked == 0 and pair.bodies("d") == [{**BODY, **fields}]


async def test_switched_off_no_request_goes_apart(pair_of: Any, valkey_url: str) -> None:
    pair = await pair_of(vllm, p=hand_over, d=well)
    async with running_quiet_proxy(valkey_url, disaggregate=False) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert pair.engines["p"].asked == 0


async def test_a_client_does_not_say_where_kv_is_read_from(pair_of: Any, valkey_url: str) -> None:
    pair = await pair_of(vllm, b=well)
    async with running_quiet_proxy(valkey_url) as client:
        own = {"kv_transfer_params": KV, "bootstrap_host": "169.254.0.1", "bootstrap_room": 5}
        assert (await client.post("/v1/completions", json={**BODY, **own})).status_code == 200
        assert pair.bodies("b") == [{**BODY, **dict.fromkeys(own)}]
        hint = {"kv_transfer_params": {"lmcache.tag": "a"}}
        assert (await client.post("/v1/completions", json={**BODY, **hint})).status_code == 200
        assert pair.bodies("b")[1] == {**BODY, **hint}
        # nor in calls whose prompt is not read, nor in bodies that are not
        for path, prompt in (("/v1/responses", {"input": "Hi"}), ("/v1/completions", {"prompt_embeds": "gAAA"})):
            asked = {"model": MODEL, **prompt}
            assert (await client.post(path, json={**asked, **own})).status_code == 200
            assert pair.bodies("b")[-1] == {**asked, **dict.fromkeys(own)}
        long = json.dumps({"model": MODEL, "prompt": "a" * MAX_PARSED_BYTES}).encode()
        sent = b'{"kv_transf\\u0065r_params": {"do_remote_prefill": true}, ' + long[1:]
        answer = await client.post("/v1/completions", content=sent)
        assert answer.status_code == 400 and "kv_transfer_params is in a body of" in answer.json()["error"]["message"]
        assert len(pair.bodies("b")) == 4


class Rooms:
    """SGLang engines: the decode engine answers once the prefill engine is in its room."""

    def __init__(self) -> None:
        self.came: set[int] = set()
        self.left = 0

    async def prefill(self, request: Request) -> Response:
        self.came.add(json.loads(await request.body())["bootstrap_room"])
        return await well(request)

    async def decode(self, request: Request) -> Response:
        room = json.loads(await request.body())["bootstrap_room"]
        try:
            with anyio.fail_after(20):
                while room not in self.came and not await request.is_disconnected():
                    await anyio.sleep(0.01)
        finally:
            self.left += room not in self.came
        return await well(request)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}])
async def test_sglangs_request_forms(pair_of: Any, valkey_url: str, fields: dict[str, Any]) -> None:
    rooms = Rooms()
    pair = await pair_of(sglang, p=rooms.prefill, d=rooms.decode)
    async with running_quiet_proxy(valkey_url) as client:
        for _ in range(2):
            answer = await client.post("/v1/completions", json={**BODY, **fields})
            assert answer.status_code == 200
            assert 'prefill="p"' in answer.headers["x-kvatlas-decision"]
        first, second = pair.bodies("p"), pair.bodies("d")
        for prefill, decode in zip(first, second, strict=True):
            meeting = {name: prefill[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")}
            assert meeting == {name: decode[name] for name in meeting}
            assert (meeting["bootstrap_host"], meeting["bootstrap_port"]) == ("127.0.0.1", 9001)
            assert {**BODY, **fields}.items() <= decode.items()
        assert first[0]["bootstrap_room"] != first[1]["bootstrap_room"]
        await pair.nothing_is_booked()


@pytest.mark.parametrize("fault", [status(500), break_off])
async def test_a_failed_prefill_frees_its_partner_and_another_pair_serves(
    pair_of: Any, valkey_url: str, fault: Answer
) -> None:
    rooms = Rooms()
    pair = await pair_of(sglang, p=fault, p2=rooms.prefill, d=rooms.decode)
    async with running_quiet_proxy(valkey_url) as client:
        with anyio.fail_after(60):  # the partner would wait longer
            answers = [await client.post("/v1/completions", json={**BODY, "prompt": [n, *PROMPT]}) for n in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 6
        assert all('prefill="p2"' in answer.headers["x-kvatlas-decision"] for answer in answers)
        assert pair.engines["p"].asked >= 1
        await until(lambda: rooms.left >= 1, what="the partner of the failed prefill was left alone no longer")
        await pair.nothing_is_booked()


async def test_a_failed_decode_worker_of_a_pair_is_left_out(pair_of: Any, valkey_url: str) -> None:
    rooms = Rooms()
    pair = await pair_of(sglang, p=rooms.prefill, d1=status(503), d2=rooms.decode)
    async with running_quiet_proxy(valkey_url) as client:
        answers = [await client.post("/v1/completions", json={**BODY, "prompt": [n, *PROMPT]}) for n in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 6
        assert all(answer.headers["x-kvatlas-decision"].startswith('"d2"') for answer in answers)
        await pair.nothing_is_booked()


async def test_a_client_that_goes_ends_both_requests(pair_of: Any, valkey_url: str) -> None:
    rooms = Rooms()
    never = anyio.Event()

    async def hang(_: Request) -> Response:
        await never.wait()
        return Response()

    pair = await pair_of(sglang, p=hang, d=rooms.decode)
    async with running_quiet_proxy(valkey_url) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json=BODY, timeout=1)
        await until(lambda: rooms.left == 1, what="the decode engine's request is cancelled")
        await pair.nothing_is_booked()
        never.set()
