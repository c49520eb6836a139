"""Look-alikes that hold different parts of a prompt: the choice of one call, which reads few of them, compared with looking at
every one in process."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

from kvatlas.blocks.hashing import HASH_BYTES, extend_chain
from kvatlas.blocks.reuse import ReuseRule
from kvatlas.blocks.tiers import Tier
from kvatlas.cost import EngineProfile, EngineRates, Load, Plan, Prices, QuillcacheProfile
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope
from kvatlas.index.direct_writes import DirectWrites
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.reservations import (
    Ask,
    Booking,
    Evaluation,
    LoadReport,
    LookAlikes,
    LookAlikesUnknown,
    Lookup,
    LookupChain,
    LookupImpossible,
    MemoryReservations,
    Offer,
    OfferKind,
    Outcome,
    RedisReservations,
    Reservations,
    Reuse,
    StepChain,
    WorkerReport,
)
from kvatlas.reservations.evaluation import worth_us
from kvatlas.reservations.lookup import MOST_LOOKED_UP_CHAINS, TooManyAlike
from kvatlas.reservations.protocol import MOST_LIKENESSES
from kvatlas.reservations.room_and_slo import Limit, Limits
from kvatlas.store.connection import Store
from tests.kvatlas.reservations.asks import LEASE_US, LONGEST_US, POOL, SECOND_US, Clock, FullScan, id_of

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
LIKENESSES = [b"likeness", b"likenesT", b"likenesU"]
SIZES = [16, 32, 0]
"""Block sizes of the likenesses' workers; 0: they have announced none."""
FAST, SLOW = EngineProfile(), EngineProfile(EngineRates(prefill_us_per_token=80.0, tpot_us_per_running=90.0))


