"""What must hold of a run, and what is remembered to know it.

What each message says is remembered when it is first sent (`told`), and held against the index after every call:

    I1  at the end the index is what the ledgers announce, which is what the engines could use or less; nothing is left of
        retired holders
    I2  always: a holder holds exactly what its worker's incarnation had told by the record's seq; what was told is
        prefix-closed and was once held by that very worker, in that scope
    I3  always: an overlap by galloping is the overlap by a full walk
    I4  few snapshots after the faults stop
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import tiers_of
from kvatlas.bus import wire
from kvatlas.events import Checkpoint, Cleared, Message, Removed, SnapshotBegin, SnapshotEnd
from kvatlas.index.holder_entries import flags_in, number_bytes
from kvatlas.index.memory.shard import MemoryShard, Record
from tests.logic.engine import ADAPTERS, TieredBlock, hash_of, path_with_hash, scope_of
from tests.logic.publisher import Publisher

if TYPE_CHECKING:
    from tests.logic.world import World

Residency = frozenset[TieredBlock]


class Violation(AssertionError):
    """An invariant fell."""


@dataclass(slots=True)
class Incarnation:
    """What one incarnation told: its payloads by seq, and the residency after each."""

    payloads: list[bytes]
    states: list[Residency]
    whole: bool = False
    """Its snapshot has ended: from then on what it tells is prefix-closed."""


class Invariants:
    """Of one world. Each check raises Violation."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.damaged = False
        """Blocks were changed by hand: from then on only the end is held against what was told."""
        self._told: dict[str, dict[int, Incarnation]] = {}
        self._ever_told: dict[str, set[Residency]] = {}

    # ------------------------------------------------------------ what was told

    def remember(self, worker_id: str, payload: bytes) -> None:
        """A message is sent, perhaps again."""
        message = wire.decode(payload)
        incarnations = self._told.setdefault(worker_id, {})
        incarnation = incarnations.setdefault(message.incarnation, Incarnation([], []))
        if message.seq < len(incarnation.payloads):
            if incarnation.payloads[message.seq] != payload:
                raise Violation(f"I2 worker {worker_id} told incarnation {message.incarnation} twice")
            return
        if message.seq > len(incarnation.payloads):
            raise Violation(f"I2 worker {worker_id} skipped seq {len(incarnation.payloads)}")
        before = incarnation.states[-1] if incarnation.states else frozenset()
        state = _after(before, message)
        incarnation.whole = incarnation.whole or any(isinstance(event, SnapshotEnd) for event in message.events)
        incarnation.payloads.append(payload)
        incarnation.states.append(state)
        self._check_told(worker_id, state, incarnation.whole)
        self._ever_told.setdefault(worker_id, set()).add(state)

    def _check_told(self, worker_id: str, state: Residency, whole: bool) -> None:
        engine = self.world.engines[self.world.number_of(worker_id)]
        if not state <= engine.ever:
            raise Violation(f"I2 worker {worker_id} tells what it never had: {sorted(state - engine.ever)}")
        if not whole:
            return
        held = {(scope_id, key) for scope_id, key, _ in state}
        paths = path_with_hash(self.world.shape.depth)
        for scope_id, key in held:
            path = paths[key]
            for depth in range(self.world.shape.granularity, len(path), self.world.shape.granularity):
                if (scope_id, hash_of(path[:depth])) not in held:
                    raise Violation(f"I2 worker {worker_id} tells {path} without {path[:depth]}")

    # ------------------------------------------------------------ invariants

    def check(self) -> None:
        """I2 and I3, after a call that changed the store."""
        if self.damaged:
            return
        for shard in self.world.index.shard_states():
            for worker_id, record in shard.workers.items():
                self._check_worker(shard, worker_id, record)
            self._check_overlap(shard)

    def _check_worker(self, shard: MemoryShard, worker_id: str, record: Record) -> None:
        if record.active >= 0:
            if shard.active.get(record.active) != worker_id:
                raise Violation(f"I2 worker {worker_id}: its holder is {shard.active.get(record.active)}'s")
            held = residency(shard, record.active)
            current = record.loading < 0 and not record.closed
            if current and held != self._told_at(worker_id, record):
                raise Violation(
                    f"I2 worker {worker_id} holds {sorted(held)}, told {sorted(self._told_at(worker_id, record))}"
                )
            if held not in self._ever_told[worker_id] and held:
                raise Violation(f"I2 worker {worker_id} holds what was never told so: {sorted(held)}")
        if record.loading >= 0 and residency(shard, record.loading) != self._told_at(worker_id, record):
            raise Violation(f"I2 worker {worker_id}: its snapshot is not what was told")

    def _told_at(self, worker_id: str, record: Record) -> Residency:
        return self._told[worker_id][record.incarnation].states[record.seq]

    def _check_overlap(self, shard: MemoryShard) -> None:
        adapter = self.world.random.choice(ADAPTERS)
        path = tuple(self.world.random.randrange(2) if i in (0, 2) else 0 for i in range(self.world.shape.depth))
        keys = [hash_of(path[:d]) for d in range(1, len(path) + 1) if d % self.world.shape.granularity == 0]
        chain, scope_id = b"".join(keys), scope_of(adapter).scope_id
        fast, slow = (shard.overlap(scope_id, chain, stride).depths() for stride in (4, 0))
        if fast != slow:
            raise Violation(f"I3 galloping {fast}, walking {slow}")

    def check_end(self, snapshots: int) -> None:
        for one in self.world.publishers:
            shard = self.world.index.shard_of_worker(one.worker_id)
            record = shard.workers.get(one.worker_id)
            held = residency(shard, record.active) if record is not None and record.active >= 0 else frozenset()
            if held != one.announced or (record is not None and record.loading >= 0):
                raise Violation(
                    f"I1 worker {one.worker_id}: index {sorted(held)}, announced {sorted(one.announced)}, {record}"
                )
            usable = one.engine.usable(self.world.shape.granularity)
            if not one.announced <= usable:
                raise Violation(f"I1 worker {one.worker_id} claims {sorted(one.announced - usable)}")
            if one.worker_id not in self.world.fleet.records:
                raise Violation(f"I1 worker {one.worker_id} is not in the fleet")
            self.world.stats["announced"] += len(held)
            self.world.stats["usable"] += len(usable)
        for shard in self.world.index.shard_states():
            used = {holder for record in shard.workers.values() for holder in (record.active, record.loading)} - {-1}
            if set(shard.holders) != used:
                raise Violation(f"I1 holders {sorted(shard.holders)} left, {sorted(used)} in use")
            leftover = [key for blocks in shard.blocks.values() for key, value in blocks.items() if not value]
            if leftover:
                raise Violation("I1 empty entries left")
        self.world.stats["snapshots"] += self.world.gone_snapshots + sum(
            one.counters.snapshots for one in self.world.publishers
        )
        self.world.stats["snapshots after the faults"] += snapshots
        if snapshots > 6 * len(self.world.publishers):
            raise Violation(
                f"I4 {snapshots} snapshots of {len(self.world.publishers)} workers after the faults stopped"
            )

    def check_gone(self, gone: Publisher) -> None:
        worker_id = gone.worker_id
        record = self.world.index.shard_of_worker(worker_id).workers.get(worker_id)
        if record is not None and (record.active >= 0 or record.loading >= 0):
            raise Violation(f"I1 worker {worker_id} is gone and still answers: {record}")
        if worker_id in self.world.fleet.records:
            raise Violation(f"I1 worker {worker_id} is gone and still in the fleet")


def residency(shard: MemoryShard, holder: int) -> Residency:
    number = number_bytes(holder)
    return frozenset(
        (scope_id, key, tier)
        for scope_id, blocks in shard.blocks.items()
        for key, value in blocks.items()
        for tier in tiers_of(flags_in(value, number))
    )


def _after(state: Residency, message: Message) -> Residency:
    """What the worker holds when a message was taken in: plain sets, nothing of the index's own."""
    held = set(state)
    for event in message.events:
        if isinstance(event, (SnapshotBegin, Cleared)):
            held.clear()
        elif isinstance(event, (SnapshotEnd, Checkpoint)):
            continue
        else:
            keys = [event.hashes[at : at + HASH_BYTES] for at in range(0, len(event.hashes), HASH_BYTES)]
            change = {(event.scope_id, key, event.tier) for key in keys}
            held = held - change if isinstance(event, Removed) else held | change
    return frozenset(held)
