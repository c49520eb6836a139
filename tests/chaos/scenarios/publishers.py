"""Faults between an engine and its publisher, and of publishers themselves."""

from time import monotonic

import anyio

from kvatlas.index.redis.index import open_redis_index
from tests.chaos.fleet import Worker
from tests.chaos.scenario_run import ScenarioRun
from tests.eventually import until


async def feed_cut_and_filled_from_replay(run: ScenarioRun) -> None:
    worker = run.fleet.workers[0]
    await run.wait_for_answers(10)
    worker.events.cut()
    run.record_fault("event socket cut")
    await run.wait_for_answers(20, [worker])
    worker.events.heal()
    run.mark_healed()
    await run.wait_for_answers(10, [worker])


async def feed_cut_while_replay_is_silent(run: ScenarioRun) -> None:
    """The gap can't be filled: the publisher starts over, empty."""
    worker = run.fleet.workers[0]
    run.under_reporting.add(worker.worker_id)
    await run.wait_for_answers(10)
    worker.replay.stall()
    worker.events.cut()
    run.record_fault("event socket cut")
    run.record_fault("replay socket half-open")
    await run.wait_for_answers(20, [worker])
    worker.events.heal()

    async def started_over() -> bool:
        status = (await run.fleet.checker.status(worker.worker_id)).status or {}
        return bool(status["counters"]["feed_started_over"])

    await until(started_over, what="the publisher starts over")
    worker.replay.heal()
    run.mark_healed()


async def feed_gap_longer_than_the_replay_buffer(run: ScenarioRun) -> None:
    """Replay answers, but no longer reaches back far enough: earlier blocks are dropped."""
    worker = run.fleet.workers[0]
    run.under_reporting.add(worker.worker_id)
    usual = worker.engine.arguments
    worker.engine.arguments = [*usual, "--buffer-steps", "3"]
    await _restart_engine(worker)
    await run.wait_for_answers(20, [worker])
    worker.events.cut()
    run.record_fault("event socket cut for longer than the engine's replay buffer")
    await run.wait_for_answers(20, [worker])
    worker.events.heal()
    run.mark_healed()
    await run.wait_for_answers(10, [worker])
    worker.engine.arguments = usual
    await _restart_engine(worker)


async def engine_without_a_replay_socket(run: ScenarioRun) -> None:
    """After a gap, and after a feed that goes back, the publisher starts over, empty."""
    worker = run.fleet.workers[0]
    run.under_reporting.add(worker.worker_id)
    await worker.sidecar.stop()
    usual = worker.sidecar.arguments
    at = usual.index("--replay-endpoint")
    worker.sidecar.arguments = usual[:at] + usual[at + 2 :]
    worker.sidecar.start()
    await worker.sidecar.ready()
    await run.wait_for_answers(10, [worker])
    worker.events.cut()
    run.record_fault("event socket cut")
    await run.wait_for_answers(10, [worker])
    worker.events.heal()
    await run.wait_for_answers(10, [worker])
    await _restart_engine(worker)
    run.record_fault("engine SIGKILL, started again on its endpoint")
    await run.wait_for_answers(10, [worker])
    await worker.sidecar.stop()
    worker.sidecar.arguments = usual
    worker.sidecar.start()
    await worker.sidecar.ready()
    run.mark_healed()


async def _restart_engine(worker: Worker) -> None:
    worker.engine.kill()
    worker.engine.start()
    await worker.engine.ready()


async def engine_killed_and_restarted(run: ScenarioRun) -> None:
    worker = run.fleet.workers[0]
    await run.wait_for_answers(20)
    before = await _incarnation(run, worker)
    run.record_fault("engine SIGKILL, started again on its endpoint")
    await _restart_engine(worker)
    run.mark_healed()
    began_s = monotonic()

    async def is_replaced() -> bool:
        return await _incarnation(run, worker) > before

    await until(is_replaced, what="the old life's blocks are gone")
    run.times_s["old blocks gone after the engine is back"] = monotonic() - began_s
    await run.wait_for_answers(10)


async def _incarnation(run: ScenarioRun, worker: Worker) -> int:
    """The incarnation that the index answers with for this worker; 0 if none does."""
    record = await (await open_redis_index(run.fleet.store, writer=False)).record(worker.worker_id)
    return record.incarnation if record is not None and record.answering and not record.loading else 0


async def engine_killed_and_idle_afterwards(run: ScenarioRun) -> None:
    """The new process sends no event; the old one's blocks are dropped all the same."""
    worker = run.fleet.workers[0]
    await run.wait_for_answers(20)
    await run.fleet.load.pause()
    run.record_fault("engine SIGKILL, started again on its endpoint, without a request")
    await _restart_engine(worker)
    run.mark_healed()
    began_s = monotonic()

    async def is_empty() -> bool:
        return not await run.fleet.checker.resident_blocks(worker.worker_id)

    await until(is_empty, what="the old life's blocks are gone")
    run.times_s["old blocks gone after the engine is back"] = monotonic() - began_s


