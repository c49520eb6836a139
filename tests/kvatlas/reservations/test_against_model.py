"""The store's functions compared with the in-process model: the same calls at the same times give the same answers."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.cost import EngineProfile, Load, Plan, Prices
from kvatlas.reservations import (
    Ask,
    Booking,
    Evaluation,
    LoadReport,
    LookAlikes,
    LookAlikesUnknown,
    MemoryReservations,
    Offer,
    Outcome,
    PairLayout,
    RedisReservations,
    Reservations,
    StepChain,
    WorkerReport,
)
from kvatlas.reservations.likeness import RING
from kvatlas.reservations.protocol import Fetching
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.reservations.room_and_slo import Limit, Limits
from kvatlas.store.connection import open_store
from tests.kvatlas.reservations.asks import (
    LEASE_US,
    POOL,
    PRICES,
    SECOND_US,
    STEP_TOKENS,
    Clock,
    id_of,
    offer,
    same_evaluation,
    steps,
)

WORKERS = ["a", "b", "c-1", "c-12", "d", "e", "f"]
LIKENESSES = [b"likeness", b"likenesT", b"likenesU"]
"""The likenesses of workers of the first chain, of the second one, and of `c-12`, which has no events."""
NUMBERS = range(12)
CHAINS = [steps(*chain) for chain in [(), (1,), (1, 2, 3), (1, 2, 9, 9, 9), (1, 2, 3, 4, 5, 6), (7, 8), (7, 8, 8, 8)]]
DEFAULT = EngineProfile().prices(Plan("w", 900, 128))
OTHER = Prices(4.0, 1_500.0, 0.3, 0, 45.0, hit_us=5.0)

numbers = st.sampled_from(NUMBERS)
workers = st.sampled_from(WORKERS)
fetches = st.none() | st.builds(
    Fetching,
    st.lists(workers, min_size=1, max_size=4, unique=True).map(tuple),
    st.sampled_from([1, 100_000, 3 * SECOND_US]),
)
interferences = st.sampled_from([0.0, 0.1, 1.0])
loads = st.builds(Load, st.integers(0, 9), st.integers(0, 9_000), st.integers(0, 3), st.integers(0, 99_000))


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    chains = [StepChain(STEP_TOKENS, draw(st.sampled_from(CHAINS))), StepChain(64, draw(st.sampled_from(CHAINS)))]
    offers = []
    for worker_id in draw(st.lists(workers, min_size=1, unique=True)):
        # a worker's block size never changes, so its chain is always the same one
        chain = draw(st.sampled_from([None, WORKERS.index(worker_id) % 2]))
        held = draw(st.integers(0, len(chains[chain].hashes) // HASH_BYTES)) if chain is not None else 0
        offers.append(
            offer(
                worker_id,
                input_tokens=900,
                chain=chain,
                held_steps=held if draw(st.booleans()) else 0,
                prices=draw(st.sampled_from([PRICES, OTHER])),
                lost_tokens=draw(st.sampled_from([0, 16])),
                believed_us=draw(st.sampled_from([SECOND_US, 40 * SECOND_US])),
                capacity_steps=6 if worker_id == "c-12" else 0,
                interference=draw(interferences),
                extra_us=draw(st.sampled_from([0.0, 0.25, 30_000.0])),
                fetching=draw(fetches),
            )
        )
    again_factor, limits = draw(st.sampled_from([0.0, 2.5, 16.0])), draw(st.none() | limits_of(len(offers)))
    return Ask(offers, chains, again_factor, limits)


@st.composite
def look_alike_asks(draw: st.DrawFn) -> Ask:
    """As above, but most workers are not named."""
    asked = draw(asks())
    offers = asked.offers[: draw(st.integers(0, 2))]
    look_alikes = []
    for number in draw(st.lists(st.integers(0, 2), min_size=1, unique=True)):
        chain = draw(st.sampled_from([None, min(number, 1)]))
        made = offer(
            "",
            input_tokens=900,
            chain=chain,
            held_steps=draw(st.integers(0, 1)) if chain is not None and asked.chains[chain].hashes else 0,
            prices=draw(st.sampled_from([PRICES, OTHER, DEFAULT])),
            lost_tokens=draw(st.sampled_from([0, 16])),
            capacity_steps=6 if number == 2 else 0,
            interference=draw(interferences),
            extra_us=draw(st.sampled_from([0.0, 30_000.0])),
            fetching=draw(fetches),
        )
        look_alikes.append(LookAlikes(LIKENESSES[number], made, draw(st.sampled_from([0.0, 900_000.0]))))
    limits = asked.limits
    if limits is not None:
        limits = replace(limits, of_offers=limits.of_offers[: len(offers)], look_alikes_have_room=draw(st.booleans()))
    return replace(
        asked,
        offers=offers,
        limits=limits,
        look_alikes=look_alikes,
        skipped=draw(st.lists(workers, max_size=2, unique=True)),
        least_members=draw(st.sampled_from([0, 0, 0, 3])),
        ring=draw(st.sampled_from([0, 1 << 31, RING - 1])),
    )


def limits_of(count: int) -> st.SearchStrategy[Limits]:
    """Limits that these tests' loads sometimes exceed."""
    each = st.builds(
        Limit, st.sampled_from([0, 1, 5]), st.sampled_from([0, 5_000, 60_000]), st.sampled_from([0.0, 900_000.0])
    )
    return st.builds(
        Limits,
        st.lists(each, min_size=count, max_size=count),
        st.just(900),
        st.sampled_from([0.0, 50_000.0, 400_000.5]),
        st.sampled_from([0.0, 910_000.0, 950_000.25]),
        st.sampled_from([0.0, 1.0, 2.5]),
        st.booleans(),
    )


