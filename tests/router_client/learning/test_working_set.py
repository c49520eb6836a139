"""The working set: how much of what prompts have in common a pool's caches have to hold."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.reservations import STEP_BLOCKS
from router_client.learning.fetches import Fetches
from router_client.learning.working_set import KEPT_S, LEARNED_S, MOST_FOLLOWED, WorkingSet
from router_client.pricing.pool import UNKNOWN_DISPLACED

BLOCK_TOKENS = 16
STEP_TOKENS = STEP_BLOCKS * BLOCK_TOKENS


def chain(document: int, steps: int = 4) -> bytes:
    return b"".join(
        hash((document, block)).to_bytes(HASH_BYTES, "little", signed=True) for block in range(steps * STEP_BLOCKS)
    )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.floats(0, KEPT_S)), max_size=40))
def test_what_came_twice_counts_until_it_has_not_come_for_long(prompts: list[tuple[int, int, float]]) -> None:
    now = [0.0]
    counted = WorkingSet(lambda: now[0])
    seen: dict[tuple[int, int], list[float]] = {}
    for document, steps, pause in [*prompts, (0, 0, LEARNED_S)]:
        now[0] += pause
        counted.record(chain(document, steps), BLOCK_TOKENS)
        for step in range(steps):
            times = seen.setdefault((document, step), [])
            if times and now[0] - times[-1] > KEPT_S:
                times.clear()
            times.append(now[0])
    live = [times for times in seen.values() if len(times) > 1 and now[0] - times[-1] <= KEPT_S]
    assert counted.tokens() == len(live) * STEP_TOKENS


def test_nothing_is_known_at_first() -> None:
    now = [0.0]
    counted = WorkingSet(lambda: now[0])
    counted.record(chain(1), BLOCK_TOKENS)
    assert counted.tokens() is None
    now[0] = LEARNED_S
    assert counted.tokens() == 0


def test_a_large_working_set_is_estimated_from_a_part() -> None:
    now = [0.0]
    counted = WorkingSet(lambda: now[0])
    documents = 3 * MOST_FOLLOWED // 100
    for _ in range(2):
        for document in range(documents):
            counted.record(chain(document, 100), BLOCK_TOKENS)
    now[0] = LEARNED_S
    assert counted.tokens() == pytest.approx(documents * 100 * STEP_TOKENS, rel=0.1)


def test_copies_cost_nothing_while_there_is_room_and_as_much_as_computing_if_all_just_fits() -> None:
    now = [0.0]
    fetches = Fetches(lambda: now[0])
    assert fetches.displaced_share("pool", None) == UNKNOWN_DISPLACED
    assert fetches.displaced_share("pool", 1_000_000) == 1  # nothing is known yet
    for document in (1, 2, 1, 2):
        fetches.record_prompt("pool", chain(document), BLOCK_TOKENS)
    now[0] = LEARNED_S
    working_set = 2 * 4 * STEP_TOKENS
    shares = [fetches.displaced_share("pool", times * working_set) for times in (1, 2, 3, 4, 6, 20)]
    assert shares[:2] == [1, 1] and shares[-1] < 1e-6
    assert all(0 < later < earlier for earlier, later in pairwise(shares[1:]))