async def engine_that_announces_hits_again(run: ScenarioRun) -> None:
    """It announces them without a marker, so counted copies would never reach 0; with set semantics, a block is gone with its
    first removal."""
    worker = run.fleet.workers[0]
    run.under_reporting.add(worker.worker_id)
    usual_engine, usual_sidecar = worker.engine.arguments, worker.sidecar.arguments
    await worker.sidecar.stop()
    worker.engine.arguments = [*usual_engine, "--report-hits"]
    worker.sidecar.arguments = [*usual_sidecar, "--set-semantics"]
    await _restart_engine(worker)
    worker.sidecar.start()
    await worker.sidecar.ready()
    run.record_fault("engine announces found blocks again")
    await run.wait_for_answers(100, [worker])
    await run.wait_until_exact()
    assert await run.fleet.checker.resident_blocks(worker.worker_id)
    await worker.sidecar.stop()
    worker.engine.arguments, worker.sidecar.arguments = usual_engine, usual_sidecar
    await _restart_engine(worker)
    worker.sidecar.start()
    await worker.sidecar.ready()
    run.mark_healed()


async def engine_restarted_while_the_sidecar_was_down(run: ScenarioRun) -> None:
    """The new process is already ahead of the seq that the sidecar has saved."""
    worker = run.fleet.workers[0]
    await run.wait_for_answers(5)
    await worker.sidecar.stop()
    run.record_fault("sidecar stopped")
    run.record_fault("engine SIGKILL, started again on its endpoint")
    await _restart_engine(worker)
    await run.wait_for_answers(40, [worker])
    worker.sidecar.start()
    await worker.sidecar.ready()
    run.mark_healed()


async def sidecar_killed_and_restarted(run: ScenarioRun) -> None:
    """It continues from an older saved state and replay; its worker's blocks never vanish from the index."""
    worker = run.fleet.workers[0]
    await worker.sidecar.stop()  # which saves
    worker.sidecar.start()
    await worker.sidecar.ready()
    await run.wait_for_answers(10)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run.assert_never_empty, worker)
        worker.sidecar.kill()
        run.record_fault("sidecar SIGKILL")
        await run.wait_for_answers(20, [worker])
        worker.sidecar.start()
        await worker.sidecar.ready()
        run.mark_healed()
        await run.wait_for_answers(10, [worker])
        tasks.cancel_scope.cancel()


async def _restart_with(run: ScenarioRun, worker: Worker, content: bytes | None) -> None:
    await worker.sidecar.stop()
    if content is None:
        worker.state_file.unlink()
    else:
        worker.state_file.write_bytes(content)
    await run.wait_for_answers(5, [worker])
    worker.sidecar.start()
    await worker.sidecar.ready()


async def saved_state_missing_torn_or_foreign(run: ScenarioRun) -> None:
    first, second = run.fleet.workers[:2]
    await run.wait_for_answers(10)
    run.record_fault(f"saved state of {first.worker_id} removed")
    await _restart_with(run, first, None)
    await second.sidecar.stop()
    saved = second.state_file.read_bytes()
    second.sidecar.start()
    await second.sidecar.ready()
    run.record_fault(f"saved state of {second.worker_id} torn in the middle")
    await _restart_with(run, second, saved[: len(saved) // 2])
    run.record_fault(f"{first.worker_id} given the saved state of {second.worker_id}")
    await _restart_with(run, first, saved)
    run.mark_healed()


async def saved_state_of_another_engine_life(run: ScenarioRun) -> None:
    worker = run.fleet.workers[0]
    await run.wait_for_answers(10)
    await worker.sidecar.stop()
    old = worker.state_file.read_bytes()
    await _restart_engine(worker)
    worker.sidecar.start()
    await worker.sidecar.ready()
    run.record_fault("engine SIGKILL, started again on its endpoint")
    await run.wait_for_answers(30, [worker])
    run.record_fault("saved state of the engine's former life put back")
    await _restart_with(run, worker, old)
    run.mark_healed()


async def two_publishers_of_one_worker(run: ScenarioRun) -> None:
    """The older one yields; when the newer one is gone, the older one continues."""
    worker = run.fleet.workers[0]
    await run.wait_for_answers(10)
    second = worker.second_sidecar()
    try:
        second.start()
        run.record_fault("second publisher with the same worker id")
        await second.ready()
        await until(lambda: "yields" in worker.sidecar.log_text(), what="the older publisher yields")
        await run.wait_for_answers(20, [worker])
        second.kill()
        run.record_fault("second publisher SIGKILL")
        run.mark_healed()
    finally:
        second.close()


SCENARIOS = (
    feed_gap_longer_than_the_replay_buffer,
    engine_without_a_replay_socket,
    feed_cut_and_filled_from_replay,
    feed_cut_while_replay_is_silent,
    engine_killed_and_restarted,
    engine_killed_and_idle_afterwards,
    engine_that_announces_hits_again,
    engine_restarted_while_the_sidecar_was_down,
    sidecar_killed_and_restarted,
    saved_state_missing_torn_or_foreign,
    saved_state_of_another_engine_life,
    two_publishers_of_one_worker,
)