@st.composite
def pair_asks(draw: st.DrawFn) -> Ask:
    """Asks in which some workers compute only prompts, and the others answers and in some cases also prompts."""
    chains = [StepChain(STEP_TOKENS, draw(st.sampled_from(CHAINS))), StepChain(64, draw(st.sampled_from(CHAINS)))]
    prefills = draw(st.lists(st.sampled_from(WORKERS[:2]), unique=True))
    decodes = draw(st.lists(st.sampled_from(WORKERS[2:]), min_size=1, unique=True))
    both = draw(st.lists(st.sampled_from(decodes), min_size=1, unique=True))

    def whole(worker_id: str) -> Offer:
        extra_us = draw(st.sampled_from([0.0, 30_000.0]))
        capacity = 6 if worker_id == "c-12" else 0
        chain = WORKERS.index(worker_id) % 2
        return offer(worker_id, input_tokens=900, chain=chain, capacity_steps=capacity, extra_us=extra_us)

    apart = [
        offer(id, input_tokens=900)._replace(cached_tokens=900, base_us=0.0, work_us=draw(st.sampled_from([0.0, 9e3])))
        for id in decodes
    ]
    groups = draw(st.lists(st.integers(0, 1), min_size=len(prefills), max_size=len(prefills)))
    moved = st.lists(st.sampled_from([-1.0, 500.0, 850_000.0, 900_000.5]), min_size=2, max_size=2)
    transfers = draw(st.lists(moved, min_size=len(decodes), max_size=len(decodes)))
    offers = [*(whole(id) for id in prefills), *apart, *(whole(id) for id in both)]
    pairing = PairLayout(len(prefills), len(decodes), groups, transfers)
    return Ask(offers, chains, 2.5, draw(st.none() | limits_of(len(offers))), pairing)


