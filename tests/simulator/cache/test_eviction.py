"""The queue of eviction candidates, compared with a dictionary."""

import hypothesis.strategies as st
from hypothesis import given

from kvatlas_simulator.cache.eviction import EvictionQueue

KEYS = st.tuples(st.integers(0, 5), st.integers(0, 2))


@given(st.lists(st.tuples(st.sampled_from(["put", "discard", "pop"]), st.integers(0, 6), KEYS), max_size=300))
def test_the_queue_pops_the_candidate_with_the_lowest_key(steps: list[tuple[str, int, tuple[int, int]]]) -> None:
    queue: EvictionQueue[int] = EvictionQueue()
    model: dict[int, tuple[int, int]] = {}
    for action, candidate, key in steps:
        if action == "put":
            queue.put(candidate, key)
            model[candidate] = key
        elif action == "discard":
            queue.discard(candidate)
            model.pop(candidate, None)
        elif model:
            lowest = min(model, key=lambda each: (model[each], each))
            assert queue.pop() == lowest
            del model[lowest]
        assert len(queue) == len(model) and all(each in queue for each in model)


def test_entries_of_moved_candidates_do_not_pile_up() -> None:
    queue: EvictionQueue[int] = EvictionQueue()
    for tick in range(10_000):
        queue.put(tick % 3, (tick, 0))
    assert len(queue._heap) < 200
