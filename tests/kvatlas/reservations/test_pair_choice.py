"""Pairs of workers: the choice compared with trying every pair, and what a booked pair leaves in the pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.cost import Load
from kvatlas.errors import InvalidValue
from kvatlas.reservations import Ask, Booking, Outcome, PairLayout, Reservations
from kvatlas.reservations.pair_choice import choose_pair
from tests.kvatlas.reservations.asks import LEASE_US, LONGEST_US, POOL, PRICES, id_of, offer

pytestmark = pytest.mark.anyio

scores = st.tuples(st.integers(0, 2), st.integers(0, 50).map(float))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[PairLayout, list[tuple[int, float]]]:
    prefills, decodes, both = draw(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 4)))
    groups = draw(st.lists(st.integers(0, 2), min_size=prefills, max_size=prefills))
    moved = st.lists(st.sampled_from([-1.0, 0.0, 3.0, 20.0]), min_size=3, max_size=3)
    transfers = draw(st.lists(moved, min_size=decodes, max_size=decodes))
    count = prefills + decodes + both
    return PairLayout(prefills, decodes, groups, transfers), draw(st.lists(scores, min_size=count, max_size=count))


def cost_of(layout: PairLayout, scores: list[tuple[int, float]], prefill: int | None, chosen: int) -> tuple[int, float]:
    if prefill is None:
        return scores[chosen]
    transfer_us = layout.transfers_us[chosen - layout.prefills][layout.groups[prefill]]
    assert transfer_us >= 0
    return scores[prefill][0] + scores[chosen][0], scores[prefill][1] + scores[chosen][1] + transfer_us


@given(layouts())
def test_no_pair_is_cheaper(given: tuple[PairLayout, list[tuple[int, float]]]) -> None:
    layout, scores = given
    chosen = choose_pair(layout, scores)
    first_both = layout.prefills + layout.decodes
    ways: list[tuple[int | None, int]] = [(None, i) for i in range(first_both, len(scores))]
    for i in range(layout.prefills):
        for j in range(layout.prefills, first_both):
            if layout.transfers_us[j - layout.prefills][layout.groups[i]] >= 0:
                ways.append((i, j))
    assert chosen in ways
    least = min(cost_of(layout, scores, *way) for way in ways)
    assert cost_of(layout, scores, *chosen) == least
    if chosen[0] is not None:  # ties go to one worker that does both
        assert min(scores[first_both:]) > least


# ---------------------------------------------------------------- booked

WHOLE = offer("d")
APART = WHOLE._replace(
    cached_tokens=1_000,
    base_us=WHOLE.base_us - WHOLE.work_us,
    work_us=0.0,
    kind=WHOLE.kind._replace(prices=PRICES._replace(queued_us=0.0)),  # it need not wait for prompts there
)


def pair_ask(transfer_us: float) -> Ask:
    """`p` computes only prompts; `d` computes prompts as fast, and answers."""
    prompt_alone = offer("p")._replace(base_us=WHOLE.work_us)
    return Ask([prompt_alone, APART, WHOLE], pair_layout=PairLayout(1, 1, [0], [[transfer_us]]))


async def load(reservations: Reservations, worker_id: str) -> Load:
    return (await reservations.evaluate(POOL, Ask([offer(worker_id)]))).by_offer[0].load


async def test_both_of_a_pair_are_booked_in_one_call(reservations: Reservations) -> None:
    await reservations.book(POOL, Booking(id_of(9), "r", 1_000, Ask([WHOLE]), LEASE_US, LONGEST_US))
    booking = Booking(id_of(1), "r", 1_000, pair_ask(500.0), LEASE_US, LONGEST_US, id_of(2))
    found = await reservations.book(POOL, booking)
    assert found is not None
    assert (found.prefill, found.chosen) == (0, 1)
    assert await load(reservations, "p") == Load(1, 1_000, 0, 1_000)
    assert await load(reservations, "d") == Load(2, 1_000, 0, 2_000)  # the answer of the second queues no prompt
    assert await reservations.release(POOL, id_of(2), Outcome.FINISHED)
    assert await load(reservations, "p") == Load()
    assert await reservations.release(POOL, id_of(1), Outcome.FINISHED)
    assert await load(reservations, "d") == Load(1, 1_000, 0, 1_000)


@pytest.mark.parametrize("transfer_us", [-1.0, 500.0])
async def test_one_worker_does_both_if_a_pair_is_not_cheaper(reservations: Reservations, transfer_us: float) -> None:
    booking = Booking(id_of(1), "r", 1_000, pair_ask(transfer_us), LEASE_US, LONGEST_US, id_of(2))
    found = await reservations.book(POOL, booking)
    assert found is not None
    assert (found.prefill, found.chosen) == (None, 2)
    assert (await load(reservations, "p"), await load(reservations, "d")) == (Load(), Load(1, 1_000, 0, 1_000))
    assert not await reservations.release(POOL, id_of(2), Outcome.FINISHED)


async def test_both_of_a_pair_end_with_their_routers_lease(reservations: Reservations) -> None:
    for transfer_us in (0.0, -1.0):
        booking = Booking(id_of(1), "r", 1_000, pair_ask(transfer_us), LEASE_US, LONGEST_US, id_of(2))
        assert await reservations.book(POOL, booking) is not None  # sent again, it replaces the first one
    assert (await load(reservations, "p"), await load(reservations, "d")) == (Load(), Load(1, 1_000, 0, 1_000))
    await reservations.end_lease(POOL, "r")
    assert (await load(reservations, "p"), await load(reservations, "d")) == (Load(), Load())


@pytest.mark.parametrize("number", [1, 2])
async def test_a_pair_that_was_called_off_is_not_booked(reservations: Reservations, number: int) -> None:
    await reservations.release(POOL, id_of(number), Outcome.CALLED_OFF)
    booking = Booking(id_of(1), "r", 1_000, pair_ask(500.0), LEASE_US, LONGEST_US, id_of(2))
    assert await reservations.book(POOL, booking) is None
    assert (await load(reservations, "p"), await load(reservations, "d")) == (Load(), Load())


async def test_a_pair_needs_two_ids() -> None:
    for prefill_id in (None, id_of(1)):
        with pytest.raises(InvalidValue, match="needs a second id"):
            Booking(id_of(1), "r", 1_000, pair_ask(500.0), LEASE_US, LONGEST_US, prefill_id)
