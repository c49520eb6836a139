"""Faults of NATS and of its stream."""

import random
import resource
import shutil
from contextlib import suppress
from dataclasses import replace

import msgpack
from anyio.to_thread import run_sync
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from kvatlas.bus.stream import StreamSettings, ensure_stream, stream_info
from kvatlas.bus.subjects import DEAD_STREAM, STREAM, alive_subject, events_subject
from kvatlas.embedded.server_process import LOG_FILE
from tests.chaos.fleet import PARTITIONS, Fleet, single_nats
from tests.chaos.scenario_run import ScenarioRun
from tests.eventually import until

FEW_BYTES = 8_192
FLOOD_BYTES = 32_768


async def nats_killed_and_restarted(run: ScenarioRun) -> None:
    await run.wait_for_answers(10)
    await run.fleet.nats_server.kill()
    run.record_fault("NATS SIGKILL")
    await run.wait_for_answers(10)
    await run.fleet.nats_server.start()
    run.mark_healed()


async def nats_restarted_without_its_data(run: ScenarioRun) -> None:
    server = run.fleet.nats_server
    await run.wait_for_answers(10)
    await server.kill()
    run.record_fault("NATS SIGKILL, data removed")
    await run_sync(shutil.rmtree, server.process.data_dir / "jetstream")
    await server.start()
    run.mark_healed()


async def moved_to_another_nats(run: ScenarioRun) -> None:
    """The fleet moves to an empty server with the same name, which knows nothing of the first. The index keeps answering."""
    fleet = run.fleet
    await run.wait_for_answers(10)
    server = await fleet.stack.enter_async_context(single_nats(fleet.folder / "other-nats"))
    incarnations = {one.worker_id: (await fleet.checker.status(one.worker_id)).incarnation for one in fleet.workers}
    await fleet.switch_nats(server)
    run.record_fault("NATS' address leads to another server, which is empty")
    told: set[str] = set()

    async def have_told_anew() -> bool:
        for worker_id, before in incarnations.items():
            assert await fleet.checker.resident_blocks(worker_id), f"the index has nothing of {worker_id}"
            try:
                if (await fleet.checker.status(worker_id)).incarnation != before:
                    told.add(worker_id)
            except (NatsError, TimeoutError):
                pass  # it is not connected yet
        return len(told) == len(incarnations)

    await until(have_told_anew, deadline_s=60, what="every publisher begins a new incarnation on the other NATS")


async def nats_disk_full(run: ScenarioRun) -> None:
    """NATS can't write to any file. Once there is space again, it is restarted, as operators would do."""
    server = run.fleet.nats_server
    await run.wait_for_answers(10)
    _, most = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, most))
    run.record_fault("NATS can't write its files")
    await run.wait_for_answers(60)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (most, most))
    await server.restart()
    run.mark_healed()


async def nats_with_memory_storage_restarted(run: ScenarioRun) -> None:
    fleet = run.fleet
    await fleet.nats_client.jetstream().delete_stream(STREAM)
    await ensure_stream(fleet.nats_client, StreamSettings(storage="memory"))
    run.record_fault("stream made again, in memory")
    await run.wait_for_answers(10)
    await fleet.nats_server.restart()
    run.record_fault("NATS restarted: its stream in memory is gone")


async def nats_away_longer_than_the_outbox_holds(run: ScenarioRun) -> None:
    worker = run.fleet.workers[0]
    await run.wait_for_answers(10)
    worker.nats.cut()
    run.record_fault("publisher cut from NATS until its outbox overflows")
    await run.wait_for_answers(150, [worker])
    worker.nats.heal()
    run.mark_healed()
    overflow = "(the outbox was full)"
    await until(lambda: overflow in worker.sidecar.log_text(), what="the outbox overflows")


async def publisher_half_open_to_nats(run: ScenarioRun) -> None:
    worker = run.fleet.workers[0]
    await run.wait_for_answers(5)
    worker.nats.stall()
    run.record_fault("publisher's connection to NATS half-open")
    await run.wait_for_answers(60, [worker])
    worker.nats.heal()
    run.mark_healed()


async def publisher_far_from_nats(run: ScenarioRun) -> None:
    worker = run.fleet.workers[0]
    worker.nats.delay_s = 0.05
    run.record_fault("publisher's connection to NATS takes 100 ms")
    await run.wait_for_answers(20, [worker])
    worker.nats.heal()
    run.mark_healed()


async def stream_purged(run: ScenarioRun) -> None:
    await run.wait_for_answers(10)
    for indexer in run.fleet.indexers:
        indexer.nats.cut()
    await run.wait_for_answers(5)
    await run.fleet.nats_client.jetstream().purge_stream(STREAM)
    run.record_fault("stream purged, with messages that no indexer had read")
    for indexer in run.fleet.indexers:
        indexer.nats.heal()
    run.mark_healed()


async def stream_emptied_by_its_limits(run: ScenarioRun) -> None:
    """It keeps only a few messages: unread ones are dropped, a few with each new message."""
    fleet = run.fleet
    jetstream = fleet.nats_client.jetstream()
    await run.wait_for_answers(10)
    config = (await jetstream.stream_info(STREAM)).config
    for indexer in fleet.indexers:
        indexer.nats.cut()
    await run.wait_for_answers(5)
    await jetstream.update_stream(replace(config, max_bytes=FEW_BYTES))
    run.record_fault(f"stream limited to {FEW_BYTES} bytes, with messages that no indexer had read")
    await run.wait_for_answers(20)
    for indexer in fleet.indexers:
        indexer.nats.heal()
    await run.wait_for_answers(5)
    await jetstream.update_stream(config)
    run.mark_healed()


