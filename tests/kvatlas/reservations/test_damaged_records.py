"""Keys of a pool that were changed by hand: no call fails forever, the next report says so, and choices continue."""

import logging
import random
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import msgpack
import pytest

from kvatlas.cost import Load
from kvatlas.cost.regression import FORM, SUMS, Evidence
from kvatlas.ejection import EjectionChange, EjectionStore, Verdict
from kvatlas.ejection.store import ejections_key
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.predictions.accuracy import AnswerReport
from kvatlas.predictions.store import answers_key, read_stored_reports, write_answer_report
from kvatlas.reservations import (
    Ask,
    Booking,
    LoadReport,
    LookAlikes,
    LookAlikesUnknown,
    MustWait,
    Outcome,
    QueueIsFull,
    QueueLimits,
    RedisReservations,
    WaitingRequest,
    WorkerReport,
)
from kvatlas.reservations.protocol import Fetching
from kvatlas.reservations.redis import write_reports
from kvatlas.reservations.redis_calls import POOL_LIBRARY, call_pool, pool_keys
from kvatlas.reservations.room_and_slo import Limit, Limits
from kvatlas.store.connection import Store
from tests.kvatlas.lua_text import constants
from tests.kvatlas.reservations.asks import LEASE_US, LONGEST_US, POOL, SECOND_US, Clock, ask, id_of, offer, steps
from tests.router_client.pools import worker

pytestmark = pytest.mark.anyio

KEYS: Mapping[str, str] = {key.rpartition(":")[2].partition(".")[0]: key for key in pool_keys(POOL)}
HASHES = (
    *("load", "reservations", "predictions", "anchors", "groups", "routers", "rates"),
    *("queued_requests", "queue_numbers", "queue_counters", "queue_charges"),
)
SETS = (
    "booked",
    "owned",
    "predicted",
    "deadlines",
    "samples",
    "order_queued",
    "order_mix",
    "queue_lines",
    "queue_deadlines",
)
LIKENESS = b"likeness"
WORKERS = ("a", "b", "c")
FAR_US = 1 << 60
FAMILY = constants(POOL_LIBRARY.source("_orders"))["FAMILY"]
VALUES = [
    b"",
    b"\xc1",
    b"text",
    bytes(119),
    b"\xff" * 40,
    struct.pack(">15d", *[float("nan")] * 15),
    struct.pack(">15d", *[float("inf")] * 15),
    struct.pack(">15d", *[1.0] * 15) + b"no number",
    struct.pack(">15d", FAR_US, FAR_US, *[0.0] * 13),
    msgpack.packb(["a"]),
    msgpack.packb({"worker": "a"}),
    msgpack.packb(["a", "o", float("nan"), 1, 1, 1, 1]),
    msgpack.packb(["a", 1, 1, 1, 1, 0, 0, "1234567", 1, 1], use_bin_type=False),
    msgpack.packb([1, 2, ["x"] * SUMS]),
]
MEMBERS = [
    b"",
    b"x",
    b"p",
    b"s",
    b"sa\x00text",
    b"o",
    b"wnobody",
    b"lnobody",
    b"a\x00" + b"0" * 15,
    b"nobody",
    b"0123456xnobody",
    b"qnobody",
    b"e",
    b"ax",
    b"t" + b"0" * 24,
    b"p" + b"0" * 40 + b"1x",
]


@pytest.fixture
def reservations(store: Store, clock: Clock) -> RedisReservations:
    return RedisReservations(store)


