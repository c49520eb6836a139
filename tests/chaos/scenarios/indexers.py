"""Faults of indexer replicas and of their connections to Redis and NATS."""

from time import monotonic

import anyio

from kvatlas.fleet_store.fleet_store import FleetStore
from tests.chaos.fleet import PARTITIONS, RETIRE_AFTER_S, Fleet, Indexer
from tests.chaos.scenario_run import ScenarioRun
from tests.end_to_end.processes import query
from tests.eventually import until

TAKEOVER_S = 20.0
PATIENCE_S = RETIRE_AFTER_S + 3.0
AFTER_S = 3.0


async def wait_until_taken_over(fleet: Fleet, indexer: Indexer) -> None:
    """Wait until other replicas hold every partition."""

    async def is_taken_over() -> bool:
        leases = await FleetStore(fleet.store).leases()
        return len(leases) == PARTITIONS and indexer.child.name not in leases.values()

    await until(is_taken_over, deadline_s=TAKEOVER_S, what=f"the partitions of {indexer.child.name} are taken over")


async def wait_until_owner(fleet: Fleet, indexer: Indexer) -> None:
    """Wait until this replica holds partitions, and every partition has an owner."""

    async def has_taken() -> bool:
        leases = await FleetStore(fleet.store).leases()
        return len(leases) == PARTITIONS and indexer.child.name in leases.values()

    await until(has_taken, deadline_s=TAKEOVER_S, what=f"{indexer.child.name} has taken partitions")


async def restart_indexer(run: ScenarioRun, indexer: Indexer) -> None:
    """Start a killed indexer again."""
    indexer.child.start()
    await indexer.child.ready()
    await wait_until_owner(run.fleet, indexer)


async def indexer_killed(run: ScenarioRun) -> None:
    indexer = run.fleet.indexers[0]
    await run.wait_for_answers(10)
    indexer.child.kill()
    run.record_fault("indexer SIGKILL")
    began_s = monotonic()
    await wait_until_taken_over(run.fleet, indexer)
    run.times_s["its partitions taken over after"] = monotonic() - began_s
    await run.wait_for_answers(5)
    await restart_indexer(run, indexer)
    run.mark_healed()


async def indexer_paused_past_its_lease(run: ScenarioRun) -> None:
    """It resumes as a zombie, with calls that the new owners have made meanwhile."""
    indexer = run.fleet.indexers[0]
    await run.wait_for_answers(10)
    indexer.child.pause()
    run.record_fault("indexer SIGSTOP")
    await wait_until_taken_over(run.fleet, indexer)
    await run.wait_for_answers(10)
    indexer.child.resume()
    run.mark_healed()
    await run.wait_for_answers(10)


async def indexer_cut_from_redis(run: ScenarioRun) -> None:
    indexer = run.fleet.indexers[0]
    await run.wait_for_answers(5)
    indexer.redis.cut()
    run.record_fault("indexer cut from Redis")
    await wait_until_taken_over(run.fleet, indexer)
    indexer.redis.heal()
    await wait_until_owner(run.fleet, indexer)
    run.mark_healed()


async def indexer_half_open_to_redis(run: ScenarioRun) -> None:
    indexer = run.fleet.indexers[0]
    await run.wait_for_answers(5)
    indexer.redis.stall()
    run.record_fault("indexer's connection to Redis half-open")
    await wait_until_taken_over(run.fleet, indexer)
    indexer.redis.heal()
    await wait_until_owner(run.fleet, indexer)
    run.mark_healed()


async def indexer_cut_from_nats(run: ScenarioRun) -> None:
    indexer = run.fleet.indexers[0]
    await run.wait_for_answers(5)
    indexer.nats.cut()
    run.record_fault("indexer cut from NATS")
    await wait_until_taken_over(run.fleet, indexer)
    await run.wait_for_answers(5)
    indexer.nats.heal()
    await wait_until_owner(run.fleet, indexer)
    run.mark_healed()


async def indexer_half_open_to_nats(run: ScenarioRun) -> None:
    indexer = run.fleet.indexers[0]
    await run.wait_for_answers(5)
    indexer.nats.stall()
    run.record_fault("indexer's connection to NATS half-open")
    await wait_until_taken_over(run.fleet, indexer)
    indexer.nats.heal()
    await wait_until_owner(run.fleet, indexer)
    run.mark_healed()


