"""Clients' limits, compared with a model that remembers every request, in one process and in several that share a store."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.errors import Unreachable
from kvatlas.fleet_store.allowances import Draw, Drawn
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store
from kvatlas_router.tenancy.allowance import LocalAllowances
from kvatlas_router.tenancy.allowance_exchange import AllowanceExchange
from kvatlas_router.tenancy.caller import Caller, Limits
from kvatlas_router.tenancy.counters import TenancyCounters
from kvatlas_router.tenancy.limits import ClientLimits, OverLimit, Permit
from tests.eventually import until

pytestmark = pytest.mark.anyio


def caller(name: str = "a", **limits: int) -> Caller:
    return Caller(name, name, limits=Limits(**limits))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def limits_of_one_process() -> tuple[ClientLimits, Clock]:
    clock = Clock()
    return ClientLimits(TenancyCounters(), AllowanceExchange(clock=clock)), clock


@dataclass
class Naive:
    """Buckets as the sum of everything that came in and went out."""

    per_minute: int
    left: float = field(init=False)
    at_s: float = Clock.now_s

    def __post_init__(self) -> None:
        self.left = self.per_minute

    def allows(self, amount: int, now_s: float) -> bool:
        self.left = min(self.per_minute, self.left + (now_s - self.at_s) * self.per_minute / 60)
        self.at_s = now_s
        if self.left < amount:
            return False
        self.left -= amount
        return True


# pauses after which whole amounts have refilled: a part of one does not count
@given(st.lists(st.tuples(st.integers(0, 14).map(lambda n: 3 * n), st.integers(1, 30), st.booleans()), max_size=60))
def test_what_passes_is_what_the_limits_say(steps: list[tuple[int, int, bool]]) -> None:
    async def run() -> None:
        limits, clock = limits_of_one_process()
        open_ = list[Permit]()
        requests, tokens, in_flight = Naive(20), Naive(100), dict[int, int]()
        one = caller(requests_per_minute=20, tokens_per_minute=100, requests_in_flight=4, tokens_in_flight=60)
        for pause_s, size, ends in steps:
            clock.now_s += pause_s
            if ends and open_:
                ended = open_.pop(0)
                ended.end()
                ended.end()
                in_flight.pop(id(ended), None)
                continue
            may = len(open_) < 4 and requests.allows(1, clock.now_s)
            try:
                permit = await limits.admit(one)
            except OverLimit:
                assert not may
                continue
            assert may
            open_.append(permit)
            may = sum(in_flight.values()) + size <= 60 and tokens.allows(size, clock.now_s)
            try:
                await permit.take_tokens(size)
                assert may
                in_flight[id(permit)] = size
            except OverLimit:
                assert not may
                permit.end()
                open_.pop()

    asyncio.run(run())


async def test_the_time_to_come_again_is_when_the_request_passes() -> None:
    limits, clock = limits_of_one_process()
    one = caller(requests_per_minute=6)
    for _ in range(6):
        await limits.admit(one)
    with pytest.raises(OverLimit) as refused:
        await limits.admit(one)
    assert refused.value.retry_after_s == 10
    clock.now_s += 10
    await limits.admit(one)


async def test_an_answer_that_was_longer_than_expected_is_paid_later() -> None:
    limits, _ = limits_of_one_process()
    permit = await limits.admit(caller(tokens_per_minute=60))
    await permit.take_tokens(10)
    permit.correct(90)
    assert dict(permit.headers())[b"x-ratelimit-remaining-tokens"] == b"0"
    with pytest.raises(OverLimit) as refused:
        await permit.take_tokens(10)
    assert refused.value.retry_after_s == 40


async def test_no_figure_of_an_engine_costs_more_than_ten_minutes_or_gives_anything() -> None:
    for false, wait_s in ((1 << 62, 600), (-(1 << 62), 0)):
        limits, clock = limits_of_one_process()
        permit = await limits.admit(caller(tokens_per_minute=60))
        await permit.take_tokens(10)
        permit.correct(false)
        permit.end()
        clock.now_s += wait_s
        again = await limits.admit(caller(tokens_per_minute=60))
        await again.take_tokens(50)
        with pytest.raises(OverLimit):
            await again.take_tokens(20)


async def test_clients_have_limits_of_their_own() -> None:
    limits, _ = limits_of_one_process()
    await limits.admit(caller("a", requests_in_flight=1))
    await limits.admit(caller("b", requests_in_flight=1))
    with pytest.raises(OverLimit):
        await limits.admit(caller("a", requests_in_flight=1))
    assert (await limits.admit(caller("c"))).headers() == []


# ------------------------------------------------------------ in a fleet


@dataclass
class Fallible:
    """A store that may be away, and counts its calls."""

    fleet: FleetStore
    away: bool = False
    calls: int = 0

    async def draw(self, draws: Sequence[Draw]) -> Sequence[Drawn]:
        self.calls += 1
        if self.away:
            raise Unreachable("it is away")
        return await self.fleet.draw(draws)


async def count_admitted(routers: Sequence[ClientLimits], one: Caller, requests: int) -> int:
    admitted = 0

    async def ask(router: ClientLimits) -> None:
        nonlocal admitted
        try:
            permit = await router.admit(one)
        except OverLimit:
            return
        admitted += 1
        permit.end()

    async with anyio.create_task_group() as tasks:
        for number in range(requests):
            tasks.start_soon(ask, routers[number % len(routers)])
    return admitted


async def test_a_limit_holds_for_all_routers_of_a_fleet(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, four routers admit what one would, and none asks the store for each request."""
    monkeypatch.setattr("kvatlas_router.tenancy.allowance_exchange.CALL_S", 30.0)  # busy is not away
    exchanges = [AllowanceExchange(Fallible(FleetStore(store))) for _ in range(4)]
    routers = [ClientLimits(TenancyCounters(), exchange) for exchange in exchanges]
    for exchange in exchanges:
        exchange.start()
    try:
        one, clock = caller(requests_per_minute=600), exchanges[0].clock
        began_s = clock()
        admitted = sum([await count_admitted(routers, one, 100) for _ in range(20)])
        most = 600 + (clock() - began_s) * 10
        assert admitted <= most
        assert admitted >= 600 * 0.9, "what the others drew ahead is missing for some seconds"
        asked = sum(exchange._shared.calls for exchange in exchanges)  # type: ignore[union-attr]
        assert asked < 600
    finally:
        for exchange in exchanges:
            await exchange.stop()
    left = (await FleetStore(store).draw([Draw("requests:a", 600, 0, 0)]))[0].left
    assert abs(left - max(0, most - admitted)) <= 600 * 0.1, "what was drawn and not used is back"


