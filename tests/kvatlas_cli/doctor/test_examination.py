"""The whole examination: a healthy installation, an empty one, and unreachable servers."""

import json

import anyio
import pytest

from kvatlas.identity import pool_id
from kvatlas.predictions.store import read_stored_reports
from kvatlas_cli.doctor import Finding, Level, examine
from tests.eventually import until
from tests.kvatlas_cli.doctor.installation import MODEL, Installation, now_us, run_doctor
from tests.oncall.fleet import OF_A_SLOW_MACHINE
from tests.router.proxy.engines import running_proxy

pytestmark = pytest.mark.anyio

POOL = pool_id(MODEL, MODEL)

NOWHERE = "127.0.0.1:1"


async def test_a_healthy_installation_has_no_problems(installation: Installation) -> None:
    async with (
        installation.replicas("a", "b"),
        installation.worker("w1"),
        running_proxy(installation.valkey.url) as client,
    ):
        body = {"model": MODEL, "prompt": list(range(1_000, 1_041)), "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200

        async def are_reported() -> bool:
            return bool(await read_stored_reports(installation.store, POOL, now_us()))

        await until(are_reported, what="the router reported its counts")
        code, out = await run_doctor(installation, "--json")
        levels = {one["check"]: one["level"] for one in json.loads(out)}
        assert code == 0 and {check: level for check, level in levels.items() if level != "ok"} == {
            "store.memory": "info",
            "routers.proof": "info",
        }
        assert {"workers.heartbeats", "workers.index", "indexers.leases", "routers.answers", "clocks"} <= levels.keys()


async def test_nothing_is_wrong_while_indexers_and_workers_are_replaced(installation: Installation) -> None:
    wrong: list[Finding] = []
    rolled = 0

    async def look() -> None:
        nonlocal rolled
        found = await examine(installation.nats.url, installation.valkey.url, listen_s=1.2)
        others = OF_A_SLOW_MACHINE | {"workers.index"}
        wrong.extend(one for one in found if one.level in (Level.ERROR, Level.WARNING) and one.check not in others)
        wrong.extend(one for one in found if one.level is Level.ERROR and one.check == "workers.index")
        rolled += 1

    async with installation.replicas("a"), installation.worker("w1"):
        async with installation.replicas("b"), installation.worker("w2"):
            await look()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)  # b has given up its partitions, and w2 has drained
            async with installation.replicas("c"), installation.worker("w2"):
                tasks.start_soon(look)
                await until(lambda: rolled == 3, deadline_s=60, what="it looked while they were replaced")
    assert not wrong


async def test_an_empty_installation_is_an_error_with_advice(installation: Installation) -> None:
    code, out = await run_doctor(installation, "--listen-s", "0.05")
    assert code == 1 and "error    store.layout" in out and "-> start `kvatlas indexer` on it" in out
    assert out.startswith("error    serving             would a request be served well now? No, because ")
    assert out.endswith("4 errors, 0 warnings\n")


async def test_an_unreachable_server_is_an_error_and_the_other_is_still_examined(installation: Installation) -> None:
    found = await examine(f"nats://{NOWHERE}", installation.valkey.url, listen_s=0.05)
    assert [one.check for one in found if one.level is Level.ERROR] == [
        "serving",
        "store.functions",
        "store.layout",
        "nats.reachable",
    ]
    assert any(one.check == "store.policy" and one.level is Level.OK for one in found)
    found = await examine(installation.nats.url, f"redis://{NOWHERE}", listen_s=0.05)
    assert [one.check for one in found if one.level is Level.ERROR] == [
        "serving",
        "store.reachable",
        "nats.stream",
    ]


async def test_without_the_store_routers_that_run_go_on_by_load(installation: Installation) -> None:
    async with installation.replicas("a"), installation.worker("w1"):
        found = await examine(installation.nats.url, f"redis://{NOWHERE}", listen_s=3)
    assert found[0].level is Level.ERROR
    assert "? By load only, and only by routers that already run, because Redis at " in found[0].line
