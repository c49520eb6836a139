"""The promises of every implementation of reservations about requests that wait for a worker with room."""

from dataclasses import replace

import pytest

from kvatlas.reservations import Booking, MustWait, Outcome, QueueIsFull, QueueLimits, WaitingRequest
from kvatlas.reservations.pool_queue import LEASE_US as QUEUE_LEASE_US
from kvatlas.reservations.pool_queue import PROGRAM_US
from kvatlas.reservations.protocol import PairLayout
from kvatlas.reservations.queue_lines import MOST_LANES, MOST_WINDOW
from kvatlas.reservations.waiting_request import Place, WaitReason
from tests.kvatlas.reservations.asks import LEASE_US, LONGEST_US, POOL, SECOND_US, Clock, id_of
from tests.kvatlas.reservations.queue.line import LIMITS, Line, slots

pytestmark = pytest.mark.anyio


async def test_a_request_waits_while_every_worker_is_full_and_takes_nothing(line: Line) -> None:
    first, worker = await line.ask()
    assert worker == "a"
    second, place = await line.ask(router="r2")
    assert place == Place(WaitReason.FULL, 0, 1, 1_000)
    assert (await line.reservations.evaluate(POOL, slots("a"))).by_offer[0].load.running_decodes == 1
    assert await line.turns("r2") == [second]
    await line.release(first)
    assert await line.retry(second) == "a"
    assert (await line.reservations.turns(POOL, "r2", [], [])).requests == 0


async def test_later_requests_of_other_routers_wait_behind_earlier_ones(line: Line) -> None:
    first, _ = await line.ask()
    second, _ = await line.ask(router="r2")
    await line.release(first)
    third, place = await line.ask(router="r1")
    assert place == Place(WaitReason.TURN, 1, 2, 2_000)
    assert (await line.turns("r1"), await line.turns("r2")) == ([], [second])
    assert await line.retry(third) == place
    assert await line.serve(second) == [second, third] or await line.retry(second) == "a"


async def test_tenants_share_by_service_not_by_requests(line: Line) -> None:
    first, _ = await line.ask("flood")
    flood = [(await line.ask("flood", router=f"r{n % 3}"))[0] for n in range(12)]
    modest = [(await line.ask("modest", router=f"r{n % 3}"))[0] for n in range(4)]
    order = await line.serve(first)
    assert sorted(order[:8]) == sorted([*flood[:4], *modest])
    assert order[8:] == flood[4:]


async def test_a_tenant_gets_by_its_weight_and_cached_tokens_count_a_tenth(line: Line) -> None:
    first, _ = await line.ask("x")
    heavy = [(await line.ask("heavy", weight=3.0))[0] for _ in range(9)]
    light = [(await line.ask("light"))[0] for _ in range(9)]
    order = await line.serve(first)
    assert len(set(order[:8]) & set(heavy)) == 6 and len(set(order[:8]) & set(light)) == 2


async def test_output_tokens_count_twice(line: Line) -> None:
    first, _ = await line.ask("x")
    chatty = [(await line.ask("chatty", output_tokens=500))[0] for _ in range(6)]
    terse = [(await line.ask("terse"))[0] for _ in range(12)]
    order = await line.serve(first)
    assert abs(2 * len(set(order[:9]) & set(chatty)) - len(set(order[:9]) & set(terse))) <= 2


async def test_priority_then_running_programs_then_deadlines_then_arrival(line: Line, clock: Clock) -> None:
    first, _ = await line.ask(program="agent")
    late, _ = await line.ask()
    soon, _ = await line.ask(left_us=20 * SECOND_US)
    agent, _ = await line.ask(program="agent")
    new, _ = await line.ask(program="new agent", left_us=25 * SECOND_US)
    urgent, place = await line.ask(priority=-1)
    assert place == Place(WaitReason.FULL, 0, 5, 5_000)
    assert await line.serve(first) == [urgent, agent, soon, new, late]
    await clock.pass_us(PROGRAM_US)
    await line.idle()
    first, _ = await line.ask()
    one, _ = await line.ask()
    await clock.pass_us(1)
    over, _ = await line.ask(program="agent")
    assert await line.serve(first) == [one, over]


