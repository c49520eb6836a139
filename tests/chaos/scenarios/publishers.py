"""Faults between an engine and its publisher, and of publishers themselves."""

from time import monotonic

import anyio

from kvatlas.index.redis.index import open_redis_index
from tests.chaos.chaos import Chaos
from tests.chaos.fleet import Worker
from tests.eventually import until


async def feed_cut_and_filled_from_replay(chaos: Chaos) -> None:
    worker = chaos.fleet.workers[0]
    await chaos.moved(10)
    worker.events.cut()
    chaos.fault("event socket cut")
    await chaos.moved(20, [worker])
    worker.events.heal()
    chaos.healed()
    await chaos.moved(10, [worker])


async def feed_cut_while_replay_is_silent(chaos: Chaos) -> None:
    """The gap can't be filled: the publisher starts over, empty."""
    worker = chaos.fleet.workers[0]
    chaos.under_reporting.add(worker.worker_id)
    await chaos.moved(10)
    worker.replay.stall()
    worker.events.cut()
    chaos.fault("event socket cut")
    chaos.fault("replay socket half-open")
    await chaos.moved(20, [worker])
    worker.events.heal()

    async def started_over() -> bool:
        status = (await chaos.fleet.checker.status(worker.worker_id)).status or {}
        return bool(status["counters"]["feed_started_over"])

    await until(started_over, deadline_s=30, what="the publisher starts over")
    worker.replay.heal()
    chaos.healed()


async def feed_gap_longer_than_the_replay_buffer(chaos: Chaos) -> None:
    """Replay answers, and no longer reaches back: what came before is given up."""
    worker = chaos.fleet.workers[0]
    chaos.under_reporting.add(worker.worker_id)
    usual = worker.engine.words
    worker.engine.words = [*usual, "--buffer-steps", "3"]
    await _restart_engine(worker)
    await chaos.moved(20, [worker])
    worker.events.cut()
    chaos.fault("event socket cut for longer than the engine's replay buffer")
    await chaos.moved(20, [worker])
    worker.events.heal()
    chaos.healed()
    await chaos.moved(10, [worker])
    worker.engine.words = usual
    await _restart_engine(worker)


async def engine_without_a_replay_socket(chaos: Chaos) -> None:
    """A gap means an empty beginning, and so does a feed that goes back."""
    worker = chaos.fleet.workers[0]
    chaos.under_reporting.add(worker.worker_id)
    await worker.sidecar.stop()
    usual = worker.sidecar.words
    at = usual.index("--replay-endpoint")
    worker.sidecar.words = usual[:at] + usual[at + 2 :]
    worker.sidecar.start()
    await worker.sidecar.ready()
    await chaos.moved(10, [worker])
    worker.events.cut()
    chaos.fault("event socket cut")
    await chaos.moved(10, [worker])
    worker.events.heal()
    await chaos.moved(10, [worker])
    await _restart_engine(worker)
    chaos.fault("engine SIGKILL, started again on its endpoint")
    await chaos.moved(10, [worker])
    await worker.sidecar.stop()
    worker.sidecar.words = usual
    worker.sidecar.start()
    await worker.sidecar.ready()
    chaos.healed()


async def _restart_engine(worker: Worker) -> None:
    worker.engine.kill()
    worker.engine.start()
    await worker.engine.ready()


async def engine_killed_and_restarted(chaos: Chaos) -> None:
    worker = chaos.fleet.workers[0]
    await chaos.moved(20)
    before = await _incarnation(chaos, worker)
    chaos.fault("engine SIGKILL, started again on its endpoint")
    await _restart_engine(worker)
    chaos.healed()
    began_s = monotonic()

    async def is_told_anew() -> bool:
        return await _incarnation(chaos, worker) > before

    await until(is_told_anew, deadline_s=20, what="the old life's blocks are gone")
    chaos.times_s["old blocks gone after the engine is back"] = monotonic() - began_s
    await chaos.moved(10)


async def _incarnation(chaos: Chaos, worker: Worker) -> int:
    """Of what the index answers with for the worker."""
    record = await (await open_redis_index(chaos.fleet.store, writer=False)).record(worker.worker_id)
    return record.incarnation if record is not None and record.answering and not record.loading else 0


async def engine_killed_and_idle_afterwards(chaos: Chaos) -> None:
    """No event tells of the new life: the old one's blocks go all the same."""
    worker = chaos.fleet.workers[0]
    await chaos.moved(20)
    await chaos.fleet.load.rest()
    chaos.fault("engine SIGKILL, started again on its endpoint, without a request")
    await _restart_engine(worker)
    chaos.healed()
    began_s = monotonic()

    async def is_empty() -> bool:
        return not await chaos.fleet.checker.resident_blocks(worker.worker_id)

    await until(is_empty, deadline_s=20, what="the old life's blocks are gone")
    chaos.times_s["old blocks gone after the engine is back"] = monotonic() - began_s


