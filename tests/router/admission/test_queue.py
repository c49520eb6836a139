"""The queue in front of full engines: one order for all routers, its bounds, and requests that leave it."""

import sys
from collections import Counter
from functools import partial

import anyio
import pytest

from kvatlas.embedded.child_process import spawn_child
from kvatlas.errors import Unreachable
from kvatlas.reservations import MemoryReservations, RedisReservations
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.store.connection import Store, connected_store
from kvatlas_router.admission.queue import QueueFull, QueueSettings, Wait
from tests.end_to_end.processes import ROOT, environment
from tests.eventually import until
from tests.kvatlas.reservations.asks import POOL
from tests.kvatlas.status_page.page_text import texts
from tests.kvatlas.store.sentinel_servers import watched_pair
from tests.router.admission.routers import Pool, Router, routers_of
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router.proxy.test_proxy import status as proxy_status

pytestmark = pytest.mark.anyio


def waiting(routers: list[Router], requests: int) -> bool:
    return sum(router.queue.waiting() for router in routers) == requests


async def fill(pool: Pool, router: Router) -> list[int]:
    """Book every worker."""
    return [await router.admit("before") for _ in pool.workers]


@pytest.mark.parametrize("routers", [1, 3, 10])
async def test_a_flood_on_one_of_many_routers_takes_no_more_than_its_share(store: Store, routers: int) -> None:
    pool = Pool(RedisReservations(store), ("a", "b"), runs_s=0.002)
    async with routers_of(pool, routers) as all_routers, anyio.create_task_group() as tasks:
        running = await fill(pool, all_routers[0])
        for number in range(60):
            tasks.start_soon(all_routers[number % min(2, routers)].run, "flood")
        await until(lambda: waiting(all_routers, 60), what="the flood waits")
        for number in range(80):
            name, heavy = f"tenant {(0, 1, 2, 1)[number % 4]}", bool(number % 2)
            tasks.start_soon(partial(all_routers[number % routers].run, name, weight=2 if heavy else 1))
        await until(lambda: waiting(all_routers, 140), what="all wait")
        for number in running:
            await all_routers[0].end(number)
    served = Counter(tenant for tenant, _ in pool.served[2:82])  # while all four wait: weights 1, 1, 2, 1 of 5
    for tenant, weight in {"flood": 1, "tenant 0": 1, "tenant 1": 2, "tenant 2": 1}.items():
        assert abs(served[tenant] - 16 * weight) <= 2, served
    assert len(pool.served) == 142


async def test_a_flood_takes_no_more_than_its_share_after_the_store_has_failed_over() -> None:
    """All requests wait while the primary dies. They keep their places, or get new ones at the replica."""
    with watched_pair() as pair:
        async with connected_store(pair.url()) as store:
            pool = Pool(RedisReservations(store), ("a", "b"), runs_s=0.002)
            async with routers_of(pool, 3) as routers, anyio.create_task_group() as tasks:
                running = await fill(pool, routers[0])
                for number in range(60):
                    tasks.start_soon(routers[number % 2].run, "flood")
                await until(lambda: waiting(routers, 60), what="the flood waits")
                for number in range(60):
                    tasks.start_soon(routers[number % 3].run, f"tenant {number % 2}")
                await until(lambda: waiting(routers, 120), what="all wait")
                first = pair.primary
                first.kill()
                await until(lambda: pair.primary is not first, what="another primary")

                async def all_have_places() -> bool:
                    try:
                        return await alive_wait(pool, 120)
                    except Unreachable:
                        return False

                await until(all_have_places, what="all wait at the new primary")
                assert len(pool.served) == 2
                for number in running:
                    await routers[0].end(number)
    served = Counter(tenant for tenant, _ in pool.served[2:62])  # while all three wait
    assert all(abs(served[tenant] - 20) <= 2 for tenant in ("flood", "tenant 0", "tenant 1")), served
    assert len(pool.served) == 122


async def test_a_router_that_sees_only_resting_workers_holds_up_no_other() -> None:
    pool = Pool(MemoryReservations(), ("a",))
    async with routers_of(pool, 2) as (resting, other), anyio.create_task_group() as tasks:
        (running,) = await fill(pool, other)
        pool.resting.add(resting.name)
        tasks.start_soon(resting.admit, "t")
        await until(partial(waiting, [resting], 1), what="it waits first")
        tasks.start_soon(other.run, "t")
        await until(lambda: alive_wait(pool, 2), what="both wait")
        await other.end(running)
        await until(lambda: len(pool.served) == 2, what="the other one is served")
        assert pool.served[1][1] == other.name and waiting([resting], 1)
        pool.resting.clear()
        await until(lambda: len(pool.served) == 3, what="then the first")


async def test_a_killed_routers_requests_give_way_and_the_order_survives_a_store_that_lost_it(store: Store) -> None:
    pool = Pool(RedisReservations(store), ("a",), runs_s=0.05)
    async with routers_of(pool, 3) as routers, anyio.create_task_group() as tasks:
        (running,) = await fill(pool, routers[0])
        async with anyio.create_task_group() as killed:
            for number in range(3):
                killed.start_soon(routers[1].admit, "t")
                await until(partial(waiting, routers, number + 1), what="it waits")
            for number, tenant in enumerate("uvuv", start=4):
                tasks.start_soon(routers[2 * (number % 2)].run, tenant)
                await until(partial(waiting, routers, number), what="it waits")
            for asking in [line.asking for line in routers[1].queue._lines.values()]:
                assert asking is not None
                asking.cancel()
            await store.client.delete(*pool_keys(POOL)[17:23])
            await until(lambda: alive_wait(pool, 4), what="all but the killed router's wait again")
            await routers[0].end(running)
            await until(lambda: len(pool.served) == 5, what="the others are served")
            assert [tenant for tenant, _ in pool.served[1:]] in (list("uvuv"), list("vuvu"), list("uvvu"), list("vuuv"))
            killed.cancel_scope.cancel()


