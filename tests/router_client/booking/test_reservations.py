"""Booked choices: what other routers see of them, and how bookings end."""

import asyncio
import sys

import anyio
import pytest

from kvatlas.cost import Load
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.fleet.records import FleetRecord
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.reservations import MemoryReservations, RedisReservations, Reservations
from kvatlas.store.connection import Store, connected_store
from router_client import (
    BookingSettings,
    Choice,
    NoWorkers,
    Prompt,
    RouterClient,
    RouterSettings,
    StaticFleet,
)
from tests.eventually import until
from tests.router_client.pools import SCOPE, hold, pool, worker

pytestmark = pytest.mark.anyio

LONG = list(range(8_192))
SETTINGS = RouterSettings(deadline_ms=None)


@pytest.fixture(params=["memory", "redis"])
def reservations(request: pytest.FixtureRequest, store: Store) -> Reservations:
    return MemoryReservations() if request.param == "memory" else RedisReservations(store)


def routers(
    count: int, reservations: Reservations, *ids: str, settings: RouterSettings = SETTINGS
) -> list[RouterClient]:
    """Routers that share nothing but the reservations."""
    fleet = StaticFleet(pool(*(worker(id) for id in ids)))
    return [RouterClient(MemoryIndex(), fleet, settings, reservations=reservations) for _ in range(count)]


def short(number: int) -> Prompt:
    return Prompt.of_tokens(SCOPE, [number] * 100)


async def booked(router: RouterClient) -> dict[str, Load]:
    """Each worker's load as the next request would find it."""
    ranking = await router.rank(short(0))
    return {r.worker_id: Load(r.cost.amounts[4] - 1, r.cost.amounts[0], 0, r.cost.amounts[5] - 100) for r in ranking}


async def test_routers_see_each_others_bookings(reservations: Reservations) -> None:
    first, second = routers(2, reservations, "a", "b", "c")
    choices = [await router.reserve(short(n)) for n, router in enumerate([first, second, first, second, first, second])]
    assert sorted(choice.worker_id for choice in choices) == ["a", "a", "b", "b", "c", "c"]
    assert set((await booked(second)).values()) == {Load(2, 200, 0, 200)}


async def test_a_reservation_lasts_as_long_as_the_block(reservations: Reservations) -> None:
    router, other = routers(2, reservations, "a")
    async with router.route(short(1)) as choice:
        assert await booked(other) == {"a": Load(1, 100, 0, 100)}
        await choice.first_token()
        assert await booked(other) == {"a": Load(1, 0, 0, 100)}
    assert await booked(other) == {"a": Load()}
    assert (router.counters.routed, router.counters.booked, router.counters.released) == (1, 1, 1)


@pytest.mark.parametrize("leave", ["exception", "cancelled", "finish", "fail"])
async def test_every_way_out_of_the_block_ends_the_reservation(reservations: Reservations, leave: str) -> None:
    router, other = routers(2, reservations, "a")

    async def request() -> None:
        async with router.route(short(1)) as choice:
            if leave == "exception":
                raise ZeroDivisionError
            if leave == "cancelled":
                scope.cancel()
                await anyio.sleep(60)
            await (choice.done() if leave == "finish" else choice.done(status=0))
            await until(nothing_left, what="the reservation is released before the block is left")

    async def nothing_left() -> bool:
        return await booked(other) == {"a": Load()}

    async with router:
        with anyio.CancelScope() as scope:
            if leave == "exception":
                with pytest.raises(ZeroDivisionError):
                    await request()
            else:
                await request()

        await until(nothing_left, what="the reservation is released")


async def test_a_pick_books_nothing(reservations: Reservations) -> None:
    router, other = routers(2, reservations, "a")
    choice = await router.reserve(short(1), dry_run=True)
    await choice.first_token()
    await choice.done()
    assert await booked(other) == {"a": Load()}
    assert choice.reservation is None


async def test_workers_can_be_avoided(reservations: Reservations) -> None:
    (router,) = routers(1, reservations, "a", "b")
    for avoid, chosen in [(["a"], "b"), (["b", "gone"], "a")]:
        async with router.route(short(1), avoid=avoid) as choice:
            assert choice.worker_id == chosen
            assert "a" not in avoid or choice.ranking.left_out == {"a": "the caller avoids it"}
    with pytest.raises(NoWorkers, match="none of 2 workers"):
        await router.reserve(short(1), avoid=["a", "b"])


async def test_ties_spread_evenly_and_depend_on_the_seed(reservations: Reservations) -> None:
    def picks(choices: list[Choice]) -> list[str]:
        return [choice.worker_id for choice in choices]

    ids = [f"w{i}" for i in range(4)]
    (one,) = routers(1, reservations, *ids)
    (same,) = routers(1, reservations, *ids)
    (other,) = routers(1, reservations, *ids, settings=RouterSettings(deadline_ms=None, seed=5))
    by_router = [
        picks([await router.reserve(short(n), dry_run=True) for n in range(120)]) for router in (one, same, other)
    ]
    assert by_router[0] == by_router[1] != by_router[2]
    assert all(min(picked.count(id) for id in ids) > 12 for picked in by_router)


