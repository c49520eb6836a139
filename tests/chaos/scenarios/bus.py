"""Faults of NATS and of its stream."""

import random
import shutil
from dataclasses import replace

import msgpack
from anyio.to_thread import run_sync
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from kvatlas.bus.stream import StreamSettings, ensure_stream, stream_info
from kvatlas.bus.subjects import DEAD_STREAM, STREAM, alive_subject, events_subject
from kvatlas.embedded.server_process import LOG_FILE
from tests.chaos.chaos import Chaos
from tests.chaos.fleet import PARTITIONS, Fleet
from tests.eventually import until

FEW_BYTES = 8_192
FLOOD_BYTES = 32_768


async def nats_killed_and_restarted(chaos: Chaos) -> None:
    await chaos.moved(10)
    await chaos.fleet.nats_server.kill()
    chaos.fault("NATS SIGKILL")
    await chaos.moved(10)
    await chaos.fleet.nats_server.start()
    chaos.healed()


async def nats_restarted_without_its_data(chaos: Chaos) -> None:
    server = chaos.fleet.nats_server
    await chaos.moved(10)
    await server.kill()
    chaos.fault("NATS SIGKILL, data removed")
    await run_sync(shutil.rmtree, server.process.data_dir / "jetstream")
    await server.start()
    chaos.healed()


async def nats_with_memory_storage_restarted(chaos: Chaos) -> None:
    fleet = chaos.fleet
    await fleet.nats.jetstream().delete_stream(STREAM)
    await ensure_stream(fleet.nats, StreamSettings(storage="memory"))
    chaos.fault("stream made again, in memory")
    await chaos.moved(10)
    await fleet.nats_server.restart()
    chaos.fault("NATS restarted: its stream in memory is gone")


async def nats_away_longer_than_the_outbox_holds(chaos: Chaos) -> None:
    worker = chaos.fleet.workers[0]
    await chaos.moved(10)
    worker.nats.cut()
    chaos.fault("publisher cut from NATS until its outbox overflows")
    await chaos.moved(150, [worker])
    worker.nats.heal()
    chaos.healed()
    told_anew = "(the outbox was full)"
    await until(
        lambda: told_anew in worker.sidecar.said(), deadline_s=30, what="the outbox overflowed, all is told anew"
    )


async def publisher_half_open_to_nats(chaos: Chaos) -> None:
    worker = chaos.fleet.workers[0]
    await chaos.moved(5)
    worker.nats.stall()
    chaos.fault("publisher's line to NATS half-open")
    await chaos.moved(60, [worker])
    worker.nats.heal()
    chaos.healed()


async def publisher_far_from_nats(chaos: Chaos) -> None:
    worker = chaos.fleet.workers[0]
    worker.nats.delay_s = 0.05
    chaos.fault("publisher's line to NATS takes 100 ms")
    await chaos.moved(20, [worker])
    worker.nats.heal()
    chaos.healed()


async def stream_purged(chaos: Chaos) -> None:
    await chaos.moved(10)
    for member in chaos.fleet.members:
        member.nats.cut()
    await chaos.moved(5)
    await chaos.fleet.nats.jetstream().purge_stream(STREAM)
    chaos.fault("stream purged, with messages that no indexer had read")
    for member in chaos.fleet.members:
        member.nats.heal()
    chaos.healed()


async def stream_emptied_by_its_limits(chaos: Chaos) -> None:
    """It takes no more than a few messages: what nobody had read is gone, a little with each message that comes."""
    fleet = chaos.fleet
    jetstream = fleet.nats.jetstream()
    await chaos.moved(10)
    config = (await jetstream.stream_info(STREAM)).config
    for member in fleet.members:
        member.nats.cut()
    await chaos.moved(5)
    await jetstream.update_stream(replace(config, max_bytes=FEW_BYTES))
    chaos.fault(f"stream limited to {FEW_BYTES} bytes, with messages that no indexer had read")
    await chaos.moved(20)
    for member in fleet.members:
        member.nats.heal()
    await chaos.moved(5)
    await jetstream.update_stream(config)
    chaos.healed()