class Both(RuleBasedStateMachine):
    store_url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = self.run(open_store(self.store_url, wait=False))
        self.run(self.store.client.flushall())
        self.clock = Clock(self.store)
        self.run(self.clock.prepare())
        self.stores = (RedisReservations(self.store), MemoryReservations(self.clock))

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def teardown(self) -> None:
        self.run(self.store.client.function_flush())  # of a clock that only tests know
        self.run(self.store.close())
        self.runner.close()

    def same(self, call: str, *args: Any) -> None:
        real, model = (self.answer(store, call, *args) for store in self.stores)
        if isinstance(real, Evaluation) and isinstance(model, Evaluation):
            assert same_evaluation(real, model), (call, real, list(real.by_offer), model)
        else:
            assert real == model, call

    def answer(self, store: Reservations, call: str, *args: Any) -> Any:
        try:
            return self.run(getattr(store, call)(POOL, *args))
        except LookAlikesUnknown:
            return LookAlikesUnknown

    @rule(
        number=numbers,
        asked=asks() | look_alike_asks(),
        router=st.sampled_from(["r1", "r2"]),
        longest_s=st.sampled_from([8, 600]),
    )
    def book(self, number: int, asked: Ask, router: str, longest_s: int) -> None:
        self.same("book", Booking(id_of(number), router, 900, asked, LEASE_US, longest_s * SECOND_US))

    @rule(number=numbers, prefill=numbers, asked=pair_asks())
    def book_pair(self, number: int, prefill: int, asked: Ask) -> None:
        if number != prefill:
            booking = Booking(id_of(number), "r1", 900, asked, LEASE_US, 600 * SECOND_US, id_of(prefill))
            self.same("book", booking)

    @rule(asked=asks() | look_alike_asks() | pair_asks())
    def evaluate(self, asked: Ask) -> None:
        self.same("evaluate", asked)

    @rule(number=numbers)
    def record_first_token(self, number: int) -> None:
        self.same("record_first_token", id_of(number))

    @rule(number=numbers, outcome=st.sampled_from(Outcome))
    def release(self, number: int, outcome: Outcome) -> None:
        self.same("release", id_of(number), outcome)

    @rule(router=st.sampled_from(["r1", "r2", "r3"]))
    def renew_lease(self, router: str) -> None:
        self.same("renew_lease", router, LEASE_US)

    @rule(router=st.sampled_from(["r1", "r2"]))
    def end_lease(self, router: str) -> None:
        self.same("end_lease", router)

    @rule(
        worker=workers,
        incarnation=st.sampled_from([1, 1, 1, 2]),
        load=loads,
        age_us=st.integers(0, 2 * SECOND_US),
        covers=st.booleans(),
        waiting=st.integers(0, 3),
        sampled=st.booleans(),
        routable=st.sampled_from([True, True, True, False]),
        limit=st.builds(Limit, st.sampled_from([0, 1, 5]), st.sampled_from([0, 5_000, 60_000]), st.just(0.0)),
    )
    def report(
        self,
        worker: str,
        incarnation: int,
        load: Load,
        age_us: int,
        covers: bool,
        waiting: int,
        sampled: bool,
        routable: bool,
        limit: Limit,
    ) -> None:
        sample = LoadReport(load, age_us, covers, waiting) if sampled else None
        likeness = LIKENESSES[2 if worker == "c-12" else WORKERS.index(worker) % 2] if routable else b""
        self.same("report", {worker: WorkerReport(incarnation, sample, likeness, limit)})

    @rule(worker=workers)
    def forget(self, worker: str) -> None:
        self.same("forget", worker)

    @rule(us=st.sampled_from([1, 100_000, SECOND_US, LEASE_US - 1, LEASE_US, 31 * SECOND_US]))
    def time_passes(self, us: int) -> None:
        self.run(self.clock.pass_us(us))

    @invariant()
    def the_same_load(self) -> None:
        self.same("evaluate", Ask([offer(worker) for worker in WORKERS]))

    @invariant()
    def the_same_predictions(self) -> None:
        for chain in CHAINS:
            cut = [StepChain(STEP_TOKENS, chain), StepChain(64, chain)]
            self.same("evaluate", Ask([offer(w, chain=i % 2) for i, w in enumerate(WORKERS)], cut, 2.0))

    @invariant()
    def what_has_ended_leaves_nothing_behind(self) -> None:
        self.run(self.stores[1].renew_lease(POOL, "r3", LEASE_US))
        self.run(self.stores[0].renew_lease(POOL, "r3", LEASE_US))
        sizes = {}
        for key in pool_keys(POOL):
            name = key.rpartition(":")[2].partition(".")[0]
            ordered = name in ("booked", "owned", "predicted", "deadlines", "samples") or name.startswith("order_")
            sizes[name] = self.run(getattr(self.store.client, "zcard" if ordered else "hlen")(key))
        assert sizes["predictions"] == sizes["predicted"]
        assert bool(sizes["anchors"]) == bool(sizes["predictions"])
        assert sizes["booked"] == sizes["owned"] <= sizes["reservations"]
        assert sizes["deadlines"] == sizes["reservations"] + sizes["predictions"] + sizes["routers"]
        assert len({sizes[name] for name in sizes if name.startswith("order_")}) == 1
        assert sizes["samples"] <= sizes["order_kv"] <= sizes["load"]
        steps_of = [self.stores[1].predicted_steps(POOL, worker) for worker in WORKERS]
        assert bool(sum(steps_of)) == bool(sizes["predictions"])
        assert steps_of[3] <= 6


@pytest.mark.parametrize("kind", ["valkey_url", "redis8_url"])
def test_the_store_does_what_the_model_does(request: pytest.FixtureRequest, kind: str) -> None:
    Both.store_url = request.getfixturevalue(kind)
    run_state_machine_as_test(
        Both,
        settings=settings(
            max_examples=14,
            stateful_step_count=25,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