class Fleet:
    """A random fleet, written both to a store and to a model in process. In a large one, all samples have the same age,
    because the store weighs only a limited number whose sample has just become too old."""

    def __init__(self, seed: int, store: Store, index: RedisIndex, clock: Clock, *, large: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = clock
        self.indexes = index, MemoryIndex()
        in_process = self.indexes[1]
        self.searching = RedisReservations(store, index), MemoryReservations(clock, in_process)
        self.model = FullScan(clock, in_process)
        self.large = large
        self.count = rng.choice([400, 400, 250] if large else [5, 20, 60, 150])
        self.blocks = rng.choice([2, 40, 130, 300] if large else [0, 1, 2, 9, 40, 130, 300])
        self.shape = rng.choice(["different", "alike", "evicted", "few", "none", "random"])
        self.tokens = [rng.randrange(50_000) for _ in range(self.blocks * 16 + 1)]
        self.heaviest, self.unknown = rng.choice([0, 1, 500, 4_000, 40_000]), rng.choice([0.0, 0.0, 0.2, 1.0])
        self.likeness_of = {f"w{n:03}": LIKENESSES[rng.choice([0, 0, 0, 0, 1, 2])] for n in range(self.count)}
        if rng.random() < 0.5:
            self.likeness_of = dict.fromkeys(self.likeness_of, LIKENESSES[0])
        self.tiers = rng.choice([[Tier.HBM], [Tier.HBM], [Tier.HBM], [Tier.HBM, Tier.HBM, Tier.CPU_DRAM]])
        self.slow = {id for id in self.likeness_of if rng.random() < rng.choice([0.0, 0.3])}

    def size_of(self, worker_id: str) -> int:
        return SIZES[LIKENESSES.index(self.likeness_of[worker_id])]

    def depth_of(self, number: int) -> int:
        blocks, rng = self.blocks, self.rng
        match self.shape:
            case "different":
                return number * blocks // self.count
            case "alike":
                return blocks // 3 if number > 4 else rng.randint(0, blocks)
            case "evicted":
                return blocks // 2 if number % 2 else rng.randint(0, blocks)
            case "few":
                return rng.randint(0, blocks) if number < 6 else 0
            case "none":
                return 0
        return rng.randint(0, blocks)

    async def hold(self) -> None:
        """Write the held blocks, including those of retired holders, and of some with a granularity that is not asked for."""
        for number, worker_id in enumerate(self.likeness_of):
            size = self.size_of(worker_id) or 16
            depth, tier = self.depth_of(number) * 16 // size, self.rng.choice(self.tiers)
            below = self.rng.randint(0, depth) if tier is not Tier.HBM else depth
            chain = extend_chain(self.tokens, size)[: depth * HASH_BYTES]
            for index in self.indexes:
                if below:
                    await index.put(ScopeUse(SCOPE, size), worker_id, Tier.HBM, chain[: below * HASH_BYTES])
                if depth > below:
                    await index.put(ScopeUse(SCOPE, size), worker_id, tier, chain[below * HASH_BYTES :])
        real, _ = self.indexes
        for number in range(self.rng.choice([0, 4])):  # an in-process index frees at once what a store sweeps later
            chain = extend_chain(self.tokens, 16)[: self.rng.randint(0, self.blocks) * HASH_BYTES]
            kept = self.rng.randrange(len(chain) // HASH_BYTES) if chain else 0
            if chain:
                await real.put(ScopeUse(SCOPE, 16), f"gone{number}", Tier.HBM, chain[kept * HASH_BYTES :])
                record = await real.record(f"gone{number}")
                assert record is not None
                await real.retire(f"gone{number}", record.incarnation)

    async def report(self) -> None:
        for first in range(0, self.count, 24):
            reports = {}
            for worker_id in list(self.likeness_of)[first : first + 24]:
                rng, limit = self.rng, Limit(self.rng.choice([0, 40]), self.rng.choice([0, 900_000]))
                load = Load(
                    rng.randint(0, 40), rng.randint(0, self.heaviest), rng.choice([0, 0, 2]), rng.choice([0, 9_000])
                )
                age_us = 0 if self.large else rng.choice([0, 0, 4 * SECOND_US])
                sample = None if rng.random() < self.unknown else LoadReport(load, age_us)
                reports[worker_id] = WorkerReport(1, sample, self.likeness_of[worker_id], limit)
            for each in (*self.searching, self.model):
                await each.report(POOL, reports)

    def prompt(self) -> list[int]:
        shared = self.tokens[: self.rng.randint(0, self.blocks) * 16]
        return [*shared, *(self.rng.randrange(50_000) for _ in range(self.rng.randint(1, 900)))]

    def ask(self, tokens: list[int]) -> Ask:
        rng, output = self.rng, self.rng.choice([1, 128, 700])
        lookups = {size: LookupChain(size, extend_chain(tokens, size)) for size in SIZES if size}
        chains = [StepChain.of(SCOPE.scope_id, size, one.hashes) for size, one in lookups.items()]
        rule = rng.choice([ReuseRule(), ReuseRule(dropped_blocks=1), ReuseRule(block_aligned=False, share=0.7),
                           ReuseRule(dropped_blocks=1, drops_resident=True, alignment_tokens=64)])  # fmt: skip
        rows, reuse, row_chains = [], [], []
        interference, believed_us = rng.choice([0.0, 0.1]), 5 * SECOND_US
        for profile in (FAST, SLOW):
            for number, likeness in enumerate(LIKENESSES):
                prices = profile.prices(Plan("w", len(tokens), output))
                if rng.random() < 0.1:
                    prices = rng.choice(
                        [QuillcacheProfile().prices(Plan("w", 1, 9)), Prices(30.0, 9e3, 4.0, 9, 30.0, hit_us=400)]
                    )
                work, size = worth_us(prices._replace(hit_us=0.0), len(tokens)), SIZES[number]
                chain = number if size and len(chains[number].hashes) else None
                each = Reuse.of(rule, len(tokens), size or 16, rng.choice([None, None, 64]))
                kind = OfferKind(chain, each.most_tokens, each.lost_tokens, prices, believed_us, 0, interference)
                rows.append(
                    LookAlikes(likeness, Offer("", kind, 0, 0, work + output * 7_000.0, work), output * 7_000.0)
                )
                reuse.append(each)
                row_chains.append(lookups[size] if size else None)
        home = rng.choice([None, None, *self.likeness_of])
        odd = {id: 3 + LIKENESSES.index(likeness) for id, likeness in self.likeness_of.items() if id in self.slow}
        named = {}
        if rng.random() < 0.4:  # in the order in which ties are broken; some may be unknown to the store
            some = [*self.likeness_of, "unknown"] if self.count <= 60 else [*self.likeness_of]
            rows_of = {id: LIKENESSES.index(likeness) for id, likeness in self.likeness_of.items()} | odd
            named = {id: rows_of.get(id, 0) for id in rng.sample(some, min(16, len(some)))}
        lookup = Lookup(SCOPE, row_chains, reuse, odd, home, 50_000.0 if home else 0.0, named)
        limits = rng.choice([None, Limits([], len(tokens)), Limits([], len(tokens), 400_000.0, output * 9_000.0, 2.5),
                             Limits([], len(tokens), 100_000.0, 0.0, slo_filters=True)])  # fmt: skip
        skipped = rng.sample(list(self.likeness_of), 2) if rng.random() < 0.2 else ()
        return Ask([], chains, rng.choice([0.0, 16.0]), limits, look_alikes=rows, skipped=skipped, ring=rng.randrange(1 << 32),
                   lookup=lookup)  # fmt: skip

    async def evaluate(self, asked: Ask) -> None:
        model = await outcome_of(self.model, asked)
        for each in self.searching:
            self.compare(asked, await outcome_of(each, asked), model)

    def compare(self, asked: Ask, found: Evaluation | type[Exception], model: Evaluation | type[Exception]) -> None:
        if isinstance(found, Evaluation) and isinstance(model, Evaluation):
            assert found.worker_id == model.worker_id, (found.offers[found.chosen], model.offers[model.chosen])
            assert asked.lookup is not None
            assert not asked.lookup.named or {*found.worker_ids} == {*asked.lookup.named}
            numbers = {offer.worker_id: i for i, offer in enumerate(model.offers)}
            for i, offer in enumerate(found.offers):
                same = numbers[offer.worker_id]
                assert (offer, found.held_tokens[i]) == (model.offers[same], model.held_tokens[same])
                assert found.by_offer[i] == model.by_offer[same]
        else:
            assert found == model or (self.large and found is TooManyAlike)


async def outcome_of(reservations: Reservations, asked: Ask) -> Evaluation | type[Exception]:
    try:
        return await reservations.evaluate(POOL, asked)
    except (LookAlikesUnknown, LookupImpossible) as error:
        return type(error)


@pytest.mark.parametrize(("seed", "large"), [(0, False), (1, False), (2, False), (3, False), (52, True)])
async def test_the_choice_of_one_call_is_that_of_a_look_at_every_worker(
    store: Store, clock: Clock, seed: int, large: bool
) -> None:
    for more in range(3):
        await store.client.flushdb()
        await clock.pass_us(0)
        index = await open_redis_index(store, writer=True)
        fleet = Fleet(seed * 100 + more, store, index, clock, large=large)
        await fleet.hold()
        await fleet.report()
        live: list[bytes] = []
        prompts = [fleet.prompt() for _ in range(6)]
        for number in range(14):
            await clock.pass_us(fleet.rng.choice([0, 300_000] if large else [0, 300_000, SECOND_US]))
            if number % 5 == 4:
                await fleet.report()
            prompt = fleet.rng.choice(prompts)
            asked = fleet.ask(prompt)
            await fleet.evaluate(asked)
            if fleet.rng.random() < 0.7:
                id = id_of(number)
                booking = Booking(id, "r", len(prompt), asked, 60 * LEASE_US, LONGEST_US)
                in_store, in_process = fleet.searching
                booked = await booked_by(in_store, booking)
                if booked is not None or not large:
                    assert booked == await booked_by(fleet.model, booking)
                    assert booked == await booked_by(in_process, booking)
                live += [id] * (booked is not None)
            if live and fleet.rng.random() < 0.3:
                ended = live.pop(fleet.rng.randrange(len(live)))
                for each in (*fleet.searching, fleet.model):
                    await each.release(POOL, ended, Outcome.FINISHED)


async def booked_by(reservations: Reservations, booking: Booking) -> str | None:
    try:
        found = await reservations.book(POOL, booking)
    except (LookAlikesUnknown, LookupImpossible):
        return None
    return None if found is None else found.worker_id


async def test_a_holder_that_is_being_swept_hides_no_other(store: Store, clock: Clock) -> None:
    """A retired worker still has entries at the blocks after those that `shorter` holds, so each block has two."""
    index = await open_redis_index(store, writer=True)
    reservations, use = RedisReservations(store, index), ScopeUse(SCOPE, 16)
    tokens = list(range(10 * 16 + 1))
    chain = extend_chain(tokens, 16)
    for worker_id, hashes in (
        ("longer", chain),
        ("shorter", chain[: 6 * HASH_BYTES]),
        ("gone", chain[6 * HASH_BYTES :]),
    ):
        await index.put(use, worker_id, Tier.HBM, hashes)
    record = await index.record("gone")
    assert record is not None and await index.retire("gone", record.incarnation)
    busy = {"longer": Load(0, 90_000), "shorter": Load(0, 500), "other": Load(0, 450)}
    reports = {id: WorkerReport(1, LoadReport(load), LIKENESSES[0]) for id, load in busy.items()}
    await reservations.report(POOL, reports)
    prices = FAST.prices(Plan("w", len(tokens), 1))
    work = worth_us(prices, len(tokens))
    row = LookAlikes(LIKENESSES[0], Offer("", OfferKind(None, 160, 0, prices, 0), 0, 0, work, work))
    lookup = Lookup(SCOPE, [LookupChain(16, chain)], [Reuse.of(ReuseRule(), len(tokens), 16, None)])
    found = await reservations.evaluate(POOL, Ask([], look_alikes=[row], lookup=lookup))
    assert (found.worker_id, found.held_tokens[found.chosen]) == ("shorter", 6 * 16)


WORKERS, LONG = 400, 300
"""Number of workers in a large fleet, and of blocks in its prompt."""


async def fill(
    reservations: Sequence[Reservations], indexes: Sequence[DirectWrites], held: Sequence[int], loads: Sequence[int]
) -> Ask:
    """Write workers that hold the first blocks of one prompt and have some tokens queued. Returns an ask about the prompt."""
    tokens = list(range(LONG * 16 + 1))
    chain = extend_chain(tokens, 16)
    for number, blocks in enumerate(held):
        for index in indexes if blocks else ():
            await index.put(ScopeUse(SCOPE, 16), f"w{number:03}", Tier.HBM, chain[: blocks * HASH_BYTES])
    for first in range(0, len(loads), 24):
        some = range(first, min(first + 24, len(loads)))
        reports = {f"w{n:03}": WorkerReport(1, LoadReport(Load(1, loads[n])), LIKENESSES[0]) for n in some}
        for each in reservations:
            await each.report(POOL, reports)
    prices = FAST.prices(Plan("w", len(tokens), 1))
    work = worth_us(prices, len(tokens))
    row = LookAlikes(LIKENESSES[0], Offer("", OfferKind(None, LONG * 16, 0, prices, 0), 0, 0, work, work))
    lookup = Lookup(SCOPE, [LookupChain(16, chain)], [Reuse.of(ReuseRule(), len(tokens), 16, None)])
    return Ask([], look_alikes=[row], lookup=lookup)


def large_fleet(crowd: int, others: int, least: int, most: int) -> tuple[list[int], list[int]]:
    """Blocks and queued tokens of each worker: a crowd that holds the same number, others of different depths, and the
    rest."""
    rng = random.Random(crowd + others)
    held = [*[150] * crowd, *(max(1, LONG - n) for n in range(others))]
    held += [0] * (WORKERS - len(held))
    return held, [rng.randint(least, most) if blocks else rng.randint(0, 90) for blocks in held]


@pytest.mark.parametrize(
    ("crowd", "others", "least", "most", "reads"),
    [
        (40, 0, 150, 2_000, 20),
        (0, 240, 20_000, 100_000, 65),
        (40, 240, 100_000, 100_000, 55),
        (40, 240, 2_000, 9_000, 50),
        (330, 0, 9_000, 9_000, 90),  # it reads loads in pairs
        (0, 399, 9_000, 9_000, 55),
        (0, 200, 1, 4_000, 24),
    ],
)
async def test_among_many_busy_holders_a_choice_reads_few_values(
    store: Store, clock: Clock, crowd: int, others: int, least: int, most: int, reads: int
) -> None:
    """Even if each holds a different part: it does not read one depth after the other."""
    index, model_index = await open_redis_index(store, writer=True), MemoryIndex()
    real, model = RedisReservations(store, index), FullScan(clock, model_index)
    held, loads = large_fleet(crowd, others, least, most)
    asked = await fill([real, model], [index, model_index], held, loads)
    for ring in (0, 1 << 31):
        await store.client.config_resetstat()
        found = await real.evaluate(POOL, replace(asked, ring=ring))
        calls = {name: stats["calls"] for name, stats in (await store.client.info("commandstats")).items()}
        assert calls["cmdstat_hget"] + calls["cmdstat_hmget"] <= reads, calls
        expected = await model.evaluate(POOL, replace(asked, ring=ring))
        assert found.worker_id == expected.worker_id
        assert found.held_tokens[found.chosen] == expected.held_tokens[expected.chosen]


async def test_a_choice_that_would_read_most_of_a_large_fleet_is_left_to_the_client(store: Store, clock: Clock) -> None:
    """All are over a limit, so any worker that was not read may be the only one within it."""
    index = await open_redis_index(store, writer=True)
    reservations = RedisReservations(store, index)
    asked = await fill([reservations], [], [0] * WORKERS, [10] * WORKERS)
    late = Limits([], LONG * 16 + 1, 1.0, slo_filters=True)
    with pytest.raises(TooManyAlike):
        await reservations.evaluate(POOL, replace(asked, limits=late))


class Shards(NamedTuple):
    shard_keys: Sequence[ShardKeys]


async def test_a_lookup_that_the_store_can_not_do_fails_no_store(store: Store, clock: Clock) -> None:
    """The client then looks the prompt up separately, and continues to call the store."""
    index = await open_redis_index(store, writer=True)
    shards = Shards(index.shard_keys)
    reservations = RedisReservations(store, shards)
    asked = await fill([reservations], [], [0] * 5, [10] * 5)
    assert asked.lookup is not None
    kinds = replace(
        asked,
        look_alikes=[*asked.look_alikes] * (MOST_LIKENESSES + 1),
        lookup=replace(
            asked.lookup,
            chains=[*asked.lookup.chains] * (MOST_LIKENESSES + 1),
            reuse=[*asked.lookup.reuse] * (MOST_LIKENESSES + 1),
        ),
    )
    odd = replace(asked, lookup=replace(asked.lookup, odd={f"{n:064}": 0 for n in range(2_000)}))
    chains = [LookupChain(16, n.to_bytes(8, "big")) for n in range(MOST_LOOKED_UP_CHAINS + 1)]
    many = replace(asked, lookup=replace(asked.lookup, chains=chains, reuse=[*asked.lookup.reuse] * len(chains)))
    for too_much in (kinds, odd, many):
        with pytest.raises(LookupImpossible):
            await reservations.evaluate(POOL, too_much)
        with pytest.raises(LookupImpossible):
            await reservations.book(POOL, Booking(id_of(1), "r", 100, too_much, LEASE_US, LONGEST_US))
    reservations = RedisReservations(store, Shards([*index.shard_keys] * 2))  # laid out again since `look_up` was read
    with pytest.raises(LookupImpossible):
        await reservations.evaluate(POOL, asked)
