"""Responses, files and batches stay on the engine that made them: requests for them go there, through any router."""

import json
from functools import partial
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvatlas.fleet.records import EngineState, FleetRecord
from kvatlas.fleet_store import fleet_store
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store
from kvatlas_router.engine_objects import object_holders
from kvatlas_router.engine_objects.object_holders import ObjectHolders, ObjectUnknown
from kvatlas_router.engine_objects.object_use import ObjectUse
from tests.eventually import until
from tests.router.answers.test_answer_errors import streams
from tests.router.answers.test_broken_answers import CREATED, TEXT
from tests.router.proxy.engines import MODEL, record, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import Answer, faulty_engine
from tests.router.proxy.test_proxy import decision, status

pytestmark = pytest.mark.anyio


def keeper(name: str) -> Answer:
    """An engine that keeps its responses and files under the names that clients give, if any, as vLLM and SGLang do. It
    answers with its own name."""
    made: list[str] = []

    async def answer(request: Request) -> Response:
        path, body = request.url.path, await request.body()
        asked = json.loads(body) if body[:1] == b"{" else {}
        if request.method == "POST" and not asked.get("stream"):
            previous = asked.get("previous_response_id") or asked.get("input_file_id")
            if previous is not None and previous not in made:
                return JSONResponse({"error": {"message": f"{previous} not found", "code": 404}}, 404)
            made.append(asked.get("request_id") or f"{path.rpartition('/')[2]}-{name}-{len(made)}")
            return JSONResponse({"id": made[-1], "object": "response", "engine": name})
        if request.method == "POST":
            made.append("r1")
            return await streams(CREATED, TEXT)(request)
        if path.split("/")[3] not in made:
            return JSONResponse({"error": {"message": "not found", "code": 404}}, 404)
        return JSONResponse({"id": path.split("/")[3], "engine": name})

    return answer


async def ask(client: httpx.AsyncClient, path: str = "/v1/responses", **body: Any) -> httpx.Response:
    return await client.post(path, json={"model": MODEL, "input": "Hi", **body})


async def test_a_response_goes_on_at_the_engine_that_has_it_through_any_router(store: Store, valkey_url: str) -> None:
    async with (
        faulty_engine(keeper("w1")) as first,
        faulty_engine(keeper("w2")) as second,
        running_fleet(store, {}, {"w1": {"url": first.url}, "w2": {"url": second.url}}),
        running_proxy(valkey_url) as client,
        running_proxy(valkey_url) as other,
    ):
        for _ in range(6):
            made = (await ask(client)).json()
            for router in (client, other):
                again = await ask(router, previous_response_id=made["id"])
                assert (again.status_code, again.json()["engine"]) == (200, made["engine"])
                read = await router.get(f"/v1/responses/{made['id']}")
                assert (read.status_code, read.json()["engine"]) == (200, made["engine"])
        assert (await status(client))["outliers"]["bad"] == 0


async def test_a_streamed_response_is_found_again(store: Store, valkey_url: str) -> None:
    async with (
        faulty_engine(keeper("w1")) as first,
        faulty_engine(keeper("w2")) as second,
        running_fleet(store, {}, {"w1": {"url": first.url}, "w2": {"url": second.url}}),
        running_proxy(valkey_url) as client,
    ):
        worker = decision(await ask(client, stream=True))[0]
        answer = await client.delete("/v1/respons%65s/%721")
        assert (answer.status_code, answer.json()["engine"], decision(answer)[0]) == (200, worker, worker)


async def test_a_batch_goes_where_its_file_is(store: Store, valkey_url: str) -> None:
    async with (
        faulty_engine(keeper("w1")) as first,
        faulty_engine(keeper("w2")) as second,
        running_fleet(store, {}, {"w1": {"url": first.url}, "w2": {"url": second.url}}),
        running_proxy(valkey_url) as client,
    ):
        for _ in range(4):
            files = {"file": ("a.jsonl", b"{}")}
            file = (await client.post("/v1/files", files=files, data={"purpose": "batch"})).json()
            answer = await client.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": "/v1/responses"})
            assert answer.json()["engine"] == file["engine"]
            assert (await client.get(f"/v1/files/{file['id']}/content")).json()["engine"] == file["engine"]


async def test_a_file_that_a_message_names_is_read_where_it_is(store: Store, valkey_url: str) -> None:
    async with (
        faulty_engine(keeper("w1")) as first,
        faulty_engine(keeper("w2")) as second,
        running_fleet(store, {}, {"w1": {"url": first.url}, "w2": {"url": second.url}}),
        running_proxy(valkey_url) as client,
    ):
        for number in range(4):
            file = (await client.post("/v1/files", files={"file": ("a.pdf", b"a")})).json()
            part = {"type": "document", "source": {"type": "file", "file_id": file["id"]}}
            message = {"role": "user", "content": [{"type": "text", "text": f"{number}"}, part]}
            answer = await ask(client, "/v1/messages", messages=[message])
            assert answer.json()["engine"] == file["engine"]
        answer = await ask(
            client, "/v1/chat/completions", messages=[{"content": [{"type": "file", "file": {"file_id": "f"}}]}]
        )
        assert answer.status_code == 404 and "f: no engine" in answer.json()["error"]["message"]