async def test_a_burst_on_one_new_prefix_is_computed_by_few(reservations: Reservations) -> None:
    ids = [f"w{i:02}" for i in range(16)]
    several = routers(4, reservations, *ids)
    longer = range(65_536)  # its prefill takes seconds, so the burst is over first, however slow the machine
    choices = [
        await several[n % 4].reserve(Prompt.of_tokens(SCOPE, [*longer, *range(100_000 + n, 100_100 + n)]))
        for n in range(100)
    ]
    assert len({choice.worker_id for choice in choices}) <= 8
    assert choices[0].result.predicted_tokens == 0
    assert choices[1].result.predicted_tokens >= 65_408  # whole steps of 8 blocks
    assert "more predicted" in choices[1].explain()
    apart = RouterSettings(deadline_ms=None, booking=BookingSettings(prefixes_in_flight=False))
    (blind,) = routers(1, MemoryReservations(), *ids, settings=apart)
    assert len({(await blind.reserve(Prompt.of_tokens(SCOPE, [*LONG, n]))).worker_id for n in range(100)}) == 16


async def test_a_failed_request_leaves_no_prefix_behind(reservations: Reservations) -> None:
    (router,) = routers(1, reservations, "a", "b")
    prompt = Prompt.of_tokens(SCOPE, LONG)
    first = await router.reserve(prompt)
    assert (await router.rank(prompt)).results[0].predicted_tokens
    await first.done(status=0)
    assert not any(result.predicted_tokens for result in await router.rank(prompt))
    async with router.route(prompt) as second:
        await second.first_token()
    found = (await router.rank(prompt)).results[0]
    assert (found.worker_id, found.predicted_tokens) == (second.worker_id, LONG[-1] + 1 - 16)


async def test_costs_have_terms_for_prefixes_in_flight_that_add_up(reservations: Reservations) -> None:
    (router,) = routers(1, reservations, "a", "b")
    prompt = Prompt.of_tokens(SCOPE, LONG)
    first = await router.reserve(prompt)
    ranking = await router.rank(prompt)
    for result in ranking:
        assert sum(term.us for term in result.terms) == result.score_us
    terms = {result.worker_id: {term.name: term for term in result.terms} for result in ranking}
    other = "b" if first.worker_id == "a" else "a"
    assert terms[first.worker_id]["in_flight"].amount == 8_176
    assert terms[other]["again"].amount == 8_176
    assert terms[other]["again"].us == pytest.approx(8_176 * 40 + 0.00065 * 8_176**2, abs=1)


async def test_the_cache_of_an_engine_without_events_is_predicted(reservations: Reservations) -> None:
    fleet = StaticFleet(pool(*(worker(id, events=False) for id in ("a", "b", "c"))))
    router = RouterClient(MemoryIndex(), fleet, SETTINGS, reservations=reservations)
    async with router.route(Prompt.of_tokens(SCOPE, LONG)) as first:
        await first.first_token()
    async with router.route(Prompt.of_tokens(SCOPE, [*LONG, 1, 2, 3])) as again:
        assert again.worker_id == first.worker_id
        assert (again.result.usable_tokens, again.result.predicted_tokens) == (0, 8_192)
        assert again.predicted_cached_tokens == 8_192


async def test_a_prefix_is_not_computed_twice_on_workers_that_have_announced_no_block_yet(
    reservations: Reservations,
) -> None:
    fleet = StaticFleet(pool(*(worker(id, block_size=None) for id in ("a", "b", "c"))))
    router = RouterClient(MemoryIndex(), fleet, SETTINGS, reservations=reservations)
    assert len({(await router.reserve(Prompt.of_tokens(SCOPE, LONG))).worker_id for _ in range(6)}) == 1


async def test_blocks_in_the_index_are_no_longer_predicted(reservations: Reservations) -> None:
    index, a = MemoryIndex(), worker("a")
    router = RouterClient(index, StaticFleet(pool(a)), SETTINGS, reservations=reservations)
    async with router.route(Prompt.of_tokens(SCOPE, LONG)):
        pass
    await hold(index, a, LONG)
    choice = await router.reserve(Prompt.of_tokens(SCOPE, LONG))
    assert (choice.result.usable_tokens, choice.result.predicted_tokens) == (8_176, 0)


# ---------------------------------------------------------------- leases

