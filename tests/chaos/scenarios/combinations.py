"""Two faults, the second one while the first one still has effects."""

import shutil

import anyio
from anyio.to_thread import run_sync
from redis.exceptions import RedisError

from kvatlas.bus.control import ControlOp, ControlRequest
from kvatlas.bus.stream import StreamSettings, ensure_stream
from kvatlas.bus.subjects import STREAM, control_subject
from kvatlas.errors import KvatlasError
from kvatlas.fleet_store.fleet_store import LEASES
from kvatlas.index.redis.index import open_redis_index
from tests.chaos.fleet import Fleet, Indexer
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.scenarios.indexers import (
    AFTER_S,
    PATIENCE_S,
    assert_none_retired_for,
    restart_indexer,
    wait_until_taken_over,
)
from tests.chaos.scenarios.store import LITTLE_BYTES, free_memory, limit_memory
from tests.eventually import until

LOADING_S = 10.0
NEARLY_OVER_MS = 400


async def wait_for_snapshot(fleet: Fleet) -> None:
    """Wait up to LOADING_S until a snapshot is being loaded; small ones are loaded within one call."""
    with anyio.move_on_after(LOADING_S):
        while True:
            try:
                index = await open_redis_index(fleet.store, writer=False)
                records = [await index.record(worker.worker_id) for worker in fleet.workers]
            except (KvatlasError, RedisError):
                continue  # the store has no layout or functions now
            if any(record is not None and record.loading for record in records):
                return


async def resume_as_zombie(run: ScenarioRun, indexer: Indexer) -> None:
    """Resume a paused indexer after others have taken over and applied new messages."""
    await wait_until_taken_over(run.fleet, indexer)
    await run.wait_for_answers(10)
    indexer.child.resume()
    run.mark_healed()
    await run.wait_for_answers(5)


async def redis_out_of_memory_while_indexers_start_and_take_over(run: ScenarioRun) -> None:
    fleet, indexer = run.fleet, run.fleet.indexers[0]
    await run.wait_for_answers(5)
    indexer.child.kill()
    await limit_memory(fleet.store, LITTLE_BYTES)
    run.record_fault("indexer SIGKILL, Redis out of memory")
    await wait_until_taken_over(fleet, indexer)
    await run.wait_for_answers(5)
    await restart_indexer(run, indexer)
    await run.wait_for_answers(5)
    await free_memory(run)


async def redis_out_of_memory_in_a_snapshot(run: ScenarioRun) -> None:
    fleet = run.fleet
    await run.wait_for_answers(5)
    index = await open_redis_index(fleet.store, writer=False)
    for worker in fleet.workers:
        record = await index.record(worker.worker_id)
        request = ControlRequest(op=ControlOp.SNAPSHOT, above=record.incarnation if record is not None else 0)
        await fleet.nats_client.publish(control_subject(worker.worker_id), request.pack())
    await wait_for_snapshot(fleet)
    await limit_memory(fleet.store, LITTLE_BYTES)
    run.record_fault("Redis out of memory in a snapshot")
    await run.wait_for_answers(10)
    await free_memory(run)


async def redis_out_of_memory_and_its_functions_flushed(run: ScenarioRun) -> None:
    """Until there is memory, nothing can be called and no function loaded."""
    fleet = run.fleet
    await run.wait_for_answers(5)
    await limit_memory(fleet.store, LITTLE_BYTES)
    await fleet.store.client.function_flush()
    run.record_fault("Redis out of memory, FUNCTION FLUSH")
    await run.wait_for_answers(40)
    await free_memory(run)


async def redis_functions_flushed_in_a_snapshot(run: ScenarioRun) -> None:
    fleet = run.fleet
    await run.wait_for_answers(5)
    await fleet.store.client.flushall()
    await wait_for_snapshot(fleet)
    await fleet.store.client.function_flush()
    run.record_fault("FLUSHALL, and FUNCTION FLUSH in the snapshots that follow")