async def test_what_no_engine_is_known_to_have_is_refused_in_one_line(store: Store, valkey_url: str) -> None:
    async with (
        faulty_engine(keeper("w1")) as first,
        faulty_engine(keeper("w2")) as second,
        running_fleet(store, {}, {"w1": {"url": first.url}, "w2": {"url": second.url}}),
        running_proxy(valkey_url) as client,
    ):
        for answer in (await ask(client, previous_response_id="resp_x"), await client.get("/v1/files/resp_x")):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "not_found")
            assert "resp_x" in error["message"] and "\n" not in error["message"]
        listed = await client.get("/v1/files")
        assert listed.status_code == 400 and "2" in listed.json()["error"]["message"]
        await FleetStore(store).put_objects({"a": "w1", "b": "w2", "c": "w9"})
        assert (await ask(client, previous_response_id="a", conversation={"id": "b"})).status_code == 400
        other = record("w3", first.url)
        endpoint = other.endpoint.model_copy(update={"model_id": "other", "tokenizer_id": "other"})
        other = other.model_copy(update={"endpoint": endpoint})
        away = record("w4", first.url).model_copy(update={"state": EngineState.DOWN})
        await FleetStore(store).write({"w3": other, "w4": away})
        await FleetStore(store).put_objects({"d": "w3", "e": "w4"})

        async def is_refused_with(status: int, id: str, why: str) -> bool:
            answer = await ask(client, previous_response_id=id)
            return answer.status_code == status and why in answer.json()["error"]["message"]

        await until(partial(is_refused_with, 400, "d", "w3"), what="an object of another model's worker is refused")
        await until(partial(is_refused_with, 503, "e", "w4"), what="an object of a worker that is away is refused")
        gone = await ask(client, previous_response_id="c")
        assert gone.status_code == 404 and "w9" in gone.json()["error"]["message"]
        assert first.asked == second.asked == 0


async def test_an_engine_without_the_object_is_not_blamed_and_keeps_its_model(store: Store, valkey_url: str) -> None:
    async with (
        faulty_engine(keeper("w1")) as first,
        faulty_engine(keeper("w2")) as second,
        running_fleet(store, {}, {"w1": {"url": first.url}, "w2": {"url": second.url}}),
        running_proxy(valkey_url) as client,
    ):
        await FleetStore(store).put_objects({"resp_x": "w1"})
        for _ in range(4):
            assert (await ask(client, previous_response_id="resp_x")).status_code == 404
        assert (first.asked, second.asked) == (4, 0)
        counted = await status(client)
        assert counted["outliers"]["bad"] == 0 and not counted["ejected"]
        assert (await ask(client, previous_response_id=None)).status_code == 200


async def test_one_engine_alone_gets_everything(store: Store, valkey_url: str) -> None:
    async with (
        faulty_engine(keeper("w1")) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        running_proxy(valkey_url) as client,
    ):
        answer = await ask(client, previous_response_id="resp_x")
        assert answer.status_code == 404 and answer.json()["error"]["message"] == "resp_x not found"


async def test_the_oldest_objects_are_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_store, "MOST_OBJECTS", 10)
    fleet = FleetStore(store)
    for number in range(100):
        await fleet.put_objects({f"r{number}": "w1"})
        assert await fleet.find_object(f"r{number}") == "w1"
    kept = [number for number in range(100) if await fleet.find_object(f"r{number}") is not None]
    assert 10 <= len(kept) <= 22 and kept == list(range(100 - len(kept), 100))


@pytest.mark.parametrize("mine", ["a", None])
async def test_one_tenants_objects_make_routers_forget_no_other_ones(
    store: Store, monkeypatch: pytest.MonkeyPatch, mine: str | None
) -> None:
    """Nor does it find others' objects, whatever it calls its own."""
    monkeypatch.setattr(fleet_store, "MOST_OBJECTS", 40)
    monkeypatch.setattr(object_holders, "MOST_KNOWN", 40)
    fleet = FleetStore(store)

    async def records() -> dict[str, FleetRecord]:
        return {"w1": record("w1", "http://a"), "w2": record("w2", "http://b")}

    here, elsewhere = ObjectHolders(fleet, records), ObjectHolders(fleet, records)
    for number in range(15):
        await here.record([f"r{number}"], "w1", mine)
    await here.record([f"f{number}" for number in range(5_000)], "w2", "flood")
    for holders in (here, elsewhere):
        for number in range(15):
            found = await holders.find(ObjectUse((f"r{number}",)), None, mine)
            assert found is not None and found.endpoint.id == "w1"
            with pytest.raises(ObjectUnknown):
                await holders.find(ObjectUse((f"r{number}",)), None, "flood")
    with pytest.raises(ObjectUnknown):
        await elsewhere.find(ObjectUse(("f0",)), None, "flood")
    last = await elsewhere.find(ObjectUse(("f4999",)), None, "flood")
    assert last is not None and last.endpoint.id == "w2"


async def test_tenants_that_make_objects_have_equal_parts_of_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_store, "MOST_OBJECTS", 4_000)
    fleet = FleetStore(store)
    for tenant in ("a", "b", "c", "d"):
        await fleet.put_objects({"first": "w1"}, tenant)
    await fleet.put_objects({f"r{number}": "w1" for number in range(10_000)}, "a")
    newer, older = [await store.client.hlen(key) for key in fleet_store.object_keys("a")[:2]]
    assert newer <= 1_000 < newer + older <= 2_000 + fleet_store.OBJECTS_A_CALL
    await store.client.zadd(fleet_store.object_keys(None)[2], {"b": 1, "c": 1, "d": 1})  # silent for years
    await fleet.put_objects({f"r{number}": "w1" for number in range(4_000)}, "a")
    assert await store.client.zcard(fleet_store.object_keys(None)[2]) == 1
    assert sum([await store.client.hlen(key) for key in fleet_store.object_keys("a")[:2]]) > 4_000