async def test_the_requests_of_a_killed_process_give_way(store: Store, valkey_url: str) -> None:
    pool = Pool(RedisReservations(store), ("a",))
    async with routers_of(pool, 1) as (router,), anyio.create_task_group() as tasks:
        (running,) = await fill(pool, router)
        command = [sys.executable, "-m", "tests.router.admission.waiting_router", valkey_url, "40"]
        process = spawn_child(command, cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)))
        try:
            await until(lambda: alive_wait(pool, 40), what="the process' requests wait")
            tasks.start_soon(router.admit, "t")
            await until(lambda: alive_wait(pool, 41), what="so does another one, behind them")
        finally:
            process.kill()
            process.wait()
        await router.end(running)
        await until(lambda: len(pool.served) == 2, what="it is served")
        assert await alive_wait(pool, 0)


async def alive_wait(pool: Pool, requests: int) -> bool:
    return (await pool.reservations.turns(POOL, "nobody", [], [])).requests == requests


async def test_requests_wait_for_room_in_order_and_within_bounds() -> None:
    pool, served = Pool(MemoryReservations(), ("a",)), list[str]()
    async with routers_of(pool, 1, QueueSettings(requests=3, tokens=4_000, wait_s=30)) as (router,):

        async def ask(name: str, priority: int) -> None:
            wait = Wait()
            last.append(await router.admit("t", wait, priority=priority))
            served.append(name)
            assert (
                str(wait).startswith("full;ahead=" if name == "late" else "full;ahead=0;waiting=") and wait.waited_s > 0
            )

        def are_served(requests: int) -> bool:
            return len(served) == requests

        last = await fill(pool, router)
        async with anyio.create_task_group() as tasks:
            for number, (name, priority) in enumerate((("late", 1), ("soon", 0), ("urgent", -1)), start=1):
                tasks.start_soon(ask, name, priority)
                await until(partial(waiting, [router], number), what="it waits")
            with pytest.raises(QueueFull, match="3 requests of 3000 tokens wait already") as full:
                await router.admit("t")
            assert full.value.retry_after_s >= 1
            await until(lambda: router.queue.pool_waiting() == 3, what="the pool's queue is known")
            for number in range(1, 4):
                await router.end(last[-1])
                await until(partial(are_served, number), what="one more was served")
        assert served == ["urgent", "soon", "late"] and router.queue.waiting() == 0
        await until(lambda: alive_wait(pool, 0), what="nothing is left in the pool's queue")


async def test_a_request_waits_no_longer_than_it_may_and_leaves_when_its_client_does() -> None:
    pool = Pool(MemoryReservations(), ("a",))
    async with routers_of(pool, 1) as (router,):
        await fill(pool, router)
        with pytest.raises(QueueFull, match=r"every worker was full for 0.05 s, the longest"):
            await router.admit("t", wait_s=0.05)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(router.admit, "t")
            await until(lambda: waiting([router], 1), what="it waits")
            tasks.cancel_scope.cancel()
        assert router.queue.waiting() == 0
        await until(lambda: alive_wait(pool, 0), what="nothing is left in the pool's queue")


async def test_the_proxy_holds_requests_back_until_an_engine_has_room(store: Store, valkey_url: str) -> None:
    full = {"active_request_slots": 1, "total_request_slots": 1}
    proxies = partial(running_proxy, valkey_url, tokenizer="none", queue_requests=1, queue_wait_s=60)
    async with (
        running_fleet(store, {"w1": {}}, {"w1": {"running_decodes": 1, "forward_pass": full}}) as fleet,
        proxies() as client,
        proxies() as other,
    ):
        answers = []
        body = {"model": MODEL, "prompt": [5] * 40, "max_tokens": 1}

        async def post() -> None:
            answers.append(await client.post("/v1/completions", json=body))

        async def is_waiting() -> bool:
            await fleet.report("w1", running_decodes=1, forward_pass=full)  # a report is believed for some seconds
            return bool((await proxy_status(client))["waiting"] == 1)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post)
            await until(is_waiting, what="the request waits")
            refused = await other.post("/v1/completions", json=body)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert answers == []
            assert (await proxy_status(client))["pool_waiting"] == 1
            assert "waiting 1 waiting, all routers 1 " in texts((await client.get("/")).text)
            await fleet.report("w1", running_decodes=0, forward_pass={**full, "active_request_slots": 0})
        assert [answer.status_code for answer in answers] == [200]
        place, _, rest = answers[0].headers["x-kvatlas-queue"].partition(";waited-ms=")
        assert place == "full;ahead=0;waiting=1" and rest.endswith(";by=pool")
        counted = (await proxy_status(client))["proxy"]
        assert (counted["queued"], counted["queue_full"], counted["answered"]) == (1, 0, 1)
        assert (await proxy_status(other))["proxy"]["queue_full"] == 1