async def test_while_the_store_is_away_each_router_goes_on_from_what_was_left(store: Store) -> None:
    fallible = Fallible(FleetStore(store))
    exchange = AllowanceExchange(fallible)
    router, one = ClientLimits(TenancyCounters(), exchange), caller("b", requests_per_minute=100)
    exchange.start()
    try:
        assert await count_admitted([router], one, 60) == 60
        fallible.away = True
        assert 35 <= await count_admitted([router], one, 100) <= 45
        assert not exchange.is_shared
        fallible.away = False

        async def is_shared() -> bool:
            await count_admitted([router], one, 1)
            return exchange.is_shared

        await until(is_shared, what="the store takes part again")
    finally:
        await exchange.stop()


async def test_the_store_counts_as_a_process_does(store: Store) -> None:
    """With amounts for which the time that passes does not matter: the allowance refills by 6 in a minute."""
    fleet, local = FleetStore(store), LocalAllowances(10)
    for back, wanted in ((0, 2), (0, 9), (-30, 0), (20, 3), (5, 0), (1 << 40, 5), (-(1 << 40), 1), (59, 0), (10, 9)):
        draws = [Draw("requests:c", 6, back, wanted), Draw("tokens:c", 6, 0, wanted)]
        assert list(await fleet.draw(draws)) == list(local.draw(draws, 0.0)), (back, wanted)
    key = "kva:{fleet}:limit:requests:c"
    assert 0 < await store.client.pttl(key) <= 11 * 60_000 + 1_000
    for damaged in ({"left": "x"}, {"left": "nan", "at": "1"}, {"at": "inf"}, {"left": "1e400", "at": "-1e400"}):
        await store.client.delete(key)
        await store.client.hset(key, mapping=damaged)
        assert (await fleet.draw([Draw("requests:c", 6, 0, 9)]))[0].taken == 6
