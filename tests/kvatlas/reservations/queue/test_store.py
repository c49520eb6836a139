"""What the queue keeps in the store, refuses, and forgets there."""

import pytest

from kvatlas.reservations import QueueLimits, RedisReservations, WaitingRequest
from kvatlas.reservations.pool_queue import MOST_COUNTERS
from kvatlas.reservations.redis_calls import call_pool, pool_keys
from kvatlas.store.connection import Store
from tests.kvatlas.reservations.asks import POOL, Clock, id_of
from tests.kvatlas.reservations.queue.line import LIMITS, Line

pytestmark = pytest.mark.anyio


async def test_the_queue_leaves_nothing_behind(store: Store, clock: Clock) -> None:
    line = Line(RedisReservations(store), clock)
    await line.idle()
    first, _ = await line.ask(program="agent")
    for n in range(5):
        await line.ask(f"t{n % 2}", router=f"r{n}", workers=("a",) if n % 2 else None)
    ends = await store.client.zrange(pool_keys(POOL)[9], 0, -1)
    assert {member[:1] for member in ends} <= {b"r", b"l"}  # routers without a queue would mistake others for their own
    await line.serve(first)
    for key in pool_keys(POOL)[17:23]:
        kind = await store.client.type(key)
        size = await store.client.hlen(key) if kind == b"hash" else await store.client.exists(key)
        assert size <= 4, key


async def test_rows_out_of_bounds_are_refused(store: Store) -> None:
    import msgpack
    from redis.exceptions import ResponseError

    good = [id_of(1), "0" * 16, 1_000, 0, "", 10, 10, 0, 1_000, "0" * 16, 0, 5, 5]
    for at, value in (
        (0, b"short"),
        (1, "x"),
        (2, 0),
        (3, -1),
        (5, 1e300),
        (5, "a"),
        (9, 5),
        (10, ["w"] * 65),
        (11, -1),
    ):
        row = [*good[:at], value, *good[at + 1 :]]
        with pytest.raises(ResponseError):
            await call_pool(store, "queue", POOL, ["r", b"", msgpack.packb([row], use_bin_type=False)])


async def test_counters_of_tenants_that_do_not_wait_are_bounded(store: Store) -> None:
    reservations = RedisReservations(store)
    await reservations.turns(POOL, "r", [], [WaitingRequest(id_of(1), "stays", LIMITS, 10)])
    for first in range(0, 2_400, 300):
        rows = [WaitingRequest(id_of(10 + n), f"t{first + n}", QueueLimits(9_999, 10**9), 10) for n in range(300)]
        await reservations.turns(POOL, "r", [], rows)
        await reservations.turns(POOL, "r", [row.id for row in rows], [])
    counters = pool_keys(POOL)[19]
    assert 300 < await store.client.hlen(counters) <= MOST_COUNTERS
    assert (await reservations.turns(POOL, "r", [], [])).own == 1
