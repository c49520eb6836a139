"""The invariants of a run, and the state that is kept to check them.

The content of each message is remembered when it is first sent, and compared with the index after every call:

    I1  at the end: the index holds what the ledgers announce, which is at most what the engines could use; retired holders
        have no entries
    I2  always: a holder holds exactly what its worker's incarnation had published by the record's seq; this is
        prefix-closed, and that worker once held it, in that scope
    I3  always: an overlap by galloping is the overlap by a full walk
    I4  few snapshots after the faults stop
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import tiers_of
from kvatlas.bus import wire
from kvatlas.events import Checkpoint, Cleared, Heads, Marked, Message, Removed, SnapshotBegin, SnapshotEnd, Unmarked
from kvatlas.index.holder_entries import entries_of, number_bytes
from kvatlas.index.memory.shard import MemoryShard, Record
from tests.logic.engine import ADAPTERS, TieredBlock, hash_of, path_with_hash, scope_of
from tests.logic.publisher import Publisher

if TYPE_CHECKING:
    from tests.logic.world import World

Residency = frozenset[TieredBlock]


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True)
class Incarnation:
    """What one incarnation has published: its payloads by seq, and the residency after each."""

    payloads: list[bytes]
    states: list[Residency]
    whole: bool = False
    """Its snapshot has ended: from then on the residency is prefix-closed."""


class Invariants:
    """Checks one world. Each check raises Violation."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.damaged = False
        """Blocks were changed by hand: from then on only the end is checked."""
        self._published: dict[str, dict[int, Incarnation]] = {}
        self._ever_published: dict[str, set[Residency]] = {}

    # ------------------------------------------------------------ what was published

    def remember(self, worker_id: str, payload: bytes) -> None:
        """Remember a sent message; it may have been sent before."""
        message = wire.decode(payload)
        incarnations = self._published.setdefault(worker_id, {})
        incarnation = incarnations.setdefault(message.incarnation, Incarnation([], []))
        if message.seq < len(incarnation.payloads):
            if incarnation.payloads[message.seq] != payload:
                raise Violation(
                    f"I2 worker {worker_id} published seq {message.seq} of incarnation {message.incarnation} twice"
                )
            return
        if message.seq > len(incarnation.payloads):
            raise Violation(f"I2 worker {worker_id} skipped seq {len(incarnation.payloads)}")
        before = incarnation.states[-1] if incarnation.states else frozenset()
        state = _after(before, message)
        incarnation.whole = incarnation.whole or any(isinstance(event, SnapshotEnd) for event in message.events)
        incarnation.payloads.append(payload)
        incarnation.states.append(state)
        self._check_published(worker_id, state, incarnation.whole)
        self._ever_published.setdefault(worker_id, set()).add(state)

    def _check_published(self, worker_id: str, state: Residency, whole: bool) -> None:
        engine = self.world.engines[self.world.number_of(worker_id)]
        if not state <= engine.ever:
            raise Violation(f"I2 worker {worker_id} publishes blocks that it never had: {sorted(state - engine.ever)}")
        if not whole:
            return
        held = {(scope_id, key) for scope_id, key, _ in state}
        paths = path_with_hash(self.world.shape.depth)
        for scope_id, key in held:
            path = paths[key]
            for depth in range(self.world.shape.granularity, len(path), self.world.shape.granularity):
                if (scope_id, hash_of(path[:depth])) not in held:
                    raise Violation(f"I2 worker {worker_id} publishes {path} without {path[:depth]}")

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
            if shard.table.active.get(record.active) != worker_id:
                raise Violation(f"I2 worker {worker_id}: its holder is {shard.table.active.get(record.active)}'s")
            held = residency(shard, record.active)
            current = record.loading < 0 and not record.closed
            if current and held != self._published_at(worker_id, record):
                raise Violation(
                    f"I2 worker {worker_id} holds {sorted(held)}, published {sorted(self._published_at(worker_id, record))}"
                )
            if held not in self._ever_published[worker_id] and held:
                raise Violation(f"I2 worker {worker_id} holds what it never published so: {sorted(held)}")
        if record.loading >= 0 and residency(shard, record.loading) != self._published_at(worker_id, record):
            raise Violation(f"I2 worker {worker_id}: its snapshot is not what it published")

    def _published_at(self, worker_id: str, record: Record) -> Residency:
        return self._published[worker_id][record.incarnation].states[record.seq]

    def _check_overlap(self, shard: MemoryShard) -> None:
        adapter = self.world.random.choice(ADAPTERS)
        path = tuple(self.world.random.randrange(2) if i in (0, 2) else 0 for i in range(self.world.shape.depth))
        keys = [hash_of(path[:d]) for d in range(1, len(path) + 1) if d % self.world.shape.granularity == 0]
        chain, scope_id = b"".join(keys), scope_of(adapter).scope_id
        fast, slow = (shard.table.overlap(scope_id, chain, stride).depths() for stride in (4, 0))
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
            if set(shard.table.holders) != used:
                raise Violation(f"I1 holders {sorted(shard.table.holders)} left, {sorted(used)} in use")
            leftover = [key for blocks in shard.table.blocks.values() for key, value in blocks.items() if not value]
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
        for scope_id, blocks in shard.table.blocks.items()
        for key, value in blocks.items()
        for tier in tiers_of(dict(entries_of(value)).get(number, 0))
    )


def _after(state: Residency, message: Message) -> Residency:
    """What the worker holds after a message: plain sets, without the index's own code."""
    held = set(state)
    for event in message.events:
        if isinstance(event, (SnapshotBegin, Cleared)):
            held.clear()
        elif isinstance(event, (SnapshotEnd, Checkpoint, Marked, Unmarked, Heads)):
            continue
        else:
            keys = [event.hashes[at : at + HASH_BYTES] for at in range(0, len(event.hashes), HASH_BYTES)]
            change = {(event.scope_id, key, event.tier) for key in keys}
            held = held - change if isinstance(event, Removed) else held | change
    return frozenset(held)
