"""The same requests over the memory index and over Redis, from tasks and from threads: they give the same overlaps, the same
ranking and the same choices, at the documented costs."""

from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvatlas.blocks.tiers import Tier
from kvatlas.cost import CostProfile, EngineProfile, QuillcacheProfile
from kvatlas.fleet.records import EngineKind, EngineState, FleetRecord, Role
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.reservations import MemoryReservations, RedisReservations, Reservations
from kvatlas.store.connection import Store
from router_client import BookingSettings, Prompt, RouterClient, RouterSettings, StaticFleet, SyncRouterClient
from tests.router_client.pools import BLOCK_BYTES, FETCH_BY, PEER, SCOPE, hold, pool, worker
from tests.router_client.pricing import naive_costs
from tests.router_client.pricing.naive_costs import Busy

pytestmark = pytest.mark.anyio

TOKENS = list(range(6_400))
WORKERS = [f"w{number}" for number in range(6)]
FASTER = [(Tier.HBM, Tier.CPU_DRAM), (Tier.CPU_DRAM, Tier.LOCAL_SSD), (Tier.HBM, Tier.OBJECT_STORE)]
PROFILES: list[CostProfile] = [EngineProfile(), QuillcacheProfile()]


@dataclass(frozen=True)
class Holding:
    """A worker, and the number of the prompt's blocks that it holds in a nearer and in a farther tier."""

    record: FleetRecord
    near: int
    far: int
    tiers: tuple[Tier, Tier]

    def of_each_token(self, tokens: int) -> list[Tier]:
        """The nearest tier of each of a prompt's tokens that it announces: full blocks, and with a granularity of g, only by
        every g-th block."""
        endpoint = self.record.endpoint
        step, size = endpoint.granularity, endpoint.block_size or 0
        held: list[Tier] = []
        for last in range(step - 1, tokens // size, step):
            where = [tier for tier, blocks in zip(self.tiers, (self.near, self.far), strict=True) if last < blocks]
            if where:
                held += [min(where)] * (step * size)
        return held


kinds = st.sampled_from([*EngineKind, EngineKind.STORE])
"""Stores are more frequent, because a worker has to name one by chance."""
named = st.lists(st.sampled_from(["w0", "w1", "w2"]), max_size=2, unique=True).map(tuple)


@st.composite
def fleets(draw: st.DrawFn) -> list[Holding]:
    held = []
    for worker_id in WORKERS[: draw(st.integers(1, len(WORKERS)))]:
        loads = st.fixed_dictionaries(
            {
                "running_decodes": st.integers(0, 9),
                "queued_prefill_tokens": st.sampled_from([0, 0, 700, 5_000]),
                "forward_pass": st.fixed_dictionaries(
                    {"requests_waiting": st.integers(0, 3), "active_kv_blocks": st.integers(0, 500)}
                ),
            }
        )
        record = worker(
            worker_id,
            kind=(kind := draw(kinds)),
            stores=draw(named),
            read_us_per_mib=draw(st.sampled_from([None, 0, 400])) if kind is EngineKind.STORE else None,
            eagle=draw(st.booleans()),
            role=draw(st.sampled_from([Role.BOTH, Role.BOTH, Role.BOTH, *Role])),
            state=draw(st.sampled_from([EngineState.UP, EngineState.UP, EngineState.UP, *EngineState])),
            block_size=draw(st.sampled_from([4, 16])),
            granularity=draw(st.sampled_from([1, 1, 4])),
            block_bytes=draw(st.sampled_from([BLOCK_BYTES, 3_000])),
            tier_block_bytes=draw(st.sampled_from([{}, {"cpu_dram": 9_000}])),
            locality_domain=draw(st.sampled_from(["", "a"])),
            transfer_groups=draw(st.sampled_from([(), ("g",), ("g", "h")])),
            **draw(st.sampled_from([{}, PEER])),
            load=draw(st.none() | loads),
        )
        blocks = st.integers(0, 400)
        held.append(Holding(record, draw(blocks), draw(blocks), draw(st.sampled_from(FASTER))))
    return held


@dataclass
class Router:
    """One of the routers that must agree: over an index, with reservations, used from tasks or from threads."""

    index: ResidencyIndex
    client: RouterClient
    threads: SyncRouterClient
    fleet: StaticFleet
    reservations: Reservations


class Routers:
    """Over each index, a router for tasks and one for threads, which share their bookings."""

    def __init__(self, store: Store, routers: list[Router]) -> None:
        self._store = FleetStore(store)
        self._routers = routers

    async def fill(self, held: list[Holding]) -> None:
        """Let the stores know these workers and blocks, and nothing else."""
        records = pool(*(one.record for one in held))
        for worker_id in WORKERS:
            await self._store.forget(worker_id, SCOPE.pool_id)
            for router in self._routers:
                await router.reservations.forget(SCOPE.pool_id, worker_id)
        await self._store.write(records)
        for router in self._routers:
            router.fleet.records = records
            await router.index.clear()
            for one in held:
                await hold(router.index, one.record, TOKENS, blocks=one.far, tier=one.tiers[1])
                await hold(router.index, one.record, TOKENS, blocks=one.near, tier=one.tiers[0])

    async def same(self, prompt: Prompt) -> Any:
        """The ranking, which must be the same from all routers."""
        answers = []
        for router in self._routers:
            answers.append((await router.client.overlap(prompt), await router.client.rank(prompt)))
            answers.append(await anyio.to_thread.run_sync(_in_a_thread, router.threads, prompt))
        assert all(answer == answers[0] for answer in answers[1:])
        return answers[0][1]

    async def book(self, prompt: Prompt) -> str:
        """The worker, which must be the same for all: over each index, the two routers book in turn."""
        chosen = []
        for router in self._routers:
            if prompt.input_tokens % 2:
                chosen.append((await router.client.reserve(prompt)).worker_id)
            else:
                chosen.append((await anyio.to_thread.run_sync(router.threads.reserve, prompt)).worker_id)
        assert len(set(chosen)) == 1, chosen
        return chosen[0]


def _in_a_thread(router: SyncRouterClient, prompt: Prompt) -> Any:
    return router.overlap(prompt), router.rank(prompt)


@pytest.fixture(params=PROFILES, ids=lambda profile: profile.name)
async def profile(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def routers(
    indexes: list[ResidencyIndex], store: Store, valkey_url: str, profile: CostProfile
) -> AsyncIterator[Routers]:
    # predictions depend on the clock; tests/kvatlas/reservations compares them with a model on a clock that is set
    booking = BookingSettings(prefixes_in_flight=False)
    chosen = RouterSettings(profile=profile, deadline_ms=None, fleet_max_age_ms=0, booking=booking)
    made = []
    with ExitStack() as stack:
        for index in indexes[:-1]:
            fleet, shared = StaticFleet({}), MemoryReservations()
            here, there = [RouterClient(index, fleet, chosen, reservations=shared) for _ in range(2)]
            made.append(Router(index, here, stack.enter_context(SyncRouterClient(there)), fleet, shared))
        stored = RedisReservations(store)
        client = RouterClient(indexes[-1], FleetStore(store), chosen, reservations=stored)
        threads = stack.enter_context(SyncRouterClient.open(valkey_url, chosen, wait=False))
        made.append(Router(indexes[-1], client, threads, StaticFleet({}), stored))
        yield Routers(store, made)


@given(
    fleet=fleets(),
    tokens=st.integers(0, len(TOKENS)),
    output=st.integers(0, 200),
    before=st.lists(st.integers(1, 3_000), max_size=4),
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_all_routers_give_the_ranking_that_the_documented_costs_give(
    routers: Routers, profile: CostProfile, fleet: list[Holding], tokens: int, output: int, before: list[int]
) -> None:
    await routers.fill(fleet)
    records = pool(*(one.record for one in fleet))
    tiers = {one.record.endpoint.id: held for one in fleet if (held := one.of_each_token(tokens))}
    booked: dict[str, Busy] = {}

    def expected(held: dict[str, list[Tier]], tokens: int, output: int) -> Any:
        scores = naive_costs.scores(profile.name, records, held, tokens, output, booked)
        # terms are rounded to 1 us, and the work, for which up to 10 requests and those that come later wait
        return pytest.approx(scores, rel=0, abs=6)  # terms are rounded, as is the work for which 10 requests wait

    prompt = replace(Prompt.of_tokens(SCOPE, TOKENS[:tokens], output_tokens=output), fetch_by=FETCH_BY)
    ranking = await routers.same(prompt)
    assert {result.worker_id: result.score_us for result in ranking} == expected(tiers, tokens, output)
    if not len(ranking):
        return
    for number, length in enumerate(before):
        other = Prompt.of_tokens(SCOPE, [10_000 + number] * length, output_tokens=output)
        costs = naive_costs.scores(profile.name, records, {}, length, output, booked)
        chosen = await routers.book(other)
        assert costs[chosen] <= min(costs.values()) + 3
        booked[chosen] = booked.get(chosen, Busy()) + Busy(1, length, 0, length)
    ranking = await routers.same(prompt)
    assert {result.worker_id: result.score_us for result in ranking} == expected(tiers, tokens, output)
    order = [result.score_us for result in ranking]
    assert all(earlier <= later + 3 for earlier, later in pairwise(order))