async def indexer_too_slow_for_nats(run: ScenarioRun) -> None:
    """An indexer stands still while more arrives for it than the server buffers, so the server drops its connection."""
    fleet, indexer = run.fleet, run.fleet.indexers[0]
    await run.wait_for_answers(5)
    dropped = _slow_consumers(fleet)
    indexer.child.pause()
    run.record_fault("indexer SIGSTOP, flooded with invalid heartbeats")

    async def is_dropped() -> bool:
        for _ in range(100):
            await fleet.nats_client.publish(alive_subject("flood"), bytes(FLOOD_BYTES))
        await fleet.nats_client.flush()
        return _slow_consumers(fleet) > dropped

    await until(is_dropped, what="NATS drops the slow consumer")
    indexer.child.resume()
    run.mark_healed()
    await run.wait_for_answers(5)


def _slow_consumers(fleet: Fleet) -> int:
    """Number of slow consumers that the server has dropped, according to its log."""
    return (fleet.nats_server.process.data_dir / LOG_FILE).read_text(errors="replace").count("Slow Consumer")


async def stream_deleted(run: ScenarioRun) -> None:
    await run.wait_for_answers(10)
    await run.fleet.nats_client.jetstream().delete_stream(STREAM)
    run.record_fault("stream deleted")
    await run.wait_for_answers(5)


async def stream_recreated(run: ScenarioRun) -> None:
    jetstream = run.fleet.nats_client.jetstream()
    await run.wait_for_answers(10)
    config = (await jetstream.stream_info(STREAM)).config
    await jetstream.delete_stream(STREAM)
    await jetstream.add_stream(config)
    run.record_fault("stream deleted and made again")
    await run.wait_for_answers(5)


async def consumers_deleted(run: ScenarioRun) -> None:
    jetstream = run.fleet.nats_client.jetstream()
    await run.wait_for_answers(10)
    consumers = await jetstream.consumers_info(STREAM)
    assert consumers
    for consumer in consumers:
        with suppress(NotFoundError):  # meanwhile ended by its indexer or by its inactivity
            await jetstream.delete_consumer(STREAM, consumer.name)
        run.record_fault("consumer deleted")
    await run.wait_for_answers(10)


async def messages_delivered_twice_and_out_of_order(run: ScenarioRun) -> None:
    """Old messages arrive again, shuffled, as if from a zombie."""
    fleet = run.fleet
    await run.wait_for_answers(20)
    run.record_fault(await deliver_again(fleet.nats_client, 60, random.Random(1)))
    await run.wait_for_answers(10)


async def deliver_again(nats_client: Client, limit: int, rng: random.Random) -> str:
    """Publish the stream's last messages again, shuffled; returns the fault's text. Raises nats errors."""
    info, jetstream = await stream_info(nats_client), nats_client.jetstream(timeout=1)
    first = max(info.first_seq, info.last_seq - limit)
    again = [await jetstream.get_msg(STREAM, seq) for seq in range(first, info.last_seq)]
    rng.shuffle(again)
    for message in again:
        assert message.subject is not None and message.data is not None
        await jetstream.publish(message.subject, message.data)
    return f"{len(again)} messages published again, shuffled"


async def poison_in_the_stream(run: ScenarioRun) -> None:
    """Poison is kept in the dead-letter stream and blocks nothing."""
    fleet = run.fleet
    jetstream = fleet.nats_client.jetstream()
    await run.wait_for_answers(5)
    real = await jetstream.get_last_msg(STREAM, events_subject(fleet.workers[0].worker_id, PARTITIONS))
    assert real.data is not None
    poisons = (b"", b"garbage", b"\xc1" * 100, real.data[:-3], real.data + b"x", msgpack.packb([99, "w", 1, 2]))
    before = await _dead_letters(fleet)
    for worker in fleet.workers:
        for poison in poisons:
            await jetstream.publish(events_subject(worker.worker_id, PARTITIONS), poison)
            run.record_fault("message that can't be decoded")
    count = len(poisons) * len(fleet.workers)

    async def are_kept() -> bool:
        return await _dead_letters(fleet) >= before + count

    await until(are_kept, what=f"{count} dead letters are kept")
    await run.wait_for_answers(5)


async def _dead_letters(fleet: Fleet) -> int:
    try:
        return (await fleet.nats_client.jetstream().stream_info(DEAD_STREAM)).state.last_seq
    except NotFoundError:
        return 0


SCENARIOS = (
    messages_delivered_twice_and_out_of_order,
    poison_in_the_stream,
    nats_killed_and_restarted,
    nats_restarted_without_its_data,
    moved_to_another_nats,
    nats_disk_full,
    nats_with_memory_storage_restarted,
    nats_away_longer_than_the_outbox_holds,
    publisher_half_open_to_nats,
    publisher_far_from_nats,
    stream_purged,
    stream_emptied_by_its_limits,
    indexer_too_slow_for_nats,
    stream_deleted,
    stream_recreated,
    consumers_deleted,
)
