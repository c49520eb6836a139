"""The promises of every implementation of reservations about fetches: which of several equal sources a booking takes."""

import pytest

from kvatlas.reservations import Ask, Booking, Reservations, WorkerReport
from kvatlas.reservations.protocol import MOST_OFFERS, MOST_SOURCES, Fetching
from tests.kvatlas.reservations.asks import LEASE_US, LONGEST_US, POOL, SECOND_US, Clock, ask, id_of, offer

pytestmark = pytest.mark.anyio


async def test_equal_sources_take_turns_whichever_router_books(reservations: Reservations, clock: Clock) -> None:
    def fetched(*sources: str, us: int = SECOND_US) -> Ask:
        return ask([offer("a", fetching=Fetching(sources, us))])

    async def source(number: int, asked: Ask) -> str | None:
        booking = Booking(id_of(number), f"r{number}", 1_000, asked, LEASE_US, LONGEST_US)
        found = await reservations.book(POOL, booking)
        return None if found is None else found.source

    await reservations.report(POOL, {id: WorkerReport(1, None) for id in "xyz"})
    same = fetched("x", "y", "z")
    assert [await source(number, same) for number in range(7)] == ["x", "y", "z", "x", "y", "z", "x"]
    assert (await reservations.evaluate(POOL, same)).source == "y"
    assert (await reservations.evaluate(POOL, same)).source == "y"  # nothing was booked
    assert await source(7, fetched("y", us=9 * SECOND_US)) == "y"  # the only source
    assert [await source(number, same) for number in (8, 9)] == ["z", "x"]
    await clock.pass_us(5 * SECOND_US)
    assert await source(10, same) == "x"  # it is free
    assert await source(11, ask([offer("a")])) is None
    await reservations.forget(POOL, "y")
    assert await source(12, fetched("y", "x")) == "y"
    assert await source(13, fetched("y", "x")) == "y"  # nothing is kept about a worker that is gone


async def test_each_of_many_offers_may_name_many_sources(reservations: Reservations) -> None:
    names = [f"{n:064}" for n in range(MOST_OFFERS)]
    sources = [Fetching(tuple(one for one in names if one != id)[:MOST_SOURCES], SECOND_US) for id in names]
    offers = [offer(id, fetching=fetching) for id, fetching in zip(names, sources, strict=True)]
    assert (await reservations.evaluate(POOL, ask(offers))).source == names[1]
