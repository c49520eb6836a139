"""If the store is far away, a choice waits for one round trip or none; once it is near again, choices wait for more."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio
import pytest

from kvatlas.embedded import valkey_server
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.reservations import RedisReservations
from kvatlas.store.connection import Store, connected_store
from router_client import Basis, Prompt, RouterClient, RouterSettings, StaticFleet
from tests.chaos.proxy import LOOPBACK, TcpProxy
from tests.eventually import until
from tests.router_client.decision.test_fail_open import BreakableIndex
from tests.router_client.pools import SCOPE, hold, pool, worker

pytestmark = pytest.mark.anyio

TOKENS = list(range(1_000))
PROMPT = Prompt.of_tokens(SCOPE, TOKENS)
WORKERS = pool(*(worker(id) for id in ("a", "b")))
HOLDER = "b"
ONE_WAY_S = 0.02


@asynccontextmanager
async def store_with_a_line() -> AsyncIterator[tuple[Store, TcpProxy]]:
    """A store with a fleet and an index, and a line to it that can be made longer."""
    async with (
        valkey_server() as server,
        TcpProxy(urlsplit(server.url).port or 0, "store") as line,
        connected_store(server.url, wait=False) as store,
    ):
        index = await open_redis_index(store, writer=True)
        fleet = FleetStore(store)
        await fleet.load_functions()
        await fleet.write(WORKERS)
        await hold(index, WORKERS[HOLDER], TOKENS)
        yield store, line


async def test_a_choice_waits_for_the_index_alone_while_the_store_is_far() -> None:
    async with store_with_a_line() as (_, line):
        settings = RouterSettings(most_deadline_ms=60_000)
        async with RouterClient.open(f"redis://{LOOPBACK}:{line.port}", settings, wait=False) as router:

            async def chosen(*, far: bool) -> bool:
                async with router.route(PROMPT) as choice:
                    by_cost = choice.basis is Basis.COST and not choice.why and choice.worker_id == HOLDER
                return by_cost and router.condition.read().store_is_far is far

            line.delay_s = ONE_WAY_S
            await until(lambda: chosen(far=True), what="a choice with the index of a far store")
            said = router.condition.read()
            assert said.choices > said.without_index
            # a busy event loop's part is subtracted, in some measurements too much of it
            far_us = 1.8 * ONE_WAY_S * 1e6
            await until(lambda: router.condition.read().store_us >= far_us, what="both ways of the line count")
            line.heal()
            await until(lambda: router.condition.read().store_us < far_us, what="the store is nearer")


async def test_with_an_index_of_its_own_a_router_waits_for_nothing_and_books_behind_the_answer() -> None:
    async with (
        store_with_a_line() as (near, line),
        connected_store(f"redis://{LOOPBACK}:{line.port}", wait=False) as store,
    ):
        index, reservations = MemoryIndex(), RedisReservations(store)
        await hold(index, WORKERS[HOLDER], TOKENS)
        router = RouterClient(index, StaticFleet(WORKERS), reservations=reservations, store=store)
        line.delay_s = ONE_WAY_S
        async with router:
            await until(lambda: router.condition.read().store_is_far, what="the store is far")
            await router.workers(SCOPE)
            line.stall()
            choices = [await router.reserve(PROMPT) for _ in range(3)]
            assert all(choice.basis is Basis.COST and not choice.why for choice in choices)
            first, *others = choices
            await first.done()  # it ends before the store knows of it
            line.heal()
            seen = RedisReservations(near)

            async def booked() -> int:
                ids = [choice.reservation.id for choice in choices if choice.reservation is not None]
                return len(await seen.find_booked(SCOPE.pool_id, ids))

            await until(lambda: _is(booked, 2), what="the store has the others' bookings")
            for choice in others:
                await choice.done()
            await until(lambda: _is(booked, 0), what="and no longer")


async def test_no_choice_waits_for_the_try_of_an_index_that_has_failed() -> None:
    index = BreakableIndex()
    await hold(index.index, WORKERS[HOLDER], TOKENS)
    router = RouterClient(index, StaticFleet(WORKERS), RouterSettings(deadline_ms=600_000, most_deadline_ms=600_000))
    index.broken = "away"
    for _ in range(3):
        await router.reserve(PROMPT, dry_run=True)
    index.broken, asked = "slow", index.asked

    async def tried() -> bool:
        assert (await router.reserve(PROMPT, dry_run=True)).basis is Basis.LOAD
        return index.asked > asked

    with anyio.fail_after(60):
        await until(tried, what="the index is tried again")
    await router.__aexit__(None, None, None)


async def _is(count: Callable[[], Awaitable[int]], expected: int) -> bool:
    return await count() == expected
