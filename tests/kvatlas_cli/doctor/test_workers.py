"""Faults of workers and their fleet records, and clocks that differ."""

import anyio
import pytest

from kvatlas.fleet.records import Diagnosis, EngineKind, EngineState, FleetRecord, Liveness
from kvatlas.index.redis.index import open_redis_index
from kvatlas_cli.doctor import Level
from kvatlas_cli.doctor.workers import judge_workers
from tests.kvatlas_cli.doctor.installation import MODEL, Installation, fleet_record, now_us
from tests.router_client.pools import worker

pytestmark = pytest.mark.anyio

STORE = worker("s", kind=EngineKind.STORE)


async def test_workers_without_a_heartbeat_or_a_fleet_record_are_found(installation: Installation) -> None:
    await open_redis_index(installation.store, writer=True)
    assert "no worker is known" in (await installation.problem("workers.heartbeats")).line
    await installation.write_records(
        fleet_record("silent"),
        fleet_record("lost", liveness=Liveness.LOST),
        fleet_record("gone", liveness=Liveness.LOST, state=EngineState.DRAINING),
    )
    async with anyio.create_task_group() as tasks:

        async def send_heartbeats() -> None:
            while True:
                await installation.send_heartbeat("lost")
                await installation.send_heartbeat("stranger")
                await anyio.sleep(0.05)

        tasks.start_soon(send_heartbeats)
        found = await installation.findings("workers.heartbeats", listen_s=0.3)
        tasks.cancel_scope.cancel()
    assert [one.level for one in found] == [Level.ERROR, Level.INFO, Level.ERROR, Level.ERROR]
    assert "no fleet record: stranger" in found[0].line
    assert found[1].line == "workers that drained and stopped: gone"
    assert "1 of 3 workers without a heartbeat in 0.3 s: silent" in found[2].line
    assert "count them as lost: lost" in found[3].line


async def test_what_publishers_diagnose_is_reported_with_its_cure(installation: Installation) -> None:
    await open_redis_index(installation.store, writer=True)
    topic = Diagnosis(name="feed", seen="the engine publishes under topic 'kv'", cure="set --topic 'kv'")
    async with anyio.create_task_group() as tasks:

        async def send_heartbeats() -> None:
            while True:
                await installation.send_heartbeat("w1", diagnoses=(topic,))
                await installation.send_heartbeat("w2", diagnoses=(topic,))
                await installation.send_heartbeat("w3")
                await anyio.sleep(0.05)

        tasks.start_soon(send_heartbeats)
        found = await installation.problem("workers.settings", listen_s=0.3)
        tasks.cancel_scope.cancel()
    assert (found.level, found.advice) == (Level.ERROR, "set --topic 'kv'")
    assert found.line == "w1, w2: the engine publishes under topic 'kv'"


async def test_workers_that_the_index_is_behind_and_skewed_clocks_are_found(installation: Installation) -> None:
    index = await open_redis_index(installation.store, writer=True)
    await installation.write_records(fleet_record("w"))
    async with anyio.create_task_group() as tasks:

        async def send_heartbeats() -> None:
            while True:
                await installation.send_heartbeat("w", acked_seq=7, sent_us=now_us() + 5_000_000)
                await anyio.sleep(0.05)

        tasks.start_soon(send_heartbeats)
        behind = await installation.problem("workers.index", listen_s=0.3)
        skewed = await installation.problem("clocks", listen_s=0.3)
        tasks.cancel_scope.cancel()
    assert behind.level is Level.ERROR and "behind these workers: w" in behind.line
    assert skewed.level is Level.WARNING and "worker w +5.0 s" in skewed.line
    assert await index.record("w") is None


async def test_incomplete_fleet_records_are_found(installation: Installation) -> None:
    await open_redis_index(installation.store, writer=True)
    await installation.write_records(
        fleet_record("down", state=EngineState.DOWN),
        fleet_record("asleep", state=EngineState.ASLEEP),
        fleet_record("loadless", load=None),
        fleet_record("stale", load_age_us=60_000_000),
        fleet_record("open", load_age_us=60_000_000, of_endpoint={"kind": EngineKind.OPEN}),
        fleet_record("nowhere", of_endpoint={"base_url": ""}),
        fleet_record("quiet", of_endpoint={"events": False}),
        fleet_record("uncut", of_endpoint={"events": False, "block_size": None}),
        fleet_record("new", of_endpoint={"block_size": None}),
        fleet_record("coarse", of_endpoint={"block_size": 64}),
        fleet_record("other", of_endpoint={"tokenizer_id": "other"}),
        fleet_record("ahead", heard_us=now_us() + 60_000_000),
    )
    engines = {one.level: one.line for one in await installation.findings("workers.engines")}
    assert engines[Level.ERROR] == "engines down: down" and engines[Level.INFO] == "engines asleep: asleep"
    loads = [one.line for one in await installation.findings("workers.load")]
    assert "without load: loadless" in loads[0] and "older than 5 s: open, stale" in loads[1]
    told = [one.advice.count("open event forms") for one in await installation.findings("workers.load")]
    assert told == [0, 1]
    assert "without an address: nowhere" in (await installation.problem("workers.address")).line
    assert (await installation.problem("workers.events")).line.endswith("predicted: quiet, uncut")
    sizes = {one.level: one.line for one in await installation.findings("workers.block_size")}
    assert sizes[Level.WARNING].endswith(": uncut") and sizes[Level.INFO].endswith(": new")
    assert "blocks of 4, 64 tokens" in (await installation.problem("pools.block_sizes")).line
    assert f"{MODEL} is served with 2 tokenizer ids" in (await installation.problem("pools.tokenizers")).line
    assert "an indexer +" in (await installation.problem("clocks")).line


async def test_a_pool_with_only_one_role_is_found(installation: Installation) -> None:
    await open_redis_index(installation.store, writer=True)
    await installation.write_records(fleet_record("w", of_endpoint={"role": "prefill"}))
    assert (await installation.problem("pools.roles")).level is Level.WARNING


@pytest.mark.parametrize(
    ("records", "level", "line"),
    [
        ([worker("w", stores=("s",)), STORE], Level.OK, "shared stores that workers read: s"),
        ([worker("w", stores=("s",))], Level.ERROR, "w: --shared-store is s, which is not published"),
        ([worker("w"), STORE], Level.ERROR, "shared store s is named by no worker"),
        (
            [worker("w", stores=("s",), block_size=32), STORE],
            Level.ERROR,
            "w: the model or block size differs from that of shared store s",
        ),
    ],
)
def test_stores_and_their_readers_are_compared(records: list[FleetRecord], level: Level, line: str) -> None:
    fleet = {record.endpoint.id: record for record in records}
    found = list(judge_workers(fleet, None, None, listened_s=0, now_us=0))
    assert [(one.level, one.line) for one in found if one.check == "workers.stores"] == [(level, line)]
    named = [one.line for one in found if one.check in ("workers.address", "workers.load")]
    assert all(" s;" not in line and not line.endswith(" s") for line in named)
