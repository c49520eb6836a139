"""Indexers, workers and routers made wrong on purpose; and a whole installation that is well."""

import json
import sys

import anyio
import pytest

from kvatlas.fleet.records import EngineState, Liveness
from kvatlas.fleet.store import LEASES, FleetStore
from kvatlas.identity import pool_id
from kvatlas.index.redis.index import open_redis_index
from kvatlas.predictions.accuracy import AnswerCounts, AnswerReport
from kvatlas.predictions.store import answers_key, read_answer_reports, write_answer_report
from kvatlas.reservations.redis_calls import call_pool
from kvatlas.store.connection import open_store
from kvatlas_cli.doctor import Level
from tests.eventually import until
from tests.kvatlas_cli.conftest import child_environment
from tests.kvatlas_cli.doctor.installation import MODEL, Installation, now_us, record
from tests.router_client.proxy.engines import running_proxy

pytestmark = pytest.mark.anyio

POOL = pool_id(MODEL, MODEL)


async def command(system: Installation, *flags: str) -> tuple[int, str]:
    words = ["doctor", "--nats-url", system.nats.url, "--redis-url", system.valkey.url, *flags]
    done = await anyio.run_process(
        [sys.executable, "-m", "kvatlas_cli.main", *words], check=False, env=child_environment()
    )
    assert not done.stderr
    return done.returncode, done.stdout.decode()


