"""Faults of a Valkey cluster: servers that die, fail over, and give the shards' slots to each other."""

from kvatlas.bus.subjects import partition_of
from kvatlas.embedded import EmbeddedServer
from kvatlas.identity import shard_of
from tests.chaos.clusters.store_cluster import StoreCluster, slot_of_shard
from tests.chaos.fleet import PARTITIONS, SHARDS, Fleet
from tests.chaos.scenario_run import ScenarioRun
from tests.eventually import until

KEY_PAUSE_S = 0.05
"""Pause between keys of a slot that moves key by key, so that calls come in between."""


def cluster_of(fleet: Fleet) -> StoreCluster:
    assert fleet.cluster is not None
    return fleet.cluster


def busy_slot(fleet: Fleet) -> int:
    """The slot of the first worker's shard."""
    return slot_of_shard(shard_of(partition_of(fleet.workers[0].worker_id, PARTITIONS), SHARDS))


async def primary_of(cluster: StoreCluster, slot: int) -> EmbeddedServer:
    found = await cluster.primary_of(slot)
    assert found is not None, f"slot {slot} has a primary"
    return found


async def another_primary(cluster: StoreCluster, slot: int) -> EmbeddedServer:
    """A primary that does not have this slot."""
    for other in (slot_of_shard(shard) for shard in range(SHARDS)):
        found = await primary_of(cluster, other)
        if found is not await primary_of(cluster, slot):
            return found
    raise AssertionError("all shards are on one server")


async def wait_for_another_primary(cluster: StoreCluster, slot: int, before: EmbeddedServer) -> None:
    async def is_another() -> bool:
        return await cluster.primary_of(slot) not in (None, before)

    await until(is_another, what="a replica took over")


async def cluster_primary_killed(run: ScenarioRun) -> None:
    """Its replica takes over by itself, perhaps without the last writes."""
    cluster, slot = cluster_of(run.fleet), busy_slot(run.fleet)
    await run.wait_for_answers(10)
    primary = await primary_of(cluster, slot)
    await primary.kill()
    run.record_fault("Valkey primary SIGKILL")
    await wait_for_another_primary(cluster, slot, primary)
    await run.wait_for_answers(20)
    await primary.start()
    await cluster.wait_until_whole()
    run.mark_healed()


async def cluster_primary_frozen(run: ScenarioRun) -> None:
    """Its replica takes over; the old one comes back as a zombie that believes it is the primary."""
    cluster, slot = cluster_of(run.fleet), busy_slot(run.fleet)
    await run.wait_for_answers(10)
    primary = await primary_of(cluster, slot)
    primary.pause()
    run.record_fault("Valkey primary SIGSTOP")
    await wait_for_another_primary(cluster, slot, primary)
    await run.wait_for_answers(10)
    primary.resume()
    await cluster.wait_until_whole()
    run.mark_healed()


async def cluster_primary_changed_by_hand(run: ScenarioRun) -> None:
    cluster, slot = cluster_of(run.fleet), busy_slot(run.fleet)
    for _ in range(2):
        await run.wait_for_answers(10)
        replica = await cluster.replica_of(await primary_of(cluster, slot))
        await cluster.fail_over(replica)
        run.record_fault("CLUSTER FAILOVER")
    await run.wait_for_answers(10)
    await cluster.wait_until_whole()
    run.mark_healed()


async def cluster_shard_lost_with_its_replica(run: ScenarioRun) -> None:
    """Nothing of the shard is left: it comes back empty. The other shards are not affected."""
    cluster, slot = cluster_of(run.fleet), busy_slot(run.fleet)
    await run.wait_for_answers(10)
    primary = await primary_of(cluster, slot)
    replica = await cluster.replica_of(primary)
    await replica.kill()
    await primary.kill()
    run.record_fault("Valkey primary and its replica SIGKILL")
    await run.wait_for_answers(20)
    await primary.start()
    await replica.start()
    await cluster.wait_until_whole()
    run.mark_healed()


async def cluster_slot_moved_in_one_step(run: ScenarioRun) -> None:
    """As Valkey 9 moves slots, there and back."""
    cluster, slot = cluster_of(run.fleet), busy_slot(run.fleet)
    for _ in range(2):
        await run.wait_for_answers(10)
        source, target = await primary_of(cluster, slot), await another_primary(cluster, slot)
        await cluster.move_slots(source, slot, slot, target)
        run.record_fault("slot of a shard moved in one step")
    await run.wait_for_answers(10)
    run.mark_healed()


async def cluster_slot_moved_key_by_key(run: ScenarioRun) -> None:
    """As every version moves slots: calls for the shard are refused until all its keys are at the new server."""
    cluster, slot = cluster_of(run.fleet), busy_slot(run.fleet)
    for _ in range(2):
        await run.wait_for_answers(10)
        source, target = await primary_of(cluster, slot), await another_primary(cluster, slot)
        await cluster.move_slot_by_keys(source, slot, target, KEY_PAUSE_S)
        run.record_fault("slot of a shard moved key by key")
    await run.wait_for_answers(10)
    run.mark_healed()


async def cluster_grows_and_shrinks(run: ScenarioRun) -> None:
    """A fourth primary gets every shard's slot, one by one; then it gives them back and leaves."""
    cluster = cluster_of(run.fleet)
    await run.wait_for_answers(10)
    added = await cluster.add_primary()
    origins = []
    for shard in range(SHARDS):
        slot = slot_of_shard(shard)
        origins.append(await primary_of(cluster, slot))
        await cluster.move_slots(origins[-1], slot, slot, added)
        run.record_fault(f"shard {shard} moved to a new server")
        await run.wait_for_answers(3)
    for shard, origin in enumerate(origins):
        slot = slot_of_shard(shard)
        await cluster.move_slots(added, slot, slot, origin)
        run.record_fault(f"shard {shard} moved back")
    await cluster.remove(added)
    run.record_fault("the new server leaves")
    await run.wait_for_answers(10)
    run.mark_healed()


async def cluster_server_half_open(run: ScenarioRun) -> None:
    """Clients no longer reach it, but its replica does, so there is no failover."""
    cluster, slot = cluster_of(run.fleet), busy_slot(run.fleet)
    await run.wait_for_answers(10)
    line = cluster.lines[cluster.nodes.index(await primary_of(cluster, slot))]

    def failures() -> int:
        return sum(indexer.child.log_text().count("apply failed") for indexer in run.fleet.indexers)

    before = failures()
    line.stall()
    run.record_fault("clients' line to a Valkey primary half-open")
    await until(lambda: failures() > before, what="a call has waited too long for its answer")
    line.heal()
    run.mark_healed()


STORE_SCENARIOS = (
    cluster_primary_killed,
    cluster_primary_frozen,
    cluster_primary_changed_by_hand,
    cluster_shard_lost_with_its_replica,
    cluster_slot_moved_in_one_step,
    cluster_slot_moved_key_by_key,
    cluster_grows_and_shrinks,
    cluster_server_half_open,
)
