"""Both workers of a pair are booked in one call, and released together."""

from typing import Any

import pytest

from kvatlas.cost import Load
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.redis.index import open_redis_index
from kvatlas.reservations import MemoryReservations, RedisReservations, Reservations
from kvatlas.reservations.protocol import MOST_OFFERS
from kvatlas.store.connection import Store, connected_store
from router_client import (
    BookingSettings,
    PairSettings,
    Prompt,
    RouterClient,
    RouterSettings,
)
from tests.eventually import until
from tests.router_client.pools import SCOPE, pool, worker
from tests.router_client.pricing.pairs import PROMPT, QUEUED, TOKENS, decode, load, prefill, router

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["memory", "redis"])
def reservations(request: pytest.FixtureRequest, store: Store) -> Reservations:
    return MemoryReservations() if request.param == "memory" else RedisReservations(store)


async def test_both_workers_are_booked_and_released_together(reservations: Reservations) -> None:
    records = pool(prefill("p"), decode("d"), decode("e", load={"running_decodes": 90}))
    client = await router(records, reservations, pairs=PairSettings(least_new_tokens=0))
    blocked = [await client.reserve_pd(PROMPT)]
    assert blocked[0].prefill is None  # a worker that has nothing to do needs no partner
    assert (await load(reservations, "d")).queued_prefill_tokens == 8_000
    async with client.route_pd(Prompt.of_tokens(SCOPE, [9] * 8_000)) as pair:
        assert pair.prefill is not None
        assert (pair.prefill.worker_id, pair.worker_id) == ("p", "d")
        assert await load(reservations, "p") == Load(1, 8_000, 0, 8_000)
        assert await load(reservations, "d") == Load(2, 8_000, 0, 16_000)
        await pair.first_token()
        assert await load(reservations, "p") == Load()
        assert await load(reservations, "d") == Load(2, 8_000, 0, 16_000)
    assert await load(reservations, "d") == Load(1, 8_000, 0, 8_000)
    await blocked[0].done()
    assert await load(reservations, "d") == Load()
    assert (client.counters.routed, client.counters.pairs) == (2, 1)
    assert (client.counters.booked, client.counters.released) == (3, 3)


async def test_a_failure_releases_both_workers(reservations: Reservations) -> None:
    client = await router(pool(prefill("p"), decode("d", load=QUEUED)), reservations)
    before = await load(reservations, "d")
    with pytest.raises(ZeroDivisionError):
        async with client.route_pd(PROMPT):
            raise ZeroDivisionError
    assert (await load(reservations, "p"), await load(reservations, "d")) == (Load(), before)
    ranking = (await client.reserve_pd(PROMPT, dry_run=True)).prefill
    assert ranking is not None and not ranking.result.predicted_tokens


async def test_a_prefix_that_a_prefill_worker_computes_is_not_computed_twice(reservations: Reservations) -> None:
    records = pool(prefill("p"), prefill("q"), decode("d", load=QUEUED))
    client = await router(records, reservations)
    pairs = [await client.reserve_pd(Prompt.of_tokens(SCOPE, [*TOKENS, *([n] * 20)])) for n in range(10)]
    assert len({pair.prefill.worker_id for pair in pairs if pair.prefill}) == 1
    assert all(pair.prefill and pair.prefill.result.predicted_tokens >= 7_900 for pair in pairs[1:])


async def test_bookings_of_pairs_are_seen_by_all(reservations: Reservations) -> None:
    records = pool(prefill("p"), prefill("q"), decode("d", load=QUEUED), decode("e", load=QUEUED))
    clients = [await router(records, reservations) for _ in range(2)]
    chosen = [await clients[n % 2].reserve_pd(Prompt.of_tokens(SCOPE, [n] * 8_000)) for n in range(4)]
    assert sorted(pair.prefill.worker_id for pair in chosen if pair.prefill) == ["p", "p", "q", "q"]
    assert sorted(pair.worker_id for pair in chosen) == ["d", "d", "e", "e"]


async def test_of_more_workers_than_one_ask_may_name_the_cheapest_are_asked_about(reservations: Reservations) -> None:
    records = pool(*(one for n in range(110) for one in (prefill(f"p{n}"), decode(f"d{n}", load=QUEUED))))
    client = await router(records, reservations)
    pair = await client.reserve_pd(PROMPT)
    assert pair.prefill is not None and pair.mode == "cost"
    ranking = await (await router(pool(*(worker(f"w{n}", load={}) for n in range(300))), reservations)).rank(PROMPT)
    assert len(ranking.results) == MOST_OFFERS


async def test_a_store_that_hangs_delays_no_pair() -> None:
    records = pool(prefill("p"), prefill("q"), decode("d", load=QUEUED))
    with ValkeyProcess() as server:
        async with connected_store(server.url, wait=False) as store:
            await open_redis_index(store, writer=True)
            await FleetStore(store).write(records)
            async with RouterClient.open(server.url, RouterSettings(deadline_ms=20), wait=False) as client:

                async def by_cost() -> bool:
                    async with client.route_pd(PROMPT) as pair:
                        return pair.prefill is not None and not pair.decode.why

                await until(by_cost, what="a pair by cost")
                server.pause()
                try:
                    pairs = [await client.reserve_pd(Prompt.of_tokens(SCOPE, [n] * 8_000)) for n in range(4)]
                finally:
                    server.resume()
                # it sees its own bookings, so the prompts are spread
                assert sorted(pair.prefill.worker_id for pair in pairs if pair.prefill) == ["p", "p", "q", "q"]
                assert all(pair.decode.why for pair in pairs)
                for pair in pairs:
                    await pair.done()
                await until(by_cost, what="a pair by cost again")

                async def nothing_booked() -> bool:
                    return int(await store.client.zcard(f"kva:{{pool:{SCOPE.pool_id}}}:booked.2")) == 0

                await until(nothing_booked, what="bookings made in spite of the time-out are cancelled")


async def test_without_reservations_a_pair_is_chosen_by_reported_load() -> None:
    records = pool(prefill("p", load=QUEUED), prefill("q", load={"queued_prefill_tokens": 0}), decode("d", load=QUEUED))
    client = await router(records, booking=BookingSettings(reservations=False))
    pair = await client.reserve_pd(PROMPT)
    assert pair.prefill is not None and pair.prefill.worker_id == "q"
    await pair.done()


async def test_a_full_worker_is_no_part_of_a_pair(reservations: Reservations) -> None:
    def metrics(running: int) -> dict[str, Any]:
        sizes = {"total_request_slots": 8, "total_kv_blocks": 2_000}
        return {"running_decodes": running, "queued_prefill_tokens": 20_000, "forward_pass": sizes}

    records = pool(prefill("p"), decode("d", load=metrics(8)), decode("e", load=metrics(1)))
    client = await router(records, reservations)
    assert (await client.reserve_pd(PROMPT, dry_run=True)).worker_id == "e"
    small = pool(prefill("p"), decode("d", load={"forward_pass": {"total_kv_blocks": 400}}), decode("e"))
    client = await router(small, reservations)
    assert (await client.reserve_pd(PROMPT, dry_run=True)).worker_id == "e"  # 8,000 tokens need 500 blocks