CHILD = """
import asyncio, sys
from router_client import BookingSettings, Prompt, RouterClient, RouterSettings, Scope

async def main():
    settings = RouterSettings(deadline_ms=None, booking=BookingSettings(lease_s=0.6))
    async with RouterClient.open(sys.argv[1], settings, wait=False) as router:
        async with router.route(Prompt.of_tokens(Scope("model", "tokenizer"), [7] * 5_000)) as choice:
            print(choice.worker_id, flush=True)
            await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_killed_router_frees_its_reservations(store: Store, valkey_url: str) -> None:
    await open_redis_index(store, writer=True)
    await FleetStore(store).write(pool(worker("a"), worker("b")))
    async with RouterClient.open(valkey_url, SETTINGS, wait=False) as router:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CHILD, valkey_url), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert child.stdout is not None
            worker_id = (await child.stdout.readline()).decode().strip()
            # its lease is renewed: it still counts after several lease times
            mine = await router.reserve(short(1))
            assert mine.worker_id != worker_id
            assert (await booked(router))[worker_id] == Load(1, 5_000, 0, 5_000)
        finally:
            child.kill()
            await child.wait()

        async def freed() -> bool:
            await mine.first_token()
            await (await router.reserve(short(2))).done(status=0)  # any router's booking looks for ended leases
            return (await booked(router))[worker_id] == Load()

        await until(freed, what="the killed router's reservation is gone")


async def test_leases_are_renewed_while_the_client_is_entered(store: Store, valkey_url: str) -> None:
    await open_redis_index(store, writer=True)
    await FleetStore(store).write(pool(worker("a")))
    settings = RouterSettings(deadline_ms=None, router_id="r", booking=BookingSettings(lease_s=0.3))
    reservations = RedisReservations(store)
    async with RouterClient.open(valkey_url, settings, wait=False) as router:
        await router.reserve(short(1))
        deadlines = f"kva:{{pool:{SCOPE.pool_id}}}:deadlines.2"
        first = await store.client.zscore(deadlines, "lr")

        async def renewed() -> bool:
            await reservations.renew_lease(SCOPE.pool_id, "other", 60_000_000)  # would end what is over
            return bool(await store.client.zscore(deadlines, "lr") > first + 600_000)

        await until(renewed, what="the lease is renewed again and again")
        assert router.counters.lapsed == 0
        assert await booked(router) == {"a": Load(1, 100, 0, 100)}
    assert await store.client.zscore(deadlines, "lother") is not None
    assert await store.client.zscore(deadlines, "lr") is None
    assert await store.client.hlen(f"kva:{{pool:{SCOPE.pool_id}}}:reservations.2") == 0


async def test_a_release_that_the_store_did_not_receive_is_repeated_when_it_is_back() -> None:
    with ValkeyProcess() as server:
        async with connected_store(server.url, wait=False) as store:
            await open_redis_index(store, writer=True)
            await FleetStore(store).write(pool(worker("a")))
            settings = RouterSettings(booking=BookingSettings(lease_s=30))
            async with RouterClient.open(server.url, settings, wait=False) as router:
                choice = await _booked_in_store(router)
                server.pause()
                try:
                    await choice.done()  # in time, although the store hears nothing
                finally:
                    server.resume()

                async def released() -> bool:
                    return int(await store.client.zcard(f"kva:{{pool:{SCOPE.pool_id}}}:booked.2")) == 0

                await until(released, what="the release is repeated")


async def _booked_in_store(router: RouterClient) -> Choice:
    """Choose until a choice is booked in the store: the first one may take longer than the deadline."""
    while True:
        choice = await router.reserve(short(1))
        if not choice.why:
            return choice
        await choice.done(status=0)


async def test_bookings_outlive_a_snapshot_and_late_reports_change_nothing(store: Store, valkey_url: str) -> None:
    index = await open_redis_index(store, writer=True)
    fleet = FleetStore(store)

    def told(number: int) -> dict[str, FleetRecord]:
        return {"a": worker("a").model_copy(update={"incarnation": number})}

    await fleet.write(told(5))
    router = RouterClient(index, fleet, SETTINGS, reservations=RedisReservations(store))
    choice = await router.reserve(Prompt.of_tokens(SCOPE, LONG))
    await fleet.write(told(5))
    assert (await booked(router))["a"].running_decodes == 1
    for incarnation in (6, 4):
        await fleet.write(told(incarnation))
        assert (await booked(router))["a"].running_decodes == 1
        assert (await router.rank(Prompt.of_tokens(SCOPE, LONG))).results[0].predicted_tokens
    await choice.done()
    assert await booked(router) == {"a": Load()}


async def test_the_worked_example_of_the_documentation() -> None:
    (router,) = routers(1, MemoryReservations(lambda: 10**15), "a", "b")
    prompt = Prompt.of_tokens(SCOPE, LONG)
    first = (await router.reserve(prompt)).worker_id
    terms = {r.worker_id: {term.name: term.us for term in r.terms} for r in await router.rank(prompt)}
    other = "b" if first == "a" else "a"
    assert (terms[first]["backlog"], terms[first]["in_flight"]) == (327_680, 43_621)
    assert (terms[other]["prefill"], terms[other]["again"]) == (371_301, 370_491)