def asked(number: int) -> Ask:
    fetching = Fetching(tuple(WORKERS), SECOND_US)
    offers = [offer(worker, chain=0, capacity_steps=8, fetching=fetching) for worker in WORKERS]
    return ask(offers, steps(number // 20, 1, 2, 3))


def look_alikes_asked() -> Ask:
    return Ask((), look_alikes=[LookAlikes(LIKENESS, offer(""))])


async def report(store: Store) -> int:
    """Number of repairs of the pool since the last report."""
    one = WorkerReport(7, LoadReport(Load(1, 10, 0, 10)), LIKENESS)
    damage = await write_reports(store, POOL, dict.fromkeys(WORKERS, (b"record", one)))
    return damage.times if damage else 0


async def use(reservations: RedisReservations, store: Store, clock: Clock, number: int) -> int:
    """Make every call that routers and indexers make. Returns the number of repairs of the pool. Raises what the calls
    raise."""
    for one in range(number, number + 3):
        await reservations.book(POOL, Booking(id_of(one), "r", 100, asked(number), LEASE_US, LONGEST_US))
    list((await reservations.evaluate(POOL, asked(number))).by_offer)
    await reservations.record_first_token(POOL, id_of(number))
    await reservations.release(POOL, id_of(number + 1), Outcome.FINISHED)
    await reservations.renew_lease(POOL, "r", LEASE_US)
    full = replace(asked(number), limits=Limits([Limit(1)] * len(WORKERS), 100))
    for one in range(number, number + 3):
        waiting = WaitingRequest(id_of(1_000 + one), f"t{one % 2}", QueueLimits(9, 900), 100, left_us=2 * SECOND_US)
        booking = Booking(id_of(2_000 + one), "r", 100, full, LEASE_US, LONGEST_US, waiting=waiting)
        with suppress(MustWait, QueueIsFull):
            await reservations.book(POOL, booking)
    await reservations.turns(POOL, "r", [], [])
    await clock.pass_us(SECOND_US)
    repairs = await report(store)
    try:
        found = await reservations.book(
            POOL, Booking(id_of(number + 3), "q", 100, look_alikes_asked(), LEASE_US, LONGEST_US)
        )
        assert found is not None and found.worker_id in WORKERS
    except LookAlikesUnknown:
        repairs += await report(store)
        assert repairs, "the pool lost its workers without a repair"
    await reservations.add_evidence(POOL, {worker: Evidence(1, sums=(1.0,) * SUMS) for worker in WORKERS})
    await reservations.read_evidence(POOL)
    return repairs + await report(store)


async def damage_hash(store: Store, key: str, rng: random.Random) -> None:
    fields = await store.client.hkeys(key)
    field = rng.choice([*fields, *fields, b"stray", bytes(16)])
    if fields and rng.random() < 0.15:
        await store.client.hdel(key, field)
    else:
        await store.client.hset(key, field, rng.choice([*VALUES, rng.randbytes(rng.choice([8, 40, 120, 130]))]))


async def damage_set(store: Store, key: str, rng: random.Random) -> None:
    members = await store.client.zrange(key, 0, -1, withscores=True)
    if members and rng.random() < 0.3:
        await store.client.zrem(key, rng.choice(members)[0])
    else:
        scores = [0, 1, FAR_US, *(score for _, score in members)]
        await store.client.zadd(key, {rng.choice([*MEMBERS, rng.randbytes(20)]): rng.choice(scores)})


async def test_after_damage_every_call_works_again(reservations: RedisReservations, store: Store, clock: Clock) -> None:
    rng = random.Random(1)
    repairs = 0
    number = 0
    for part in (*HASHES, *SETS):
        await report(store)
        for _ in range(6):
            number += 4
            for _ in range(2):
                await (damage_hash if part in HASHES else damage_set)(store, KEYS[part], rng)
            repairs += await use(reservations, store, clock, number)
    assert repairs
    for _ in range(20):  # the rest ends by itself
        await clock.pass_us(LONGEST_US)
        await report(store)
    booking = Booking(id_of(number + 10), "r", 100, look_alikes_asked(), LEASE_US, LONGEST_US)
    evaluation = await reservations.book(POOL, booking)
    assert evaluation is not None and evaluation.worker_id in WORKERS


async def test_a_damaged_record_is_found_where_it_is_needed_and_told_once(
    reservations: RedisReservations, store: Store, clock: Clock
) -> None:
    for number, part in enumerate(("load", "reservations", "predictions", "anchors", "groups", "order_mix")):
        await report(store)
        booking = Booking(id_of(number), "r", 100, asked(1), LEASE_US, LONGEST_US)
        await reservations.book(POOL, booking)
        if part == "order_mix":
            ((_, score),) = await store.client.zrange(KEYS[part], 0, 0, withscores=True)
            await store.client.zadd(KEYS[part], {b"no placenobody": score - score % FAMILY})
        else:
            fields = await store.client.hkeys(KEYS[part])
            sums = [field for field in fields if field.startswith(b"s") and field[1:].isdigit()]
            assert fields and (sums or part != "groups")
            await store.client.hset(KEYS[part], mapping=dict.fromkeys(sums if part == "groups" else fields, b"text"))
        await reservations.book(POOL, booking)
        await clock.pass_us(SECOND_US)
        told = await report(store)
        with suppress(LookAlikesUnknown):
            await reservations.book(POOL, Booking(id_of(100), "r", 100, look_alikes_asked(), LEASE_US, LONGEST_US))
        assert told + await report(store) == 1, part
        assert await report(store) == 0


async def test_a_key_of_another_type_is_dropped_and_written_again(
    reservations: RedisReservations, store: Store, clock: Clock
) -> None:
    await report(store)
    await use(reservations, store, clock, 0)
    for number, (part, key) in enumerate(KEYS.items(), start=1):
        await store.client.delete(key)
        await store.client.set(key, "text")
        repairs = 0 if part == "queue_lines" else 1  # a queue starts these anew when nothing waits
        assert await use(reservations, store, clock, 10 * number) == repairs, part
        assert await store.client.type(key) != b"string", part
        assert await use(reservations, store, clock, 10 * number + 5) == 0, part


async def test_sums_of_bookings_end_with_the_bookings_whatever_was_written_there(
    reservations: RedisReservations, store: Store, clock: Clock
) -> None:
    await report(store)
    await reservations.book(POOL, Booking(id_of(1), "r", 100, ask([offer("a")]), LEASE_US, LONGEST_US))
    await store.client.zremrangebyrank(KEYS["booked"], 0, -1)
    fields = list(struct.unpack(">15d", (await store.client.hget(KEYS["load"], "b"))[:120]))
    fields[6:9] = [1e9, -5.0, 1e9]
    await store.client.hset(KEYS["load"], "b", struct.pack(">15d", *fields) + b"7")
    await clock.pass_us(SECOND_US)
    await report(store)
    evaluations = (await reservations.evaluate(POOL, ask([offer("a"), offer("b")]))).by_offer
    assert [one.load for one in evaluations] == [Load(1, 10, 0, 10)] * 2


async def test_a_choice_that_only_reads_has_the_pool_repaired(
    reservations: RedisReservations, store: Store, clock: Clock
) -> None:
    await report(store)
    await store.client.hset(KEYS["load"], "b", b"text")
    assert (await reservations.evaluate(POOL, asked(1))).worker_id in WORKERS
    assert await report(store) == 1 and await report(store) == 0


async def test_an_indexers_report_counts_and_names_the_damage(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    fleet = FleetStore(store)
    record = worker("w1")
    await fleet.write({"w1": record})
    key = pool_keys(record.endpoint.pool_id)[1]
    await store.client.hset(key, "w1", b"text")
    with caplog.at_level(logging.WARNING, "kvatlas.fleet"):
        await fleet.write({"w1": record})
    assert fleet.pools_repaired == 1
    line = f"pool {record.endpoint.pool_id}: damaged in the store (load); its bookings and loads were dropped"
    assert line in caplog.text
    assert await store.client.hlen(key) == 1


async def test_an_error_that_is_no_damage_drops_nothing(reservations: RedisReservations, store: Store) -> None:
    await report(store)
    await reservations.book(POOL, Booking(id_of(1), "r", 100, asked(1), LEASE_US, LONGEST_US))
    with pytest.raises(Exception, match=r"(?i)bad data|missing bytes|nil"):
        await call_pool(store, "book", POOL, [id_of(2), "r", LEASE_US, LONGEST_US, 100, b"\xc1"])
    assert await store.client.hlen(KEYS["reservations"]) == 1
    assert await report(store) == 0


@pytest.mark.parametrize(
    "value", [b"\xc1", [FORM, 1, [1.0]], [FORM, 1, ["x"] * SUMS], [FORM, 1, [float("nan")] * SUMS]]
)
async def test_damaged_rates_are_left_out_and_replaced_by_the_next_evidence(
    value: object, reservations: RedisReservations, store: Store
) -> None:
    await report(store)
    packed = value if isinstance(value, bytes) else msgpack.packb(value)
    await store.client.hset(KEYS["rates"], mapping={"a": packed, b"\xff": packed})
    assert await reservations.read_evidence(POOL) == {}
    one = Evidence(1, sums=(1.0,) * SUMS)
    await reservations.add_evidence(POOL, {"a": one})
    assert await reservations.read_evidence(POOL) == {"a": one}


async def test_damaged_ejections_and_answers_are_dropped(store: Store) -> None:
    ejections = EjectionStore(store)
    change = EjectionChange("a", 0.0, 3.0, Verdict.EJECT, 0, 5.0)
    for value in [*VALUES, None]:
        await ejections.exchange(POOL, "r", [change._replace(worker_id="b")])
        if value is None:
            await store.client.delete(ejections_key(POOL))
            await store.client.set(ejections_key(POOL), "text")
        else:
            await store.client.hset(ejections_key(POOL), "a", value)
        found = await ejections.exchange(POOL, "r", [change])
        assert found["a"].bad == 3.0
    for value in VALUES:
        await store.client.hset(answers_key(POOL), "r", value)
        assert set(await read_stored_reports(store, POOL, 0)) <= {"q"}
        await write_answer_report(store, "q", POOL, AnswerReport())
        assert not await store.client.hexists(answers_key(POOL), "r")
