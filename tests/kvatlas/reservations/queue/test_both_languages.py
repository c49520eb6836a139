"""Python and Lua keep the same order."""

from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvatlas.reservations import (
    MemoryReservations,
    Outcome,
    QueueIsFull,
    QueueLimits,
    RedisReservations,
    Reservations,
    WaitingRequest,
)
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.store.connection import Store
from tests.kvatlas.reservations.asks import POOL, SECOND_US, Clock, id_of
from tests.kvatlas.reservations.queue.line import Line

pytestmark = pytest.mark.anyio

ROUTERS = ["r1", "r2", "r3"]
WORKERS = ("a", "b", "c")

requests_asked = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["t", "u", "v"]),
        "router": st.sampled_from(ROUTERS),
        "priority": st.sampled_from([-5, 0, 0, 0, 7]),
        "weight": st.sampled_from([0.5, 1.0, 3.0]),
        "program": st.sampled_from(["", "p", "q"]),
        "tokens": st.sampled_from([1, 70, 1_000]),
        "output_tokens": st.sampled_from([0, 33, 500]),
        "left_us": st.sampled_from([400_000, 5 * SECOND_US, 30 * SECOND_US]),
        "workers": st.sampled_from([None, None, ("a",), ("b",), ("a", "b"), ("b", "c")]),
        "may_wait": st.sampled_from([True, True, True, False]),
    }
)
steps = st.lists(
    st.tuples(st.just("ask"), requests_asked)
    | st.tuples(st.just("try"), st.sampled_from(ROUTERS))
    | st.tuples(st.just("leave"), st.integers(1, 30))
    | st.tuples(st.just("release"), st.integers(1, 30))
    | st.tuples(st.just("off"), st.integers(1, 30))
    | st.tuples(st.just("end"), st.tuples(st.integers(1, 30), st.sampled_from([0, 33, 9_000])))
    | st.tuples(st.just("again"), st.integers(1, 30))
    | st.tuples(st.just("pass"), st.sampled_from([1, 90_000, 600_000, 70 * SECOND_US])),
    max_size=40,
)
called_off_before = [
    ("off", 1),
    ("ask", {"router": "r1", "tokens": 1, "left_us": 400_000}),
    ("ask", {"router": "r1", "tokens": 1, "left_us": 400_000}),
]


@given(steps=steps)
@example(steps=called_off_before)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_both_languages_keep_the_same_order(store: Store, clock: Clock, steps: list[tuple[str, object]]) -> None:
    await store.client.delete(*pool_keys(POOL))
    lines = [Line(each, clock, WORKERS) for each in (MemoryReservations(clock), RedisReservations(store))]
    for line in lines:
        await line.idle()

    async def step(line: Line, what: str, value: object) -> object:
        try:
            if what == "ask":
                return await line.ask(**value)  # type: ignore[arg-type]
            if what == "try":
                found = await line.reservations.turns(POOL, str(value), [], [])
                numbers = sorted(int.from_bytes(id, "big") - 1_000_000 for id in found.turns)
                return found, [await line.retry(number) for number in numbers[:1]]
            if what == "again":
                return int(str(value)) in line.requests and await line.retry(int(str(value)))
            if what == "leave" and int(str(value)) in line.requests:
                router, waiting, _ = line.requests[int(str(value))]
                return await line.reservations.turns(POOL, router, [waiting.id], [])
            if what == "release":
                await line.release(int(str(value)))
            if what == "off":
                await line.release(int(str(value)), outcome=Outcome.CALLED_OFF)
            if what == "end":
                await line.release(*value)  # type: ignore[misc]
        except QueueIsFull as error:
            return str(error)
        return None

    for what, value in steps:
        if what == "pass":
            await clock.pass_us(int(str(value)))
            for line in lines:
                await line.idle()
            continue
        memory, redis = [await step(line, what, value) for line in lines]
        assert memory == redis, (what, value)


async def test_both_languages_agree_at_their_bounds(store: Store, clock: Clock) -> None:
    random = Random(7)
    rows = []
    for number in range(1_300):
        limits, tenant = QueueLimits(5_000, 10**9), f"tenant {min(random.randrange(40), random.randrange(40))}"
        row = WaitingRequest(id_of(number), tenant, limits, random.randrange(1, 2_000), priority=random.randrange(60))
        sets = random.sample(range(30), random.randrange(1, 3)) if random.random() < 0.5 else None
        rows.append(row if sets is None else row.among([f"w{one}" for one in sets]))
    both: list[Reservations] = [MemoryReservations(clock), RedisReservations(store)]
    for first in range(0, len(rows), 100):
        router, some = f"r{first // 100 % 3}", rows[first : first + 100]
        memory, redis = [await each.turns(POOL, router, [], some) for each in both]
        assert memory == redis, first
    for _ in range(4):
        gone = [row.id for row in random.sample(rows, 300)]
        memory, redis = [await each.turns(POOL, "r1", gone, []) for each in both]
        assert memory == redis and memory.turns