async def engine_that_announces_hits_again(chaos: Chaos) -> None:
    """Without a marker, so that counting copies would never end: with set semantics a block goes with its first copy."""
    worker = chaos.fleet.workers[0]
    chaos.under_reporting.add(worker.worker_id)
    usual_engine, usual_sidecar = worker.engine.words, worker.sidecar.words
    await worker.sidecar.stop()
    worker.engine.words = [*usual_engine, "--report-hits"]
    worker.sidecar.words = [*usual_sidecar, "--set-semantics"]
    await _restart_engine(worker)
    worker.sidecar.start()
    await worker.sidecar.ready()
    chaos.fault("engine announces found blocks again")
    await chaos.moved(100, [worker])
    await chaos.is_exact_now()
    assert await chaos.fleet.checker.resident_blocks(worker.worker_id)
    await worker.sidecar.stop()
    worker.engine.words, worker.sidecar.words = usual_engine, usual_sidecar
    await _restart_engine(worker)
    worker.sidecar.start()
    await worker.sidecar.ready()
    chaos.healed()


async def engine_restarted_while_the_sidecar_was_down(chaos: Chaos) -> None:
    """The new life is already ahead of the seq that the sidecar has saved."""
    worker = chaos.fleet.workers[0]
    await chaos.moved(5)
    await worker.sidecar.stop()
    chaos.fault("sidecar stopped")
    chaos.fault("engine SIGKILL, started again on its endpoint")
    await _restart_engine(worker)
    await chaos.moved(40, [worker])
    worker.sidecar.start()
    await worker.sidecar.ready()
    chaos.healed()


async def sidecar_killed_and_restarted(chaos: Chaos) -> None:
    """It goes on from an older saved state and replay; its worker's residency never vanishes."""
    worker = chaos.fleet.workers[0]
    await worker.sidecar.stop()  # which saves
    worker.sidecar.start()
    await worker.sidecar.ready()
    await chaos.moved(10)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(chaos.watch_never_empty, worker)
        worker.sidecar.kill()
        chaos.fault("sidecar SIGKILL")
        await chaos.moved(20, [worker])
        worker.sidecar.start()
        await worker.sidecar.ready()
        chaos.healed()
        await chaos.moved(10, [worker])
        tasks.cancel_scope.cancel()


async def _restart_with(chaos: Chaos, worker: Worker, content: bytes | None) -> None:
    await worker.sidecar.stop()
    if content is None:
        worker.state_file.unlink()
    else:
        worker.state_file.write_bytes(content)
    await chaos.moved(5, [worker])
    worker.sidecar.start()
    await worker.sidecar.ready()


async def saved_state_missing_torn_or_foreign(chaos: Chaos) -> None:
    first, second = chaos.fleet.workers[:2]
    await chaos.moved(10)
    chaos.fault(f"saved state of {first.worker_id} removed")
    await _restart_with(chaos, first, None)
    await second.sidecar.stop()
    saved = second.state_file.read_bytes()
    second.sidecar.start()
    await second.sidecar.ready()
    chaos.fault(f"saved state of {second.worker_id} torn in the middle")
    await _restart_with(chaos, second, saved[: len(saved) // 2])
    chaos.fault(f"{first.worker_id} given the saved state of {second.worker_id}")
    await _restart_with(chaos, first, saved)
    chaos.healed()


async def saved_state_of_another_engine_life(chaos: Chaos) -> None:
    worker = chaos.fleet.workers[0]
    await chaos.moved(10)
    await worker.sidecar.stop()
    old = worker.state_file.read_bytes()
    await _restart_engine(worker)
    worker.sidecar.start()
    await worker.sidecar.ready()
    chaos.fault("engine SIGKILL, started again on its endpoint")
    await chaos.moved(30, [worker])
    chaos.fault("saved state of the engine's former life put back")
    await _restart_with(chaos, worker, old)
    chaos.healed()


async def two_publishers_of_one_worker(chaos: Chaos) -> None:
    """The older one yields; when the newer one goes, the older one goes on."""
    worker = chaos.fleet.workers[0]
    await chaos.moved(10)
    second = worker.second_sidecar()
    try:
        second.start()
        chaos.fault("second publisher with the same worker id")
        await second.ready()
        await until(lambda: "yields" in worker.sidecar.said(), deadline_s=20, what="the older publisher yields")
        await chaos.moved(20, [worker])
        second.kill()
        chaos.fault("second publisher SIGKILL")
        chaos.healed()
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
