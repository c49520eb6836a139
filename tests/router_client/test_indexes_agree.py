"""The same requests over the memory index and over Redis: the same overlaps, the same ranking, the same choice."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvatlas.cost import EngineProfile, QuillcacheProfile
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.tiers import Tier
from router_client import Prompt, RouterClient, RouterSettings, StaticFleet
from tests.router_client.pools import SCOPE, hold, pool, worker

pytestmark = pytest.mark.anyio

TOKENS = list(range(6_400))

told = st.lists(
    st.tuples(
        st.sampled_from([4, 16]),  # block size
        st.sampled_from([1, 1, 4]),  # granularity
        st.integers(0, 400),  # blocks held in the nearer tier
        st.integers(0, 400),  # and in the farther one
        st.sampled_from([(Tier.HBM, Tier.CPU_DRAM), (Tier.CPU_DRAM, Tier.LOCAL_SSD), (Tier.HBM, Tier.OBJECT_STORE)]),
        st.sampled_from([(), ("g",)]),
        st.integers(0, 3),  # running decodes
    ),
    min_size=1,
    max_size=6,
)


@given(workers=told, tokens=st.integers(0, 6_400), quillcache=st.booleans())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_all_indexes_give_the_same_ranking(
    indexes: list[ResidencyIndex],
    workers: list[tuple[int, int, int, int, tuple[Tier, Tier], tuple[str, ...], int]],
    tokens: int,
    quillcache: bool,
) -> None:
    records = [
        worker(f"w{i}", block_size=size, granularity=g, transfer_groups=groups, load={"running_decodes": running})
        for i, (size, g, _, _, _, groups, running) in enumerate(workers)
    ]
    router_settings = RouterSettings(profile=QuillcacheProfile() if quillcache else EngineProfile(), deadline_ms=None)
    prompt = Prompt.of_tokens(SCOPE, TOKENS[:tokens])
    answers = []
    for index in indexes:
        await index.clear()
        for record, (_, _, near, far, tiers, _, _) in zip(records, workers, strict=True):
            await hold(index, record, TOKENS, blocks=near, tier=tiers[0])
            await hold(index, record, TOKENS, blocks=far, tier=tiers[1])
        router = RouterClient(index, StaticFleet(pool(*records)), router_settings)
        answers.append((await router.overlap(prompt), await router.rank(prompt), await router.pick(prompt)))
    assert answers[0] == answers[1] == answers[2]