async def wait_until_leases_nearly_expired(fleet: Fleet, indexer: Indexer) -> None:
    client = fleet.store.client

    async def are_nearly_over() -> bool:
        now_s, us = await client.time()
        leases = [lease.split() for lease in await client.hvals(LEASES)]
        ends_ms = [int(ends) for ends, owner in leases if owner == indexer.child.name.encode()]
        left_ms: int = max(ends_ms) - 1_000 * now_s - us // 1_000
        return left_ms < NEARLY_OVER_MS

    await until(are_nearly_over, what=f"the leases of {indexer.child.name} are nearly over")


async def redis_flushed_in_a_takeover(run: ScenarioRun) -> None:
    fleet, indexer = run.fleet, run.fleet.indexers[0]
    await run.wait_for_answers(5)
    indexer.child.kill()
    await wait_until_leases_nearly_expired(fleet, indexer)
    await fleet.store.client.flushall()
    run.record_fault("indexer SIGKILL, FLUSHALL just before its leases end")
    await wait_until_taken_over(fleet, indexer)
    indexer.child.start()
    await indexer.child.ready()
    run.mark_healed()


async def worker_restarted_while_its_indexer_is_paused(run: ScenarioRun) -> None:
    """The zombie resumes with calls from before the engine's restart."""
    indexer, worker = run.fleet.indexers[0], run.fleet.workers[-1]
    await run.wait_for_answers(5)
    indexer.child.pause()
    worker.engine.kill()
    worker.sidecar.kill()
    worker.engine.start()
    await worker.engine.ready()
    worker.sidecar.start()
    await worker.sidecar.ready()
    run.record_fault("indexer SIGSTOP; engine and sidecar SIGKILL, started again")
    await resume_as_zombie(run, indexer)


async def nats_with_memory_storage_restarted_while_an_indexer_is_paused(run: ScenarioRun) -> None:
    fleet, indexer = run.fleet, run.fleet.indexers[0]
    await fleet.nats_client.jetstream().delete_stream(STREAM)
    await ensure_stream(fleet.nats_client, StreamSettings(storage="memory"))
    await run.wait_for_answers(10)
    indexer.child.pause()
    await fleet.nats_server.restart()
    run.record_fault("indexer SIGSTOP; NATS restarted: its stream in memory is gone")
    await resume_as_zombie(run, indexer)


async def every_indexer_cut_from_nats_for_longer_than_its_patience(run: ScenarioRun) -> None:
    fleet = run.fleet
    await run.wait_for_answers(5)
    for indexer in fleet.indexers:
        indexer.nats.cut()
        run.record_fault("indexer cut from NATS")
    await assert_none_retired_for(run, PATIENCE_S)
    for indexer in fleet.indexers:
        indexer.nats.heal()
    run.mark_healed()
    await assert_none_retired_for(run, AFTER_S)


async def everything_wiped(run: ScenarioRun) -> None:
    """Both servers lose all their data, and every indexer is replaced: only the publishers know what the engines hold."""
    fleet = run.fleet
    await run.wait_for_answers(10)
    for server, data in ((fleet.nats_server, "jetstream"), (fleet.valkey, "appendonlydir")):
        await server.kill()
        await run_sync(shutil.rmtree, server.process.data_dir / data)
    for indexer in fleet.indexers:
        indexer.child.kill()
    run.record_fault("NATS and Redis SIGKILL, data removed; every indexer SIGKILL")
    await fleet.nats_server.start()
    await fleet.valkey.start()
    for indexer in fleet.indexers:
        indexer.child.start()
    run.mark_healed()
    for indexer in fleet.indexers:
        await indexer.child.ready()


SCENARIOS = (
    redis_out_of_memory_while_indexers_start_and_take_over,
    redis_out_of_memory_in_a_snapshot,
    redis_out_of_memory_and_its_functions_flushed,
    redis_functions_flushed_in_a_snapshot,
    redis_flushed_in_a_takeover,
    worker_restarted_while_its_indexer_is_paused,
    nats_with_memory_storage_restarted_while_an_indexer_is_paused,
    every_indexer_cut_from_nats_for_longer_than_its_patience,
    everything_wiped,
)
