"""Two faults, of which the second one meets what the first has begun."""

import anyio
from redis.exceptions import RedisError

from kvatlas.bus.control import ControlOp, ControlRequest
from kvatlas.bus.stream import StreamSettings, ensure_stream
from kvatlas.bus.subjects import STREAM, control_subject
from kvatlas.errors import KvatlasError
from kvatlas.fleet.store import LEASES
from kvatlas.index.redis.index import open_redis_index
from tests.chaos.chaos import Chaos
from tests.chaos.fleet import Fleet, Member
from tests.chaos.scenarios.indexers import (
    AFTER_S,
    PATIENCE_S,
    holds_nothing,
    retires_nobody,
    takes_part_again,
)
from tests.chaos.scenarios.store import LITTLE_BYTES, gets_room, limit_memory
from tests.eventually import until

LOADING_S = 10.0
NEARLY_OVER_MS = 400


async def sees_a_snapshot_under_way(fleet: Fleet) -> None:
    """Returns also where none was seen for a while: small ones are over within a call."""
    with anyio.move_on_after(LOADING_S):
        while True:
            try:
                index = await open_redis_index(fleet.store, writer=False)
                records = [await index.record(worker.worker_id) for worker in fleet.workers]
            except (KvatlasError, RedisError):
                continue  # a store without layout or functions
            if any(record is not None and record.loading for record in records):
                return


async def wakes_as_a_zombie(chaos: Chaos, member: Member) -> None:
    """A paused indexer goes on when others have taken over and told of what came meanwhile."""
    await holds_nothing(chaos.fleet, member)
    await chaos.moved(10)
    member.child.resume()
    chaos.healed()
    await chaos.moved(5)


async def redis_out_of_memory_while_indexers_start_and_take_over(chaos: Chaos) -> None:
    fleet, member = chaos.fleet, chaos.fleet.members[0]
    await chaos.moved(5)
    member.child.kill()
    await limit_memory(fleet.store, LITTLE_BYTES)
    chaos.fault("indexer SIGKILL, Redis out of memory")
    await holds_nothing(fleet, member)
    await chaos.moved(5)
    await takes_part_again(chaos, member)
    await chaos.moved(5)
    await gets_room(chaos)


async def redis_out_of_memory_in_a_snapshot(chaos: Chaos) -> None:
    fleet = chaos.fleet
    await chaos.moved(5)
    index = await open_redis_index(fleet.store, writer=False)
    for worker in fleet.workers:
        record = await index.record(worker.worker_id)
        request = ControlRequest(op=ControlOp.SNAPSHOT, above=record.incarnation if record is not None else 0)
        await fleet.nats.publish(control_subject(worker.worker_id), request.pack())
    await sees_a_snapshot_under_way(fleet)
    await limit_memory(fleet.store, LITTLE_BYTES)
    chaos.fault("Redis out of memory in a snapshot")
    await chaos.moved(10)
    await gets_room(chaos)


async def redis_out_of_memory_and_its_functions_flushed(chaos: Chaos) -> None:
    """Nothing can be called, and no function loaded, until there is room."""
    fleet = chaos.fleet
    await chaos.moved(5)
    await limit_memory(fleet.store, LITTLE_BYTES)
    await fleet.store.client.function_flush()
    chaos.fault("Redis out of memory, FUNCTION FLUSH")
    await chaos.moved(40)
    await gets_room(chaos)


async def redis_functions_flushed_in_a_snapshot(chaos: Chaos) -> None:
    fleet = chaos.fleet
    await chaos.moved(5)
    await fleet.store.client.flushall()
    await sees_a_snapshot_under_way(fleet)
    await fleet.store.client.function_flush()
    chaos.fault("FLUSHALL, and FUNCTION FLUSH in the snapshots that follow")


async def its_leases_are_nearly_over(fleet: Fleet, member: Member) -> None:
    client = fleet.store.client

    async def are_nearly_over() -> bool:
        now_s, us = await client.time()
        leases = [lease.split() for lease in await client.hvals(LEASES)]
        ends_ms = [int(ends) for ends, owner in leases if owner == member.child.name.encode()]
        left_ms: int = max(ends_ms) - 1_000 * now_s - us // 1_000
        return left_ms < NEARLY_OVER_MS

    await until(are_nearly_over, what=f"the leases of {member.child.name} are nearly over")


async def redis_flushed_in_a_takeover(chaos: Chaos) -> None:
    fleet, member = chaos.fleet, chaos.fleet.members[0]
    await chaos.moved(5)
    member.child.kill()
    await its_leases_are_nearly_over(fleet, member)
    await fleet.store.client.flushall()
    chaos.fault("indexer SIGKILL, FLUSHALL just before its leases end")
    await holds_nothing(fleet, member)
    member.child.start()
    await member.child.ready()
    chaos.healed()


async def worker_restarted_while_its_indexer_is_paused(chaos: Chaos) -> None:
    """The zombie wakes with calls of the engine's former life."""
    member, worker = chaos.fleet.members[0], chaos.fleet.workers[-1]
    await chaos.moved(5)
    member.child.pause()
    worker.engine.kill()
    worker.sidecar.kill()
    worker.engine.start()
    await worker.engine.ready()
    worker.sidecar.start()
    await worker.sidecar.ready()
    chaos.fault("indexer SIGSTOP; engine and sidecar SIGKILL, started again")
    await wakes_as_a_zombie(chaos, member)


async def nats_with_memory_storage_restarted_while_an_indexer_is_paused(chaos: Chaos) -> None:
    fleet, member = chaos.fleet, chaos.fleet.members[0]
    await fleet.nats.jetstream().delete_stream(STREAM)
    await ensure_stream(fleet.nats, StreamSettings(storage="memory"))
    await chaos.moved(10)
    member.child.pause()
    await fleet.nats_server.restart()
    chaos.fault("indexer SIGSTOP; NATS restarted: its stream in memory is gone")
    await wakes_as_a_zombie(chaos, member)


async def every_indexer_cut_from_nats_for_longer_than_its_patience(chaos: Chaos) -> None:
    fleet = chaos.fleet
    await chaos.moved(5)
    for member in fleet.members:
        member.nats.cut()
        chaos.fault("indexer cut from NATS")
    await retires_nobody(chaos, PATIENCE_S)
    for member in fleet.members:
        member.nats.heal()
    chaos.healed()
    await retires_nobody(chaos, AFTER_S)


SCENARIOS = (
    redis_out_of_memory_while_indexers_start_and_take_over,
    redis_out_of_memory_in_a_snapshot,
    redis_out_of_memory_and_its_functions_flushed,
    redis_functions_flushed_in_a_snapshot,
    redis_flushed_in_a_takeover,
    worker_restarted_while_its_indexer_is_paused,
    nats_with_memory_storage_restarted_while_an_indexer_is_paused,
    every_indexer_cut_from_nats_for_longer_than_its_patience,
)
