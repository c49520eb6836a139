"""Memory and Redis index after the same messages: identical answers after every step.

Workers publish prefix-closed residency of small trees in several scopes and tiers, interspersed with replays, zombies, gaps,
wrong snapshots, clears, retirements and sweeps. Two of the workers have marks. Galloping, and the search for the deepest mark,
are compared with a full walk in both after every step.
"""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.bus.subjects import partition_of
from kvatlas.events import Checkpoint
from kvatlas.identity import Scope, shard_of
from kvatlas.index.mark_lookup import SEGMENT
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.store.connection import Store, open_store
from tests.kvatlas.index.message_source import BLOCK_SIZE, MessageSource, apply_messages, contents, split

SCOPES = [Scope("m", "t"), Scope("m", "t", "lora"), Scope("m", "t", None, "tenant"), Scope("m2", "t")]
LENGTH = 150
TRUNK = extend_chain(range(LENGTH), 1)
CHAINS = [TRUNK] + [
    TRUNK[: 8 * at] + extend_chain(range(1000 * at, 1000 * at + LENGTH - at), 1, parent=unpack_hashes(TRUNK)[at - 1])
    for at in (3, 64, 70)
]
WORKERS = ["w0", "w1", "w2"]
DROPPED = {"w1": 0, "w2": 1}
"""By worker with marks: the number of blocks from a position to its mark."""
PLACES = {key: (keys[i // SEGMENT * SEGMENT], i % SEGMENT) for keys in map(split, CHAINS) for i, key in enumerate(keys)}
TIERS = [Tier.HBM, Tier.CPU_DRAM]

workers = st.sampled_from(WORKERS)
scopes = st.sampled_from(SCOPES)
chains = st.sampled_from(CHAINS)
tiers = st.sampled_from(TIERS)
depths = st.integers(1, LENGTH)
sizes = st.builds(
    BlockSizes, st.just(BLOCK_SIZE), st.sampled_from([0, 100, 200]), st.sampled_from([(), ((Tier.CPU_DRAM, 25),)])
)


class Indexes(RuleBasedStateMachine):
    store_url = ""
    shards = 1

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.memory = MemoryIndex(shards=self.shards)
        self.opened: Store = self.run(open_store(self.store_url, wait=False))
        self.run(self.opened.client.flushall())
        self.redis: RedisIndex = self.run(
            open_redis_index(self.opened, shards=self.shards, side_index=True, writer=True)
        )
        self.sources = {worker: MessageSource(worker, dropped=DROPPED.get(worker), places=PLACES) for worker in WORKERS}
        self.sent: dict[str, list[wire.RawMessage]] = {worker: [] for worker in WORKERS}

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def teardown(self) -> None:
        self.run(self.opened.close())
        self.runner.close()

    def apply(self, worker: str, *messages: wire.RawMessage, remember: bool = True) -> None:
        if remember:
            self.sent[worker] += messages
        assert self.run(apply_messages(self.memory, *messages)) == self.run(apply_messages(self.redis, *messages))

    def depth(self, worker: str, scope: Scope, chain: bytes) -> int:
        """Number of the chain's blocks that the worker holds according to its messages."""
        held = self.sources[worker].held
        return next((i for i, key in enumerate(split(chain)) if (scope, key) not in held), LENGTH)

    @rule(worker=workers, scope=scopes, chain=chains, tier=tiers, depth=depths)
    def store(self, worker: str, scope: Scope, chain: bytes, tier: Tier, depth: int) -> None:
        """Extend what is held, or add a tier to it."""
        held = self.depth(worker, scope, chain)
        first = held if tier == Tier.HBM else 0
        run = chain[8 * first : 8 * max(depth, first)] if tier == Tier.HBM else chain[: 8 * min(depth, held)]
        if run:
            parent = chain[8 * (first - 1) : 8 * first] if first else None
            self.apply(worker, self.sources[worker].store(scope, run, tier, parent))

    @rule(worker=workers, scope=scopes, chain=chains, depth=depths)
    def evict(self, worker: str, scope: Scope, chain: bytes, depth: int) -> None:
        """Remove a chain's end, with everything after it, from every tier."""
        source = self.sources[worker]
        gone = set(split(chain)[depth:])
        for other in CHAINS:
            keys = split(other)
            first = next((i for i, key in enumerate(keys) if key in gone), LENGTH)
            gone |= set(keys[first:])
        messages = []
        if marked := [key for one, key in source.marks if one == scope and key in gone]:
            messages.append(source.mark(scope, marked, unmark=True))
        for tier in TIERS:
            for other in CHAINS:
                keys = [k for k in split(other) if k in gone and tier in source.held.get((scope, k), ())]
                if keys:
                    messages.append(source.remove(scope, b"".join(reversed(keys)), tier))
        if messages:
            self.apply(worker, *messages)

    @rule(
        worker=st.sampled_from(sorted(DROPPED)),
        scope=scopes,
        chain=chains,
        at=st.sets(depths, max_size=5),
        on=st.booleans(),
    )
    def mark(self, worker: str, scope: Scope, chain: bytes, at: set[int], on: bool) -> None:
        """Mark held blocks, or unmark some."""
        source, keys = self.sources[worker], split(chain)
        held = self.depth(worker, scope, chain)
        if on:
            some = [keys[i - 1] for i in sorted(at) if i <= held and (scope, keys[i - 1]) not in source.marks]
        else:
            some = [key for one, key in source.marks if one == scope][: len(at)]
        if some:
            self.apply(worker, source.mark(scope, some, unmark=not on))

    @rule(worker=workers)
    def clear(self, worker: str) -> None:
        self.apply(worker, self.sources[worker].clear())

    @rule(worker=workers, new=sizes)
    def resize(self, worker: str, new: BlockSizes) -> None:
        """Blocks have different sizes from now on."""
        self.sources[worker].sizes = new

    @rule(worker=workers, scope=scopes, step=st.integers(1, 3), old=sizes, new=sizes)
    def new_incarnation(self, worker: str, scope: Scope, step: int, old: BlockSizes, new: BlockSizes) -> None:
        """Begin an incarnation in one call with the previous one's last messages, and with different sizes."""
        source = self.sources[worker]
        source.sizes = old
        last = [source.store(scope, TRUNK[:8], tier) for tier in TIERS]
        source.sizes = new
        self.apply(worker, *last, source.begin(source.incarnation + step))

    @rule(worker=workers, back=st.integers(1, 30), count=st.integers(1, 30))
    def replay(self, worker: str, back: int, count: int) -> None:
        """Apply old messages again: duplicates, or from a dead incarnation."""
        messages = self.sent[worker][-back:][:count]
        if messages:
            self.apply(worker, *messages, remember=False)

    @rule(worker=workers, scope=scopes, chain=chains)
    def lose(self, worker: str, scope: Scope, chain: bytes) -> None:
        """Lose a message. The next one is a gap, so nothing more is applied until a snapshot."""
        source = self.sources[worker]
        held = self.depth(worker, scope, chain)
        if held + 2 <= LENGTH:
            source.store(scope, chain[8 * held : 8 * held + 8])
            self.apply(worker, source.store(scope, chain[8 * held + 8 : 8 * held + 16]))

    @rule(worker=workers, right=st.booleans())
    def checkpoint(self, worker: str, right: bool) -> None:
        words = self.sources[worker].digest_words()
        words[-1] = words[-1] if right else (words[-1] + 1) % (1 << 32)
        self.apply(worker, self.sources[worker].message(Checkpoint(words)))

    @rule(worker=workers)
    def torn_snapshot(self, worker: str) -> None:
        """Send a snapshot with a wrong digest, which closes the incarnation."""
        source = self.sources[worker]
        message = source.begin(source.incarnation + 1)
        message[wire.EVENTS][-1][wire.END_DIGEST][1] += 1
        self.apply(worker, message)

    @rule(worker=workers)
    def retire(self, worker: str) -> None:
        record = self.run(self.memory.record(worker))
        if record is not None:
            outcomes = [self.run(index.retire(worker, record.incarnation)) for index in (self.memory, self.redis)]
            assert outcomes[0] == outcomes[1]

    @rule()
    def sweep(self) -> None:
        for shard in range(self.shards):
            assert self.run(self.memory.sweep(shard, 10**6)) == self.run(self.redis.sweep(shard, 10**6)) == 0

    @rule(scope=scopes, chain=chains, at=depths)
    def look_at_one_block(self, scope: Scope, chain: bytes, at: int) -> None:
        sequence_hash = int.from_bytes(chain[8 * at - 8 : 8 * at], "little")
        assert self.run(self.memory.locate(scope, sequence_hash)) == self.run(self.redis.locate(scope, sequence_hash))
        for prefix in (sequence_hash, None):
            assert self.run(self.memory.children(scope, prefix)) == self.run(self.redis.children(scope, prefix))

    @invariant()
    def answers_are_equal(self) -> None:
        for index in (self.memory, self.redis):
            for scope in SCOPES:
                for chain in CHAINS:
                    assert self.run(index.overlap(scope, chain, verify=True)).differences == ()
        for scope in SCOPES:
            for chain in CHAINS:
                for part in (chain, chain[8 * 60 :]):
                    found = self.run(self.memory.overlap(scope, part)), self.run(self.redis.overlap(scope, part))
                    assert found[0].depths() == found[1].depths()
                    assert found[0].reach() == found[1].reach()
                behind = [
                    self.run(index.overlap(scope, chain[8 * SEGMENT :], first_index=SEGMENT, limit=90)).reach()
                    for index in (self.memory, self.redis)
                ]
                assert behind[0] == behind[1]
        for worker in WORKERS:
            records = [self.run(index.record(worker)) for index in (self.memory, self.redis)]
            assert records[0] == records[1]
            assert self.run(self.memory.digest(worker)) == self.run(self.redis.digest(worker))
            if (
                records[0] is not None
                and not records[0].bad
                and records[0].want <= (records[0].incarnation, records[0].seq)
            ):
                assert self.run(self.memory.digest(worker)) == self.sources[worker].digest_words()
                self.check_reach(worker)
        assert self.run(self.memory.length()) == self.run(self.redis.length())
        assert self.run(self.memory.resident_blocks()) == self.run(self.redis.resident_blocks())

    def check_reach(self, worker: str) -> None:
        """Check what a worker with marks can resume, according to its messages."""
        source = self.sources[worker]
        for scope in SCOPES:
            for chain in CHAINS:
                reach = self.run(self.memory.overlap(scope, chain, limit=100)).reach()
                held = self.depth(worker, scope, chain)
                assert (worker in reach) == (source.dropped is not None and held > 0)
                if worker in reach:
                    positions = [
                        i + 1 - (source.dropped or 0)
                        for i, k in enumerate(split(chain)[:held])
                        if (scope, k) in source.marks
                    ]
                    assert reach[worker] == max((at for at in positions if at <= 100), default=0)

    @rule(worker=workers)
    def compare_contents(self, worker: str) -> None:
        held = self.run(contents(self.memory, worker))
        assert held == self.run(contents(self.redis, worker))


@pytest.mark.parametrize(("server", "shards"), [("valkey", 4), ("redis8", 1)])
def test_memory_and_redis_give_the_same_answers(request: pytest.FixtureRequest, server: str, shards: int) -> None:
    machine = type("Machine", (Indexes,), {"store_url": request.getfixturevalue(f"{server}_url"), "shards": shards})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=6, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_a_worker_lives_in_the_shard_of_its_partition() -> None:
    """The three workers are in different shards of four, so that the test above looks at more than one."""
    assert len({shard_of(partition_of(worker, 64), 4) for worker in WORKERS}) > 1
