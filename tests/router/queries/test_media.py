"""Tokens by medium, compared with a model that has the tiers of every token."""

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.tiers import Tier
from kvatlas_router.queries.media import CPU, DISK, GPU, on_each_medium, through_each_medium
from router_client.pricing.overlap import Run

RUNS = st.lists(
    st.builds(Run, st.integers(1, 5), st.lists(st.sampled_from(Tier), min_size=1, unique=True).map(tuple)), max_size=6
)


def leading(tokens: list[tuple[Tier, ...]], medium: frozenset[Tier]) -> int:
    return next((i for i, tiers in enumerate(tokens) if not medium & set(tiers)), len(tokens))


@given(RUNS)
def test_they_are_counted_as_other_indexes_do(runs: list[Run]) -> None:
    tokens = [run.tiers for run in runs for _ in range(run.tokens)]
    assert on_each_medium(runs) == tuple(leading(tokens, medium) for medium in (GPU, CPU, DISK))
    gpu = leading(tokens, GPU)
    cpu = gpu + leading(tokens[gpu:], CPU)
    assert through_each_medium(runs) == (gpu, cpu, cpu + leading(tokens[cpu:], DISK))
