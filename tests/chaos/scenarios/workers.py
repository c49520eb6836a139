"""Workers that fall silent: skipped by routers, back at once, retired after a while."""

from time import monotonic

from kvatlas.fleet.records import EngineState, Liveness
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.redis.index import open_redis_index
from tests.chaos.fleet import Fleet, Worker
from tests.chaos.scenario_run import ScenarioRun
from tests.eventually import until
from tests.http_client import http_client


async def wait_until_skipped(fleet: Fleet, worker: Worker) -> None:
    """Wait until routers skip the worker."""

    async def is_skipped() -> bool:
        record = (await FleetStore(fleet.store).all())[worker.worker_id]
        return record.liveness is not Liveness.ALIVE or record.state is not EngineState.UP

    await until(is_skipped, what=f"routers skip {worker.worker_id}")


async def heartbeat_lost(run: ScenarioRun) -> None:
    worker = run.fleet.workers[0]
    await run.wait_for_answers(5)
    worker.sidecar.pause()
    run.record_fault("sidecar SIGSTOP")
    await wait_until_skipped(run.fleet, worker)
    worker.sidecar.resume()
    run.mark_healed()


async def engine_down_behind_a_living_sidecar(run: ScenarioRun) -> None:
    worker = run.fleet.workers[0]
    await run.wait_for_answers(5)
    worker.engine.pause()
    run.record_fault("engine SIGSTOP")
    await wait_until_skipped(run.fleet, worker)
    worker.engine.resume()
    run.mark_healed()


async def engine_asleep_behind_a_living_sidecar(run: ScenarioRun) -> None:
    """It drops its cache; once awake, it is routable at once."""
    fleet, worker = run.fleet, run.fleet.workers[0]
    await run.wait_for_answers(5)
    async with http_client(base_url=worker.url, timeout=5) as client:
        (await client.post("/sleep")).raise_for_status()
        run.record_fault("engine asleep")
        await wait_until_skipped(fleet, worker)
        assert (await FleetStore(fleet.store).all())[worker.worker_id].state is EngineState.ASLEEP

        async def is_empty() -> bool:
            return not await fleet.checker.resident_blocks(worker.worker_id)

        await until(is_empty, what="its blocks are gone from the index")
        (await client.post("/wake_up")).raise_for_status()
    run.mark_healed()
    began_s = monotonic()

    async def is_routable() -> bool:
        return (await FleetStore(fleet.store).all())[worker.worker_id].routable

    await until(is_routable, what="routers use it again")
    run.times_s["routable after it woke up"] = monotonic() - began_s


async def worker_retired_and_back(run: ScenarioRun) -> None:
    """After RETIRE_AFTER_S instead of a minute; its entries are swept."""
    fleet, worker = run.fleet, run.fleet.workers[0]
    await run.wait_for_answers(5)
    worker.sidecar.pause()
    run.record_fault("sidecar SIGSTOP until its worker is retired")
    index = await open_redis_index(fleet.store, writer=False)

    async def is_retired() -> bool:
        record = await index.record(worker.worker_id)
        known = worker.worker_id in await FleetStore(fleet.store).all()
        return record is not None and record.closed and not record.answering and not known

    async def is_swept() -> bool:
        return not [key async for key in fleet.store.client.scan_iter(match="kva:{s*}:retired")]

    await until(is_retired, what=f"{worker.worker_id} is retired")
    await until(is_swept, what="its blocks are swept")
    worker.sidecar.resume()
    run.mark_healed()


SCENARIOS = (
    heartbeat_lost,
    engine_down_behind_a_living_sidecar,
    engine_asleep_behind_a_living_sidecar,
    worker_retired_and_back,
)
