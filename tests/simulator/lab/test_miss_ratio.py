"""Curves: a single pass gives what an LRU cache of each size finds, and agrees with a plain cache and a whole replay."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas_simulator.lab.generated_requests import generate
from kvatlas_simulator.lab.miss_ratio import UNHURRIED, measure_curve, replayed_hit_rate, sizes_to_replay
from kvatlas_simulator.lab.replay import draw_arrivals
from kvatlas_simulator.lab.requests import LabRequest, Workload

SIZE = 4


def plain_lru(workload: Workload, blocks: int) -> float:
    """The hit rate of a least-recently-used cache, block by block."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = 0
    for _, request in draw_arrivals(workload, 0, UNHURRIED):
        chain = [request.contents[: end + 1] for end in range(len(request.contents))]
        hits += sum(block in cache for block in chain[: (request.input_tokens - 1) // SIZE])
        for block in reversed(chain):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits * SIZE / workload.prompt_tokens


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    requests = []
    for number in range(draw(st.integers(1, 30))):
        contents = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)))
        output = draw(st.integers(1, SIZE))
        tokens = max(1, len(contents) * SIZE - output)
        requests.append(LabRequest(number, number * 1e9, tokens, output, contents, number))
    return Workload("random", SIZE, requests)


@given(workloads(), st.integers(6, 40))
def test_without_sampling_a_curve_is_what_a_plain_lru_cache_finds(workload: Workload, blocks: int) -> None:
    # a request uses up to 6 blocks at once, so their order does not matter in a cache of at least that many
    (point,) = measure_curve(workload, [blocks * SIZE]).points
    assert point.hit_rate == pytest.approx(plain_lru(workload, blocks))


def test_a_whole_replay_finds_about_the_same() -> None:
    workload = generate("chat", 0, 300)
    curve = measure_curve(workload)
    (size,) = sizes_to_replay(workload, curve, 1)
    (point,) = [point for point in curve.points if point.cache_tokens == size]
    assert point.hit_rate == pytest.approx(replayed_hit_rate(workload, size), abs=0.03)


def test_a_sampled_curve_is_near_the_whole_one() -> None:
    workload = generate("chat", 0, 300)
    whole = measure_curve(workload)
    uses = sum(len(request.contents) for request in workload.requests)
    sampled = measure_curve(workload, [point.cache_tokens for point in whole.points], most_uses=uses // 2)
    assert sampled.sampled == pytest.approx(0.5, abs=0.01)
    assert whole.sampled == 1.0
    for one, other in zip(sampled.points, whole.points, strict=True):
        assert one.hit_rate == pytest.approx(other.hit_rate, abs=0.05)


def test_a_larger_cache_never_finds_less() -> None:
    rates = [point.hit_rate for point in measure_curve(generate("agents", 0, 200)).points]
    assert rates == sorted(rates)
    assert rates[-1] > rates[0]
