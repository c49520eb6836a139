"""The promises of every implementation of reservations about predictions: prompts that are being computed."""

import pytest

from kvatlas.reservations import Outcome, Reservations, StepChain
from tests.kvatlas.reservations.asks import (
    LEASE_US,
    POOL,
    SECOND_US,
    STEP_TOKENS,
    Clock,
    ask,
    book,
    id_of,
    offer,
    steps,
)

pytestmark = pytest.mark.anyio

LONG = 8_192
CHAIN = steps(*range(LONG // STEP_TOKENS))


async def test_a_burst_on_one_new_prefix_is_computed_once_or_twice(reservations: Reservations) -> None:
    longer = 8 * LONG  # its prefill takes seconds, so the burst is over first, however slow the machine
    chain = steps(*range(longer // STEP_TOKENS))
    workers = [offer(f"w{i:02}", chain=0, input_tokens=longer + 60) for i in range(16)]
    picked = [
        await book(reservations, number, ask(workers, chain), input_tokens=longer + 60, router=f"r{number % 4}")
        for number in range(100)
    ]
    assert len(set(picked)) <= 2
    blind = [offer(f"w{i:02}", input_tokens=longer + 60) for i in range(16)]
    assert len({await book(reservations, 100 + n, ask(blind), input_tokens=longer + 60) for n in range(100)}) > 10


async def test_a_prefix_being_computed_is_held_from_when_it_should_be_there(
    reservations: Reservations, clock: Clock
) -> None:
    asked = ask([offer("a", chain=0, input_tokens=LONG)], CHAIN)
    await book(reservations, 1, asked, input_tokens=LONG)
    found = (await reservations.evaluate(POOL, asked)).by_offer[0]
    assert found.predicted_tokens == LONG - 1
    assert 0 < found.wait_us < LONG * 40  # the backlog is the same prefill; the wait is only for what attention adds
    await clock.pass_us(LONG * 80)
    assert (await reservations.evaluate(POOL, asked)).by_offer[0].wait_us == 0


async def test_a_prediction_counts_as_far_as_it_is_shared(reservations: Reservations) -> None:
    await book(reservations, 1, ask([offer("a", chain=0)], steps(1, 2, 3, 4)))
    for chain, shared in [
        (steps(1, 2, 3, 9), 3),
        (steps(1, 2), 2),
        (steps(1, 2, 3, 4, 5, 6), 4),
        (steps(9, 2, 3, 4), 0),
    ]:
        asked = ask([offer("a", chain=0, input_tokens=2_000)], chain)
        assert (await reservations.evaluate(POOL, asked)).by_offer[0].predicted_tokens == shared * STEP_TOKENS


async def test_what_the_engine_loses_of_a_hit_is_not_usable(reservations: Reservations) -> None:
    asked = ask([offer("a", chain=0, lost_tokens=16)], steps(1, 2))
    await book(reservations, 1, asked)
    assert (await reservations.evaluate(POOL, asked)).by_offer[0].predicted_tokens == 2 * STEP_TOKENS - 16


@pytest.mark.parametrize("after_first_token", [False, True])
async def test_a_failure_before_the_first_token_ends_its_prediction(
    reservations: Reservations, after_first_token: bool
) -> None:
    asked = ask([offer("a", chain=0)], steps(1, 2))
    await book(reservations, 1, asked)
    if after_first_token:
        await reservations.record_first_token(POOL, id_of(1))
    await reservations.release(POOL, id_of(1), Outcome.FAILED)
    assert bool((await reservations.evaluate(POOL, asked)).by_offer[0].predicted_tokens) is after_first_token


async def test_a_dead_routers_predictions_end(reservations: Reservations, clock: Clock) -> None:
    asked = ask([offer("a", chain=0, believed_us=600 * SECOND_US)], steps(1, 2))
    await book(reservations, 1, asked)
    await clock.pass_us(LEASE_US)
    await reservations.renew_lease(POOL, "other", LEASE_US)
    assert (await reservations.evaluate(POOL, asked)).by_offer[0].predicted_tokens == 0


async def test_a_prediction_without_confirmation_ends(reservations: Reservations, clock: Clock) -> None:
    asked = ask([offer("a", chain=0)], steps(1, 2))
    await book(reservations, 1, asked)
    await reservations.record_first_token(POOL, id_of(1))
    await clock.pass_us(5 * SECOND_US - 1)
    assert (await reservations.evaluate(POOL, asked)).by_offer[0].predicted_tokens
    await clock.pass_us(1)
    assert not (await reservations.evaluate(POOL, asked)).by_offer[0].predicted_tokens


async def test_what_the_index_confirms_is_no_longer_predicted(reservations: Reservations) -> None:
    chain = steps(1, 2, 3)
    await book(reservations, 1, ask([offer("a", chain=0)], chain))
    await reservations.record_first_token(POOL, id_of(1))
    await book(reservations, 2, ask([offer("a", chain=0, held_steps=3)], chain))
    assert not (await reservations.evaluate(POOL, ask([offer("a", chain=0)], chain))).by_offer[0].predicted_tokens


async def test_computing_again_what_is_being_computed_costs_more(reservations: Reservations) -> None:
    workers = [offer("a", chain=0, input_tokens=LONG), offer("b", chain=0, input_tokens=LONG)]
    assert await book(reservations, 1, ask(workers, CHAIN), input_tokens=LONG) == "a"
    await book(reservations, 2, ask([offer("a")]))
    assert (await reservations.evaluate(POOL, ask(workers, CHAIN, 0.0))).chosen == 1
    found = await reservations.evaluate(POOL, ask(workers, CHAIN, 16.0))
    assert found.chosen == 0
    assert [one.again_tokens for one in found.by_offer] == [0, LONG - 1]


async def test_predictions_without_events_live_as_long_as_they_are_used(
    reservations: Reservations, clock: Clock
) -> None:
    asked = ask([offer("a", chain=0, capacity_steps=100)], steps(1, 2))
    await book(reservations, 1, asked)
    await reservations.release(POOL, id_of(1), Outcome.FINISHED)
    for number in range(2, 6):
        await clock.pass_us(4 * SECOND_US)
        assert (await reservations.evaluate(POOL, asked)).by_offer[0].predicted_tokens
        await book(reservations, number, asked)
        await reservations.release(POOL, id_of(number), Outcome.FINISHED)
    await clock.pass_us(6 * SECOND_US)
    assert not (await reservations.evaluate(POOL, asked)).by_offer[0].predicted_tokens


async def test_predictions_without_events_fit_the_workers_capacity(reservations: Reservations, clock: Clock) -> None:
    def asked(number: int) -> bytes:
        return steps(number, 1, 1)

    for number in range(4):  # the first one is used again before the last one comes
        for used in [number] if number < 3 else [0, 3]:
            await clock.pass_us(1)
            one = ask([offer("a", chain=0, capacity_steps=9)], asked(used))
            await book(reservations, 10 * number + used, one)
            await reservations.release(POOL, id_of(10 * number + used), Outcome.FINISHED)
    held = [
        bool((await reservations.evaluate(POOL, ask([offer("a", chain=0)], asked(n)))).by_offer[0].predicted_tokens)
        for n in range(4)
    ]
    assert held == [True, False, True, True]


def test_equal_tokens_in_two_scopes_are_different_steps() -> None:
    chain = bytes(range(64)) * 2
    one, other = (StepChain.of(scope * 8, 16, chain) for scope in (b"a", b"b"))
    assert one.step_tokens == STEP_TOKENS
    assert len(one.hashes) == len(chain) // 8
    assert one.hashes != other.hashes
    assert StepChain.of(b"a" * 8, 16, chain[:63]).hashes == b""
