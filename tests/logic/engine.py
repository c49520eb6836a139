"""An engine: blocks of a few small trees in two namespaces, in HBM and (as copies) in host memory, with a feed and a replay
buffer, both lossy. Its blocks are the truth."""

import random
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING
from zlib import crc32

from kvatlas.blocks.hashing import HASH_BYTES, extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.identity import Scope
from kvatlas_publishers.engine_events import EngineBatch, EngineCleared, EngineEvent, EngineRemoved, EngineStored

if TYPE_CHECKING:
    from tests.logic.world import World

BLOCK_SIZE = 4
BUFFER_BATCHES = 8
ADAPTERS = (None, "lora")

Block = tuple[str | None, tuple[int, ...]]
"""(adapter, path from the root of its tree)."""
TieredBlock = tuple[bytes, bytes, Tier]
"""(scope id, packed sequence hash, tier): one residency as the index has it."""


def scope_of(adapter: str | None) -> Scope:
    return Scope("m", "t", adapter)


def tokens_of(path: tuple[int, ...]) -> list[int]:
    return [(depth * 8 + branch) * BLOCK_SIZE + i for depth, branch in enumerate(path) for i in range(BLOCK_SIZE)]


@cache
def hash_of(path: tuple[int, ...]) -> bytes:
    return extend_chain(tokens_of(path), BLOCK_SIZE)[-HASH_BYTES:]


@cache
def path_with_hash(max_depth: int) -> dict[bytes, tuple[int, ...]]:
    """The path that each sequence hash stands for."""
    paths: list[tuple[int, ...]] = [()]
    found = {}
    for depth in range(max_depth):
        paths = [(*path, branch) for path in paths for branch in ((0, 1) if depth in (0, 2) else (0,))]
        found.update({hash_of(path): path for path in paths})
    return found


def tiered_block(block: Block, tier: Tier) -> TieredBlock:
    return scope_of(block[0]).scope_id, hash_of(block[1]), tier


class Engine:
    def __init__(self, world: "World", number: int) -> None:
        self.world, self.number = world, number
        self.process = 0
        self.copies: Counter[tuple[Block, Tier]] = Counter()
        self.seq = 0
        self.buffer: list[tuple[int, bytes]] = []
        self.payloads: dict[bytes, EngineBatch] = {}
        self.ever: set[TieredBlock] = set()

    def restart(self) -> None:
        """Start another process on the same endpoint: nothing is cached, and seq starts at 0."""
        self.process += 1
        self.copies.clear()
        self.seq, self.buffer = 0, []

    def name(self, block: Block) -> int:
        """The block's engine hash. Two namespaces may share its low bits, but never all of it."""
        return crc32(repr(block).encode()) << 8 | len(block[1])

    def usable(self, granularity: int) -> set[TieredBlock]:
        """What a request could use: every granularity-th of the blocks without a hole before them."""
        held = {block for (block, _), count in self.copies.items() if count}
        return {
            tiered_block(block, tier)
            for (block, tier), count in self.copies.items()
            if count
            and len(block[1]) % granularity == 0
            and all((block[0], block[1][:depth]) in held for depth in range(1, len(block[1]) + 1))
        }

    # ------------------------------------------------------------ one step of its scheduler

    def work(self) -> None:
        chooser = self.world.random
        events: list[EngineEvent] = []
        draw = chooser.random()
        if draw < 0.04:
            for key in [key for key in self.copies if key[1] is Tier.HBM]:
                del self.copies[key]
            events.append(EngineCleared())
        elif draw < 0.14 and self.copies:
            self._drop(*chooser.choice(sorted(self.copies, key=repr)), events)  # in the middle, or one of two copies
        else:
            self._compute(chooser, events)
        if events:
            self._publish(EngineBatch(events))

    def _compute(self, chooser: random.Random, events: list[EngineEvent]) -> None:
        shape = self.world.shape
        adapter = chooser.choice(ADAPTERS)
        depth = chooser.randint(1, shape.depth)
        path = tuple(chooser.randrange(2) if i in (0, 2) else 0 for i in range(depth))
        run: list[Block] = []
        for end in range(1, depth + 1):
            block = (adapter, path[:end])
            if not self.copies[block, Tier.HBM] or chooser.random() < 0.05:
                run.append(block)
                self._count(block, Tier.HBM)
            elif run:
                self._stored(run, events)
                run = []
        if run:
            self._stored(run, events)
        while sum(1 for count in self.copies.values() if count) > shape.capacity:
            self._evict(chooser, events)

    def _evict(self, chooser: random.Random, events: list[EngineEvent]) -> None:
        held = sorted((key for key, count in self.copies.items() if count), key=repr)
        parents = {((b[0], b[1][:-1]), tier) for b, tier in held}
        block, tier = chooser.choice([key for key in held if key not in parents])
        if tier is Tier.HBM and chooser.random() < 0.3 and not self.copies[block, Tier.CPU_DRAM]:
            self._count(block, Tier.CPU_DRAM)  # moved to host memory: a placeholder names it by its hash
            events.append(EngineStored([self.name(block)], None, (), BLOCK_SIZE, Tier.CPU_DRAM))
        self._drop(block, tier, events)

    def _count(self, block: Block, tier: Tier) -> None:
        self.copies[block, tier] += 1
        self.ever.add(tiered_block(block, tier))

    def _drop(self, block: Block, tier: Tier, events: list[EngineEvent]) -> None:
        self.copies[block, tier] -= 1
        if not self.copies[block, tier]:
            del self.copies[block, tier]
        events.append(EngineRemoved([self.name(block)], tier))

    def _stored(self, run: list[Block], events: list[EngineEvent]) -> None:
        adapter, path = run[0]
        first = len(path) - 1
        parent = self.name((adapter, path[:first])) if first else None
        tokens = tokens_of(run[-1][1])[first * BLOCK_SIZE :]
        events.append(EngineStored([self.name(b) for b in run], parent, tokens, BLOCK_SIZE, adapter=adapter))

    # ------------------------------------------------------------ its feed

    def _publish(self, batch: EngineBatch) -> None:
        payload = f"{self.number} {self.process} {self.seq} {self.world.random.getrandbits(64)}".encode()
        self.payloads[payload] = EngineBatch([], lost=True) if self.world.fault("poison", 0.01) else batch
        self.buffer = [*self.buffer, (self.seq, payload)][-BUFFER_BATCHES:]
        for publisher in self.world.publishers_of(self.number):
            if not self.world.fault("feed", 0.15):
                publisher.feed.append((self.seq, payload))
                if self.world.fault("feed", 0.05):
                    publisher.feed.append((self.seq, payload))
        self.seq += 1

    def replay(self, first_seq: int) -> tuple[list[tuple[int, bytes]], bool]:
        """(batches, True if the end marker came)"""
        got = [one for one in self.buffer if one[0] >= first_seq]
        if self.world.fault("feed", 0.3):
            return [one for one in got if self.world.random.random() < 0.7], False
        return got, True