async def test_an_installation_that_is_well(system: Installation) -> None:
    async with system.replicas("a", "b"), system.worker("w1"), running_proxy(system.valkey.url) as client:
        body = {"model": MODEL, "prompt": list(range(1_000, 1_041)), "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200

        async def are_told() -> bool:
            return bool(await read_answer_reports(system.store, POOL, now_us()))

        await until(are_told, what="the router told its counts")
        code, out = await command(system, "--json")
        levels = {one["check"]: one["level"] for one in json.loads(out)}
        assert code == 0 and {check: level for check, level in levels.items() if level != "ok"} == {
            "store.memory": "info"
        }
        assert {"workers.heartbeats", "workers.index", "indexers.leases", "routers.answers", "clocks"} <= levels.keys()


async def test_an_installation_without_anything_is_an_error_with_advice(system: Installation) -> None:
    code, out = await command(system, "--listen-s", "0.05")
    assert code == 1 and "error    store.layout" in out and "-> start `kvatlas indexer` on it" in out
    assert out.endswith("3 errors, 0 warnings\n")


async def test_nobody_indexes(system: Installation) -> None:
    await open_redis_index(system.store, writer=True)
    assert (await system.wrong("indexers.members")).level is Level.ERROR
    assert "64 of 64 partitions are nobody's" in (await system.wrong("indexers.leases")).line
    fleet = FleetStore(system.store)
    await fleet.claim_leases("ghost", 60_000, range(64))
    assert "ghost" in (await system.wrong("indexers.leases")).line
    await fleet.renew_membership("ghost", 60_000)
    assert (await system.wrong("indexers.members")).level is Level.INFO  # one alone
    await system.store.client.hdel(LEASES, "3", "5")
    assert "2 of 64 partitions are nobody's: 3, 5" in (await system.wrong("indexers.leases")).line


async def test_workers_that_are_not_heard_or_not_written_down(system: Installation) -> None:
    await open_redis_index(system.store, writer=True)
    assert "no worker is known" in (await system.wrong("workers.heartbeats")).line
    await system.writes(record("silent"), record("lost", liveness=Liveness.LOST))
    async with anyio.create_task_group() as tasks:

        async def beat() -> None:
            while True:
                await system.beats("lost")
                await system.beats("stranger")
                await anyio.sleep(0.05)

        tasks.start_soon(beat)
        lines = [one.line for one in await system.said("workers.heartbeats", listen_s=0.3)]
        tasks.cancel_scope.cancel()
    assert len(lines) == 3
    assert "written down by no indexer: stranger" in lines[0]
    assert "1 of 2 workers without a heartbeat in 0.3 s: silent" in lines[1]
    assert "lost to the indexers: lost" in lines[2]


async def test_workers_the_index_lags_behind(system: Installation) -> None:
    index = await open_redis_index(system.store, writer=True)
    await system.writes(record("w"))
    async with anyio.create_task_group() as tasks:

        async def beat() -> None:
            while True:
                await system.beats("w", acked_seq=7, sent_us=now_us() + 5_000_000)
                await anyio.sleep(0.05)

        tasks.start_soon(beat)
        behind = await system.wrong("workers.index", listen_s=0.3)
        skewed = await system.wrong("clocks", listen_s=0.3)
        tasks.cancel_scope.cancel()
    assert behind.level is Level.ERROR and "lacks what these told: w" in behind.line
    assert skewed.level is Level.WARNING and "worker w +5.0 s" in skewed.line
    assert await index.record("w") is None


async def test_what_fleet_records_lack(system: Installation) -> None:
    await open_redis_index(system.store, writer=True)
    await system.writes(
        record("down", state=EngineState.DOWN),
        record("asleep", state=EngineState.ASLEEP),
        record("loadless", load=None),
        record("stale", load_age_us=60_000_000),
        record("nowhere", of_endpoint={"base_url": ""}),
        record("quiet", of_endpoint={"events": False}),
        record("uncut", of_endpoint={"events": False, "block_size": None}),
        record("new", of_endpoint={"block_size": None}),
        record("coarse", of_endpoint={"block_size": 64}),
        record("other", of_endpoint={"tokenizer_id": "other"}),
        record("ahead", heard_us=now_us() + 60_000_000),
    )
    engines = {one.level: one.line for one in await system.said("workers.engines")}
    assert engines[Level.ERROR] == "engines down: down" and engines[Level.INFO] == "engines asleep: asleep"
    loads = [one.line for one in await system.said("workers.load")]
    assert "without load: loadless" in loads[0] and "older than 5 s: stale" in loads[1]
    assert "without an address: nowhere" in (await system.wrong("workers.address")).line
    assert (await system.wrong("workers.events")).line.endswith("predicted: quiet, uncut")
    sizes = {one.level: one.line for one in await system.said("workers.block_size")}
    assert sizes[Level.WARNING].endswith(": uncut") and sizes[Level.INFO].endswith(": new")
    assert "blocks of 4, 64 tokens" in (await system.wrong("pools.block_sizes")).line
    assert f"{MODEL} is served under 2 tokenizers" in (await system.wrong("pools.tokenizers")).line
    assert "an indexer +" in (await system.wrong("clocks")).line


async def test_a_pool_of_one_role(system: Installation) -> None:
    await open_redis_index(system.store, writer=True)
    await system.writes(record("w", of_endpoint={"role": "prefill"}))
    assert (await system.wrong("pools.roles")).level is Level.WARNING


async def test_what_routers_find_wrong_is_found_here_too(system: Installation) -> None:
    await open_redis_index(system.store, writer=True)
    await system.writes(record("w"))
    await write_answer_report(
        system.store, "good", POOL, AnswerReport(counts=AnswerCounts(prompts_equal=3, cached_equal=3))
    )
    wrong = AnswerReport(
        counts=AnswerCounts(prompts_equal=1, prompts_differ=2), example="12 tokens where it counted 10"
    )
    await write_answer_report(system.store, "bad", POOL, wrong)
    bad, good = await system.said("routers.answers")
    assert good.level is Level.OK and "router good" in good.line and "100.0%" in good.line
    assert bad.level is Level.WARNING and "2 of 3 prompts differ" in bad.line and "--tokenizer engine" in bad.advice


async def test_counts_of_routers_are_bounded_and_end_with_them(fresh_store: str) -> None:
    store = await open_store(fresh_store, wait=False)
    try:
        for number, keep_us in ((1, 40_000_000), (2, 20_000_000), (3, 60_000_000)):
            report = AnswerReport(counts=AnswerCounts(prompts_equal=number))
            args = [f"r{number}", keep_us, 2, report.pack()]
            await call_pool(store, "answered", POOL, args, keys=[answers_key(POOL)])
        told = await read_answer_reports(store, POOL, now_us())
        assert {router_id: one.counts.prompts_equal for router_id, one in told.items()} == {"r1": 1, "r3": 3}
        assert list(await read_answer_reports(store, POOL, now_us() + 50_000_000)) == ["r3"]
        args = ["r4", 1, 9, AnswerReport().pack()]
        await call_pool(store, "answered", POOL, args, keys=[answers_key(POOL)])

        async def are_over() -> bool:
            return not await store.client.exists(answers_key(POOL))

        await until(are_over, what="the counts ended with their routers")
    finally:
        await store.close()