async def indexer_too_slow_for_nats(chaos: Chaos) -> None:
    """It stands still while more comes for it than the server keeps for a connection: the server ends that."""
    fleet, member = chaos.fleet, chaos.fleet.members[0]
    await chaos.moved(5)
    dropped = _slow_consumers(fleet)
    member.child.pause()
    chaos.fault("indexer SIGSTOP, flooded with heartbeats that are none")

    async def is_dropped() -> bool:
        for _ in range(100):
            await fleet.nats.publish(alive_subject("flood"), bytes(FLOOD_BYTES))
        await fleet.nats.flush()
        return _slow_consumers(fleet) > dropped

    await until(is_dropped, deadline_s=30, what="NATS drops the slow consumer")
    member.child.resume()
    chaos.healed()
    await chaos.moved(5)


def _slow_consumers(fleet: Fleet) -> int:
    """How often the server said that it dropped one."""
    return (fleet.nats_server.process.data_dir / LOG_FILE).read_text(errors="replace").count("Slow Consumer")


async def stream_deleted(chaos: Chaos) -> None:
    await chaos.moved(10)
    await chaos.fleet.nats.jetstream().delete_stream(STREAM)
    chaos.fault("stream deleted")
    await chaos.moved(5)


async def stream_recreated(chaos: Chaos) -> None:
    jetstream = chaos.fleet.nats.jetstream()
    await chaos.moved(10)
    config = (await jetstream.stream_info(STREAM)).config
    await jetstream.delete_stream(STREAM)
    await jetstream.add_stream(config)
    chaos.fault("stream deleted and made again")
    await chaos.moved(5)


async def consumers_deleted(chaos: Chaos) -> None:
    jetstream = chaos.fleet.nats.jetstream()
    await chaos.moved(10)
    for consumer in await jetstream.consumers_info(STREAM):
        await jetstream.delete_consumer(STREAM, consumer.name)
        chaos.fault("consumer deleted")
    await chaos.moved(10)


async def messages_delivered_twice_and_out_of_order(chaos: Chaos) -> None:
    """Old messages appear in the stream again, shuffled, as from a zombie."""
    fleet = chaos.fleet
    await chaos.moved(20)
    chaos.fault(await deliver_again(fleet.nats, 60, random.Random(1)))
    await chaos.moved(10)


async def deliver_again(nats: Client, most: int, rng: random.Random) -> str:
    """The stream's last messages once more, shuffled; says so. Raises what NATS raises."""
    known, jetstream = await stream_info(nats), nats.jetstream(timeout=1)
    first = max(known.first_seq, known.last_seq - most)
    again = [await jetstream.get_msg(STREAM, seq) for seq in range(first, known.last_seq)]
    rng.shuffle(again)
    for message in again:
        assert message.subject is not None and message.data is not None
        await jetstream.publish(message.subject, message.data)
    return f"{len(again)} messages in the stream once more, shuffled"


async def poison_in_the_stream(chaos: Chaos) -> None:
    """It lands in the dead-letter stream and blocks nothing."""
    fleet = chaos.fleet
    jetstream = fleet.nats.jetstream()
    await chaos.moved(5)
    real = await jetstream.get_last_msg(STREAM, events_subject(fleet.workers[0].worker_id, PARTITIONS))
    assert real.data is not None
    poisons = (b"", b"garbage", b"\xc1" * 100, real.data[:-3], real.data + b"x", msgpack.packb([99, "w", 1, 2]))
    before = await _dead_letters(fleet)
    for worker in fleet.workers:
        for poison in poisons:
            await jetstream.publish(events_subject(worker.worker_id, PARTITIONS), poison)
            chaos.fault("message that can't be decoded")
    count = len(poisons) * len(fleet.workers)

    async def are_kept() -> bool:
        return await _dead_letters(fleet) >= before + count

    await until(are_kept, deadline_s=20, what=f"{count} dead letters are kept")
    await chaos.moved(5)


async def _dead_letters(fleet: Fleet) -> int:
    try:
        return (await fleet.nats.jetstream().stream_info(DEAD_STREAM)).state.last_seq
    except NotFoundError:
        return 0


SCENARIOS = (
    messages_delivered_twice_and_out_of_order,
    poison_in_the_stream,
    nats_killed_and_restarted,
    nats_restarted_without_its_data,
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