async def test_requests_of_a_dead_router_give_way(line: Line, clock: Clock) -> None:
    first, _ = await line.ask()
    await line.ask(router="dead")
    await clock.pass_us(QUEUE_LEASE_US // 2)
    alive, _ = await line.ask(router="alive")
    await line.release(first)
    assert await line.turns("alive") == []
    await clock.pass_us(QUEUE_LEASE_US // 2)
    assert await line.turns("alive") == [alive]
    assert await line.retry(alive) == "a"


async def test_a_router_that_comes_back_gets_its_places_back(line: Line, clock: Clock) -> None:
    first, _ = await line.ask()
    slow, _ = await line.ask(router="slow")
    await clock.pass_us(QUEUE_LEASE_US)
    later, _ = await line.ask(router="fast")
    _, waiting, _ = line.requests[slow]
    found = await line.reservations.turns(
        POOL, "slow", [], [replace(waiting, age_us=QUEUE_LEASE_US, left_us=29_000_000)]
    )
    assert (found.own, found.requests, list(found.turns)) == (1, 2, [waiting.id])
    assert await line.turns("fast") == []
    await line.release(first)
    assert await line.retry(later) == Place(WaitReason.TURN, 1, 2, 2_000)


async def test_requests_leave_when_their_client_does_or_their_time_is_over(line: Line, clock: Clock) -> None:
    await line.ask()
    left, _ = await line.ask()
    short, _ = await line.ask(router="r2", left_us=300_000)
    last, _ = await line.ask(router="r2")
    found = await line.reservations.turns(POOL, "r", [line.requests[left][1].id], [])
    assert (found.own, found.requests, found.tokens) == (0, 2, 2_000)
    assert await line.turns("r2") == [short]
    await clock.pass_us(300_000)
    assert await line.turns("r2") == [last]


async def test_the_queue_is_bounded_but_a_full_one_keeps_no_other_tenant_out(line: Line) -> None:
    await line.ask()
    for _ in range(4):
        await line.ask("flood")
    few = QueueLimits(4, 1_000_000)

    async def ask(tenant: str, limits: QueueLimits) -> str | Place:
        line.number += 1
        waiting = WaitingRequest(id_of(1_000_000 + line.number), tenant, limits, 1_000)
        line.requests[line.number] = ("r", waiting, slots("a"))
        return await line.retry(line.number)

    with pytest.raises(QueueIsFull, match="4 requests of 4000 tokens wait already"):
        await ask("flood", few)
    for waiting in (5, 6):
        place = await ask("modest", few)
        assert isinstance(place, Place) and (place.requests, place.tokens) == (waiting, 1_000 * waiting)
    with pytest.raises(QueueIsFull, match="6 requests"):
        await ask("modest", few)
    with pytest.raises(QueueIsFull):
        await ask("flood", QueueLimits(100, 6_500))
    found = await line.reservations.turns(
        POOL, "r", [], [WaitingRequest(id_of(7), "flood", few, 1), WaitingRequest(id_of(8), "flood", LIMITS, 1)]
    )
    assert found.refused == {id_of(7)}


async def test_the_first_in_line_holds_up_only_workers_that_it_may_go_to(line: Line) -> None:
    line.workers = ("a", "b", "c")
    await line.idle()
    for worker in "abc":
        await line.ask(workers=(worker,))
    on_a, _ = await line.ask(workers=("a",))
    on_b, _ = await line.ask("u", workers=("b",))
    anywhere, _ = await line.ask("v", router="r2")
    assert await line.turns() == [on_a, on_b]
    await line.release(2)
    assert await line.retry(on_b) == "b"
    found = await line.reservations.turns(POOL, "r2", [], [])
    assert list(found.turns.values()) == [{"a"}]
    await line.release(1)
    assert await line.retry(anywhere) == Place(WaitReason.TURN, 0, 2, 2_000)
    await line.release(3)
    _, waiting, _ = line.requests[anywhere]
    line.requests[anywhere] = "r2", waiting, slots("b", "c")
    assert await line.retry(anywhere) == "c"
    assert await line.retry(on_a) == "a"


async def test_those_that_may_go_anywhere_hold_up_all_who_come_later(line: Line) -> None:
    line.workers = ("a", "b")
    await line.idle()
    first, _ = await line.ask(workers=("a",))
    await line.ask(workers=("b",))
    anywhere, _ = await line.ask()
    await line.ask("u", workers=("a",))
    assert await line.turns() == [anywhere]
    await line.release(first)
    assert await line.retry(anywhere) == "a"


async def test_many_may_be_tried_at_once_as_long_as_there_is_room(line: Line) -> None:
    line.workers = tuple(f"w{number}" for number in range(8))
    await line.idle()
    running = [(await line.ask())[0] for _ in range(8)]
    waiting = [(await line.ask(router=f"r{number % 2}"))[0] for number in range(10)]
    for number in running:
        await line.release(number)
    tried = []
    for _ in range(8):
        turns = [*await line.turns("r0"), *await line.turns("r1")]
        tried.append(len(turns))
        if isinstance(await line.retry(turns[-1]), Place):
            break
    assert tried[:4] == [1, 2, 4, 7]
    assert len(waiting) == 10


async def test_a_pair_waits_until_both_have_room(line: Line) -> None:
    line.workers = ("p", "d")
    await line.idle()
    layout = PairLayout(1, 1, [0], [[0.0]])
    pair = replace(slots("p", "d"), pair_layout=layout)
    waiting = WaitingRequest(id_of(99), "t", LIMITS, 1_000)
    await line.ask(workers=("d",))
    booking = Booking(id_of(70), "r", 1_000, pair, LEASE_US, LONGEST_US, id_of(71), waiting)
    with pytest.raises(MustWait):
        await line.reservations.book(POOL, booking)
    await line.release(1)
    found = await line.reservations.book(POOL, booking)
    assert found is not None and (found.worker_id, found.prefill) == ("d", 0)


async def test_after_a_failover_that_lost_the_queue_it_is_built_again(line: Line) -> None:
    first, _ = await line.ask()
    waiting = [(await line.ask(tenant, router=router))[0] for tenant, router in (("t", "r1"), ("u", "r2"), ("t", "r1"))]
    for router in ("r1", "r2"):
        ids = [line.requests[number][1].id for number in waiting if line.requests[number][0] == router]
        await line.reservations.turns(POOL, router, ids, [])
    for router in ("r2", "r1"):
        rows = [line.requests[number][1] for number in waiting if line.requests[number][0] == router]
        await line.reservations.turns(POOL, router, [], rows)
    assert sorted(await line.serve(first)) == waiting


async def test_with_hundreds_of_tenants_and_workers_the_queue_keeps_its_bounds(line: Line) -> None:
    await line.ask()
    rows = [
        WaitingRequest(id_of(5_000_000 + n), f"tenant {n % 300}", QueueLimits(2_000, 10**9), 1_000, priority=n % 3)
        for n in range(700)
    ]
    rows = [row if n % 5 else row.among([f"w{n % 40}"]) for n, row in enumerate(rows)]
    found = await line.reservations.turns(POOL, "r", [], rows)
    assert (found.own, found.requests, found.tokens, found.refused) == (700, 700, 700_000, frozenset())
    assert found.turns
    found = await line.reservations.turns(POOL, "r", [row.id for row in rows], [])
    assert (found.own, found.requests, found.tokens) == (0, 0, 0)


async def test_a_newcomer_starts_where_the_others_of_its_lane_are(line: Line) -> None:
    line.workers = ("slow", "fast")
    await line.idle()
    slow, _ = await line.ask("x", workers=("slow",))
    fast, _ = await line.ask("y", workers=("fast",))
    waiting = [(await line.ask("t", workers=("slow",)))[0] for _ in range(3)]
    for _ in range(9):
        after, _ = await line.ask("u", workers=("fast",))
        await line.release(fast)
        assert await line.retry(after) == "fast"
        fast = after
    newcomer, _ = await line.ask("v", workers=("slow",))
    assert newcomer in (await line.serve(slow))[:2]
    assert len(waiting) == 3


async def test_a_request_that_is_stuck_in_one_lane_saves_up_no_credit_for_others(line: Line) -> None:
    line.workers = ("stuck", "fast")
    await line.idle()
    await line.ask("x", workers=("stuck",))
    fast, _ = await line.ask("y", workers=("fast",))
    stuck, _ = await line.ask("t", workers=("stuck",))
    for _ in range(9):
        after, _ = await line.ask("u", workers=("fast",))
        await line.release(fast)
        assert await line.retry(after) == "fast"
        fast = after
    others = [(await line.ask("u", workers=("fast",)))[0] for _ in range(4)]
    own = [(await line.ask("t", workers=("fast",)))[0] for _ in range(4)]
    order = await line.serve(fast, stuck)
    assert len(set(order[:4]) & set(others)) == len(set(order[:4]) & set(own)) == 2


async def test_many_lanes_are_kept_apart_and_a_tenants_odd_ones_hold_up_no_others(line: Line) -> None:
    line.workers = tuple(f"w{number}" for number in range(20))
    await line.idle()
    for worker in line.workers:
        await line.ask(workers=(worker,))
    waiting = [(await line.ask("tu"[n % 2], workers=(worker,)))[0] for n, worker in enumerate(line.workers)]
    for number in range(20, 0, -1):
        await line.release(number)
        assert await line.retry(waiting[number - 1]) == f"w{number - 1}"
    odd = [
        WaitingRequest(id_of(9_000_000 + n), "odd", QueueLimits(500, 10**9), 10).among([f"odd{n}"]) for n in range(200)
    ]
    found = await line.reservations.turns(POOL, "odd", [], odd)
    assert (found.own, len(found.turns)) == (200, MOST_LANES // 2 + MOST_WINDOW)
    others = [(await line.ask("v", workers=(worker,)))[0] for worker in ("w0", "w1")]
    assert await line.turns() == others
    found = await line.reservations.turns(POOL, "odd", [row.id for row in odd[:-1]], [])
    assert list(found.turns) == [odd[-1].id]


async def test_a_tenants_many_priorities_keep_no_other_tenant_out(line: Line) -> None:
    await line.ask()
    many = [
        WaitingRequest(id_of(9_000_000 + n), "many", QueueLimits(5_000, 10**9), 10, priority=n) for n in range(1_100)
    ]
    found = await line.reservations.turns(POOL, "r", [], many)
    assert (found.own, found.refused, list(found.turns)) == (1_100, frozenset(), [many[0].id])
    _, place = await line.ask("other", limits=QueueLimits(5_000, 10**9), priority=2_000)
    assert isinstance(place, Place) and place.requests == 1_101
    urgent, place = await line.ask("other", limits=QueueLimits(5_000, 10**9), priority=-2_000)
    assert isinstance(place, Place) and place.ahead == 0 and await line.turns() == [urgent]


async def test_another_try_takes_no_turn_but_is_charged(line: Line) -> None:
    first, _ = await line.ask("x")
    one, _ = await line.ask("t")
    other, _ = await line.ask("u")
    for tenant in "tu":
        for _ in range(2 if tenant == "t" else 1):
            _, worker = await line.ask(tenant, may_wait=False, workers=("a",))
            assert worker == "a"
    for number in (4, 5, 6):
        await line.release(number)
    assert await line.serve(first) == [other, one]


async def test_the_actual_length_of_an_answer_replaces_the_estimate(line: Line) -> None:
    last, _ = await line.ask("x")
    short = [(await line.ask("t", output_tokens=5_000))[0] for _ in range(2)]
    long = [(await line.ask("u", output_tokens=1_000))[0] for _ in range(2)]
    order = []
    for _ in range(4):
        await line.release(last, 0 if last in short else 10_000)
        last = (await line.turns())[0]
        assert await line.retry(last) == "a"
        order.append(last)
        for number in await line.turns():  # the next one finds no room
            await line.retry(number)
    assert order[2:] == [short[1], long[1]]


async def test_a_booking_that_is_called_off_is_not_charged(line: Line) -> None:
    first, _ = await line.ask("x")
    waiting = [(await line.ask(tenant))[0] for tenant in "ttuu"]
    await line.release(first)
    (off,) = await line.turns()
    assert await line.retry(off) == "a"
    await line.release(off, outcome=Outcome.CALLED_OFF)
    last, _ = await line.ask("x", may_wait=False)
    for number in await line.turns():
        await line.retry(number)
    order = await line.serve(last)
    tenant = set(waiting[:2] if off in waiting[:2] else waiting[2:])
    assert len(set(order[:2]) & tenant) == 1 and set(order) == set(waiting) - {off}


async def test_a_router_learns_whether_its_turn_is_near(line: Line) -> None:
    await line.ask()
    for _ in range(MOST_WINDOW):
        await line.ask(router="first")
    await line.ask(router="last")
    for router, near in (("first", True), ("last", False)):
        assert (await line.reservations.turns(POOL, router, [], [])).near is near


async def test_counters_stay_whole_numbers_of_16_digits(line: Line) -> None:
    limits = QueueLimits(9, 1 << 50)
    first, _ = await line.ask("x")
    await line.ask("t", tokens=1 << 40, weight=0.001, limits=limits)
    last, _ = await line.ask("t", limits=limits)
    for _ in range(2):
        await line.ask("u", limits=limits)
    assert (await line.serve(first))[3:] == [last]


@pytest.mark.parametrize("left_us", [30 * SECOND_US, QUEUE_LEASE_US])
async def test_a_dead_routers_long_backlog_gives_way_in_a_few_calls(line: Line, clock: Clock, left_us: int) -> None:
    first, _ = await line.ask()
    limits = QueueLimits(500, 10**9)
    dead = [WaitingRequest(id_of(9_000_000 + n), f"t{n % 3}", limits, 10, left_us=left_us) for n in range(250)]
    await line.reservations.turns(POOL, "dead", [], dead)
    await clock.pass_us(QUEUE_LEASE_US // 2)
    alive, _ = await line.ask(router="alive", limits=QueueLimits(500, 10**9))
    await clock.pass_us(QUEUE_LEASE_US // 2)
    for _ in range(5):
        found = await line.reservations.turns(POOL, "alive", [], [])
    assert (found.requests, found.tokens, len(found.turns), found.near) == (1, 1_000, 1, True)
    await line.release(first)
    assert await line.retry(alive) == "a"
