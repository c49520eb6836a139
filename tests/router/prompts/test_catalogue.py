"""The proxy's knowledge of the fleet while the store is slow or away."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvatlas.errors import Unreachable
from kvatlas.fleet.records import EngineKind, FleetRecord
from kvatlas_router.prompts.catalogue import FLEET_AGE_S, GONE_S, MOST_TENANTS, Catalogue
from kvatlas_router.tokens.text_request import Api, TextRequest
from tests.eventually import until
from tests.router.proxy.engines import MODEL, SCOPE, record
from tests.router.upstream.nearby_engines import engine_client

pytestmark = pytest.mark.anyio

RECORDS = {"w": record("w", "http://w:1")}
CHAT = TextRequest.of(Api.CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "x"}]})


class Fleet:
    """A fleet that is read only when the test allows it, and a clock."""

    def __init__(self) -> None:
        self.records: Mapping[str, FleetRecord] | None = RECORDS
        self.open = asyncio.Event()
        self.now_s = 0.0
        self.asked = 0

    async def read(self) -> Mapping[str, FleetRecord]:
        self.asked += 1
        await self.open.wait()
        if self.records is None:
            raise Unreachable("the store is away")
        return self.records


async def test_first_requests_wait_for_the_fleet_and_later_ones_do_not() -> None:
    fleet = Fleet()
    async with engine_client() as client, asyncio.TaskGroup() as tasks:
        catalogue = Catalogue(fleet.read, client, clock=lambda: fleet.now_s)
        first = [tasks.create_task(catalogue.scope_of(MODEL)) for _ in range(3)]
        await until(lambda: fleet.asked == 1, what="the fleet is read")
        fleet.open.set()
        assert [await each for each in first] == [SCOPE] * 3 and fleet.asked == 1
        fleet.now_s += 2 * FLEET_AGE_S
        fleet.open.clear()
        # the store hangs: no request waits for it, not even the one that finds the records too old
        assert [await catalogue.scope_of(MODEL) for _ in range(3)] == [SCOPE] * 3
        assert list(await catalogue.records()) == ["w"] and await catalogue.routable() == 1
        await until(lambda: fleet.asked == 2, what="the fleet is read again")
        fleet.open.set()


async def test_a_model_is_not_called_unknown_before_the_fleet_was_read() -> None:
    fleet = Fleet()
    fleet.open.set()
    async with engine_client() as client:
        catalogue = Catalogue(fleet.read, client, clock=lambda: fleet.now_s)
        fleet.records = None
        with pytest.raises(Unreachable):
            await catalogue.scope_of(MODEL)
        assert await catalogue.routable() == 0
        fleet.records = RECORDS
        assert await catalogue.scope_of(MODEL) == SCOPE
        fleet.records, fleet.now_s = None, fleet.now_s + 2 * FLEET_AGE_S
        assert await catalogue.scope_of(MODEL) == SCOPE


async def test_a_model_is_known_for_a_while_after_the_store_came_back_without_its_data() -> None:
    """This holds however long it was away, and even if other models are written first."""
    fleet = Fleet()
    fleet.open.set()
    one = record("o", "http://o:1")
    other = one.model_copy(update={"endpoint": one.endpoint.model_copy(update={"model_id": "other"})})
    async with engine_client() as client:
        catalogue = Catalogue(fleet.read, client, clock=lambda: fleet.now_s)
        assert await catalogue.scope_of(MODEL) == SCOPE
        without: list[Mapping[str, FleetRecord]] = [{}, {"o": other}]
        for records in without:
            fleet.records, fleet.now_s = records, fleet.now_s + 20
            assert await catalogue.scope_of("unknown") is None  # reads the fleet again
            assert await catalogue.scope_of(MODEL) == SCOPE


async def test_a_model_without_workers_keeps_its_name_for_an_hour() -> None:
    """Its requests find no worker, which is temporary; a model that does not exist is a permanent error."""
    fleet = Fleet()
    fleet.open.set()
    async with engine_client() as client:
        catalogue = Catalogue(fleet.read, client, clock=lambda: fleet.now_s)
        assert await catalogue.scope_of(MODEL) == SCOPE
        fleet.records = {}
        for number in range(2 * MOST_TENANTS):  # names that clients make up displace nothing
            assert await catalogue.scope_of(f"unknown {number}") is None
        for after_s, scope in ((20, SCOPE), (GONE_S - 30, SCOPE), (40, None)):
            fleet.now_s += after_s
            assert await catalogue.scope_of("unknown") is None  # reads the fleet again
            assert await catalogue.scope_of(MODEL) == scope
        assert await catalogue.card(MODEL) is None
        assert await catalogue.scope_of(MODEL, seen_by="acme") is None


async def test_a_pool_is_sglangs_only_if_all_of_its_engines_are() -> None:
    fleet = Fleet()
    fleet.open.set()
    one = record("s", "http://s:1")
    sglang = one.model_copy(update={"endpoint": one.endpoint.model_copy(update={"kind": EngineKind.SGLANG})})
    async with engine_client() as client:
        for records, kind in (({"s": sglang}, EngineKind.SGLANG), ({"s": sglang, **RECORDS}, EngineKind.VLLM)):
            fleet.records = records
            fleet.now_s += 2 * FLEET_AGE_S
            catalogue = Catalogue(fleet.read, client, clock=lambda: fleet.now_s)
            assert await catalogue.kind_of(SCOPE) is kind


def changed(worker_id: str, tenants: tuple[str, ...] = (), **endpoint: str) -> FleetRecord:
    one = record(worker_id, f"http://{worker_id}:1")
    return one.model_copy(update={"endpoint": one.endpoint.model_copy(update=endpoint), "tenants": tenants})


async def test_only_engines_of_a_requests_own_scope_are_asked_about_it() -> None:
    """Whatever other tenants' engines call their models, and even if another pool has a model of the same name."""
    others = changed("c", ("globex",), model_id="own")
    two_pools = {
        "a": changed("a", ("acme",), model_id="base"),
        "b": changed("b", ("acme", "globex"), model_id="base", tokenizer_id="another"),
        "c": others,
    }
    async with engine_client() as client:

        async def asks(tenant_id: str, model: str | None, records: Mapping[str, FleetRecord] = two_pools) -> list[str]:
            fleet = Fleet()
            fleet.records = records
            fleet.open.set()
            catalogue = Catalogue(fleet.read, client, clock=lambda: fleet.now_s)
            scope = await catalogue.scope_of(model, tenant_id, seen_by=tenant_id)
            assert scope is not None
            request = TextRequest.of(Api.COMPLETIONS, {"prompt": "a", **({} if model is None else {"model": model})})
            return list(await catalogue.engines_of(request.of_engines(EngineKind.VLLM, scope)))

        assert await asks("globex", "own") == ["http://c:1"]
        assert await asks("globex", "base") == ["http://b:1"]
        assert await asks("acme", "base") == ["http://b:1"]  # the pool of tokenizer "another", the first by name
        assert await asks("globex", None, {"a": changed("a", ("acme",)), "c": others}) == ["http://c:1"]


async def test_engines_and_names_are_found_again_when_the_records_change() -> None:
    fleet = Fleet()
    fleet.open.set()
    one = record("o", "http://o:1")
    other = one.model_copy(update={"endpoint": one.endpoint.model_copy(update={"model_id": "other"})})

    async def asks(*urls: str) -> bool:
        return list(await catalogue.engines_of(CHAT.of_engines(EngineKind.VLLM, SCOPE))) == list(urls)

    async with engine_client() as client:
        catalogue = Catalogue(fleet.read, client, clock=lambda: fleet.now_s)
        for tenant in range(2 * MOST_TENANTS):  # what is remembered for them is bounded
            scope = replace(SCOPE, tenant_id=f"t{tenant}")
            assert await catalogue.engines_of(CHAT.of_engines(EngineKind.VLLM, scope)) == ["http://w:1"]
        assert await asks("http://w:1") and await catalogue.scope_of("other") is None
        fleet.records = {**RECORDS, "v": record("v", "http://v:1"), "o": other}
        fleet.now_s += 2 * FLEET_AGE_S
        await until(lambda: asks("http://v:1", "http://w:1"), what="the new engine is asked too")
        assert await catalogue.scope_of("other") is not None