async def every_indexer_cut_from_both(run: ScenarioRun) -> None:
    """No replica hears any worker for a while; no worker is retired because of that."""
    await run.wait_for_answers(5)
    for indexer in run.fleet.indexers:
        indexer.redis.cut()
        indexer.nats.cut()
        run.record_fault("indexer cut from Redis and NATS")
    await run.wait_for_answers(40)
    for indexer in run.fleet.indexers:
        indexer.redis.heal()
        indexer.nats.heal()
    run.mark_healed()


async def assert_none_retired_for(run: ScenarioRun, seconds: float) -> None:
    """Check that each worker's blocks stay in the index for this time."""
    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:
            for worker in run.fleet.workers:
                tasks.start_soon(run.assert_never_empty, worker)


async def every_indexer_deaf_for_longer_than_its_patience(run: ScenarioRun) -> None:
    """No heartbeat gets through, but Redis accepts writes: it is the observer that is cut off, so no worker is retired."""
    await run.wait_for_answers(5)
    for indexer in run.fleet.indexers:
        indexer.nats.stall()
        run.record_fault("indexer's connection to NATS half-open")
    await assert_none_retired_for(run, PATIENCE_S)
    for indexer in run.fleet.indexers:
        indexer.nats.heal()
    run.mark_healed()
    await assert_none_retired_for(run, AFTER_S)


async def every_indexer_paused_for_longer_than_its_patience(run: ScenarioRun) -> None:
    """When resumed, none mistakes its own pause for silence of the workers."""
    await run.wait_for_answers(5)
    for indexer in run.fleet.indexers:
        indexer.child.pause()
        run.record_fault("indexer SIGSTOP")
    await assert_none_retired_for(run, PATIENCE_S)
    for indexer in run.fleet.indexers:
        indexer.child.resume()
    run.mark_healed()
    await assert_none_retired_for(run, AFTER_S)


async def rolling_restart_of_the_indexers(run: ScenarioRun) -> None:
    await run.wait_for_answers(5)
    for indexer in run.fleet.indexers:
        await indexer.child.stop()
        run.record_fault("indexer SIGTERM, started again")
        indexer.child.start()
        await indexer.child.ready()
    run.mark_healed()
    began_s = monotonic()
    while await run.measure_lag_s() > 1.0:
        assert monotonic() - began_s < TAKEOVER_S, "the lag does not come back under a second"
    run.times_s["lag under a second, seen after the last one is ready"] = monotonic() - began_s


async def scaled_to_four_and_back(run: ScenarioRun) -> None:
    fleet = run.fleet
    await run.wait_for_answers(5)
    for indexer in fleet.indexers[1:]:
        await indexer.child.stop()
        run.record_fault("one replica fewer")
    await wait_until_owner(fleet, fleet.indexers[0])
    while len(fleet.indexers) < 4:
        await fleet.add_indexer()
    for indexer in fleet.indexers[1:]:
        indexer.child.start()
    for indexer in fleet.indexers[1:]:
        await indexer.child.ready()
        await wait_until_owner(fleet, indexer)
        run.record_fault("one replica more")
    await run.wait_for_answers(5)
    for indexer in fleet.indexers[1:]:
        await indexer.child.stop()
        run.record_fault("one replica fewer")
    run.mark_healed()
    await run.wait_for_answers(5)
    for indexer in fleet.indexers[1 : fleet.initial_indexers]:
        indexer.child.start()
        await indexer.child.ready()
    del fleet.indexers[fleet.initial_indexers :]


async def layout_switched_and_back(run: ScenarioRun) -> None:
    """A second layout, with other partitions and shards, is filled and answers; then the first one answers again."""
    fleet = run.fleet
    servers = ("--nats-url", ",".join(server.url for server in fleet.nats_servers), "--redis-url", fleet.store_url)
    await run.wait_for_answers(10)
    for _ in range(2):
        added = await fleet.add_indexer("--layout", "1", "--partitions", "24", "--shards", "2")
        added.child.start()
        await added.child.ready()
    run.record_fault("layout 1 is filled")
    began_s = monotonic()
    await query("layout", "--answer", "1", *servers)
    run.times_s["until layout 1 answers"] = monotonic() - began_s
    run.record_fault("layout 1 answers")
    await run.wait_for_answers(10)
    await run.wait_until_exact()
    await query("layout", "--answer", "0", *servers)
    run.record_fault("layout 0 answers again")
    for added in fleet.indexers[fleet.initial_indexers :]:
        await added.child.stop()
    del fleet.indexers[fleet.initial_indexers :]
    await query("layout", "--delete", "1", *servers)
    run.record_fault("layout 1 deleted")
    await run.wait_for_answers(10)
    run.mark_healed()


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
    layout_switched_and_back,
)
