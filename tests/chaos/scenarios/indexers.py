"""Faults of the indexer's replicas and of their lines to Redis and NATS."""

from time import monotonic

import anyio

from kvatlas.fleet.store import FleetStore
from tests.chaos.chaos import Chaos
from tests.chaos.fleet import PARTITIONS, RETIRE_AFTER_S, Fleet, Member
from tests.eventually import until

OVER_S = 20.0
PATIENCE_S = RETIRE_AFTER_S + 3.0
AFTER_S = 3.0


async def holds_nothing(fleet: Fleet, member: Member) -> None:
    """Wait until others hold every partition."""

    async def taken_over() -> bool:
        leases = await FleetStore(fleet.store).leases()
        return len(leases) == PARTITIONS and member.child.name not in leases.values()

    await until(taken_over, deadline_s=OVER_S, what=f"the partitions of {member.child.name} are taken over")


async def holds_some(fleet: Fleet, member: Member) -> None:
    async def has_taken() -> bool:
        leases = await FleetStore(fleet.store).leases()
        return len(leases) == PARTITIONS and member.child.name in leases.values()

    await until(has_taken, deadline_s=OVER_S, what=f"{member.child.name} has taken partitions")


async def takes_part_again(chaos: Chaos, member: Member) -> None:
    """An indexer that was killed starts again."""
    member.child.start()
    await member.child.ready()
    await holds_some(chaos.fleet, member)


async def indexer_killed(chaos: Chaos) -> None:
    member = chaos.fleet.members[0]
    await chaos.moved(10)
    member.child.kill()
    chaos.fault("indexer SIGKILL")
    began_s = monotonic()
    await holds_nothing(chaos.fleet, member)
    chaos.times_s["its partitions taken over after"] = monotonic() - began_s
    await chaos.moved(5)
    await takes_part_again(chaos, member)
    chaos.healed()


async def indexer_paused_past_its_lease(chaos: Chaos) -> None:
    """It wakes up as a zombie, with calls under way that others have made since."""
    member = chaos.fleet.members[0]
    await chaos.moved(10)
    member.child.pause()
    chaos.fault("indexer SIGSTOP")
    await holds_nothing(chaos.fleet, member)
    await chaos.moved(10)
    member.child.resume()
    chaos.healed()
    await chaos.moved(10)


async def indexer_cut_from_redis(chaos: Chaos) -> None:
    member = chaos.fleet.members[0]
    await chaos.moved(5)
    member.redis.cut()
    chaos.fault("indexer cut from Redis")
    await holds_nothing(chaos.fleet, member)
    member.redis.heal()
    await holds_some(chaos.fleet, member)
    chaos.healed()


async def indexer_half_open_to_redis(chaos: Chaos) -> None:
    member = chaos.fleet.members[0]
    await chaos.moved(5)
    member.redis.stall()
    chaos.fault("indexer's line to Redis half-open")
    await holds_nothing(chaos.fleet, member)
    member.redis.heal()
    await holds_some(chaos.fleet, member)
    chaos.healed()


async def indexer_cut_from_nats(chaos: Chaos) -> None:
    member = chaos.fleet.members[0]
    await chaos.moved(5)
    member.nats.cut()
    chaos.fault("indexer cut from NATS")
    await holds_nothing(chaos.fleet, member)
    await chaos.moved(5)
    member.nats.heal()
    await holds_some(chaos.fleet, member)
    chaos.healed()


async def indexer_half_open_to_nats(chaos: Chaos) -> None:
    member = chaos.fleet.members[0]
    await chaos.moved(5)
    member.nats.stall()
    chaos.fault("indexer's line to NATS half-open")
    await holds_nothing(chaos.fleet, member)
    member.nats.heal()
    await holds_some(chaos.fleet, member)
    chaos.healed()


async def every_indexer_cut_from_both(chaos: Chaos) -> None:
    """Nobody observes anything for a while: no worker is retired for that."""
    await chaos.moved(5)
    for member in chaos.fleet.members:
        member.redis.cut()
        member.nats.cut()
        chaos.fault("indexer cut from Redis and NATS")
    await chaos.moved(40)
    for member in chaos.fleet.members:
        member.redis.heal()
        member.nats.heal()
    chaos.healed()


async def retires_nobody(chaos: Chaos, seconds: float) -> None:
    """For so long, and a little more, every worker's blocks stay."""
    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:
            for worker in chaos.fleet.workers:
                tasks.start_soon(chaos.watch_never_empty, worker)


async def every_indexer_deaf_for_longer_than_its_patience(chaos: Chaos) -> None:
    """No heartbeat gets through, Redis can be written: the observer is cut off, so no worker is retired."""
    await chaos.moved(5)
    for member in chaos.fleet.members:
        member.nats.stall()
        chaos.fault("indexer's line to NATS half-open")
    await retires_nobody(chaos, PATIENCE_S)
    for member in chaos.fleet.members:
        member.nats.heal()
    chaos.healed()
    await retires_nobody(chaos, AFTER_S)


async def every_indexer_paused_for_longer_than_its_patience(chaos: Chaos) -> None:
    """Awake again, none takes its own sleep for the workers' silence."""
    await chaos.moved(5)
    for member in chaos.fleet.members:
        member.child.pause()
        chaos.fault("indexer SIGSTOP")
    await retires_nobody(chaos, PATIENCE_S)
    for member in chaos.fleet.members:
        member.child.resume()
    chaos.healed()
    await retires_nobody(chaos, AFTER_S)


async def rolling_restart_of_the_indexers(chaos: Chaos) -> None:
    await chaos.moved(5)
    for member in chaos.fleet.members:
        await member.child.stop()
        chaos.fault("indexer SIGTERM, started again")
        member.child.start()
        await member.child.ready()
    chaos.healed()
    began_s = monotonic()
    while await chaos.lag_s() > 1.0:
        assert monotonic() - began_s < OVER_S, "the lag does not come back under a second"
    chaos.times_s["lag under a second, seen after the last one is ready"] = monotonic() - began_s


async def scaled_to_four_and_back(chaos: Chaos) -> None:
    fleet = chaos.fleet
    await chaos.moved(5)
    for member in fleet.members[1:]:
        await member.child.stop()
        chaos.fault("one replica less")
    await holds_some(fleet, fleet.members[0])
    while len(fleet.members) < 4:
        await fleet.add_member()
    for member in fleet.members[1:]:
        member.child.start()
    for member in fleet.members[1:]:
        await member.child.ready()
        await holds_some(fleet, member)
        chaos.fault("one replica more")
    await chaos.moved(5)
    for member in fleet.members[1:]:
        await member.child.stop()
        chaos.fault("one replica less")
    chaos.healed()
    await chaos.moved(5)
    for member in fleet.members[1 : fleet.indexers]:
        member.child.start()
        await member.child.ready()
    del fleet.members[fleet.indexers :]


SCENARIOS = (
    indexer_killed,
    indexer_paused_past_its_lease,
    indexer_cut_from_redis,
    indexer_half_open_to_redis,
    indexer_cut_from_nats,
    indexer_half_open_to_nats,
    every_indexer_cut_from_both,
    every_indexer_deaf_for_longer_than_its_patience,
    every_indexer_paused_for_longer_than_its_patience,
    rolling_restart_of_the_indexers,
    scaled_to_four_and_back,
)
