"""The world of one run: engines, publishers, a stream, owners and a store, with one random move after another."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvatlas.bus.subjects import partition_of
from kvatlas.identity import shard_of
from tests.logic.bus import Stream
from tests.logic.engine import Engine, scope_of
from tests.logic.invariants import Invariants, Violation
from tests.logic.owner import Owner
from tests.logic.publisher import Publisher, Saved
from tests.logic.store import Fleet, SteppedIndex

ALL_FAULTS = (
    "feed poison poll restart crash send late stream recreate store wipe owner away slow silence zombie clock request "
    "full"
)

LAPS = 400
LAP_S = 0.5
TICK_S = 3.0
"""Shorter than a pause that an owner would take for its own."""
SLOW = 0.3
"""Fraction of the usual reading that owners do in every other stretch of SLOW_S."""
SLOW_S = 8.0
SLOW_LAPS = 40
"""Laps after the faults in which owners read slowly: missing messages may still be in flight."""
QUIET_LAPS = 14
"""Longer than heartbeats of another incarnation are remembered for."""


@dataclass(frozen=True, slots=True)
class Shape:
    engines: int = 3
    owners: int = 3
    partitions: int = 2
    shards: int = 1
    depth: int = 5
    granularity: int = 1
    capacity: int = 8
    steps: int = 1200
    heat: float = 1.0
    """Factor on the rate of the faults."""
    faults: str = ALL_FAULTS


class World:
    def __init__(self, seed: int, shape: Shape) -> None:
        self.random = random.Random(seed)
        self.shape = shape
        self.on = set(shape.faults.split())
        self.calm = False
        self.now_s = 1_000.0
        self.skew_s = 0.0
        self.stats: Counter[str] = Counter()
        self.log: list[str] = []
        self.invariants = Invariants(self)
        self.limbo: list[tuple[str, bytes]] = []
        self.requests: list[tuple[str, int]] = []
        self._saved: dict[int, Saved] = {}
        self._silent_until_s: dict[int, float] = {}
        self._names = _worker_ids(shape)
        self.stream = Stream(self)
        self.index = SteppedIndex(self, shape.partitions, shape.shards)
        self.fleet = Fleet()
        self.engines = [Engine(self, number) for number in range(shape.engines)]
        self.publishers: list[Publisher] = []
        self.zombies: list[Publisher] = []
        for number in range(shape.engines):
            self.publishers.append(Publisher(self, number, None))
        self.owners = [Owner(self) for _ in range(shape.owners)]
        self.gone_snapshots = 0

    # ------------------------------------------------------------ what the parts need to know

    @property
    def now_us(self) -> int:
        return int((self.now_s + self.skew_s) * 1e6)

    def fault(self, name: str, probability: float) -> bool:
        return not self.calm and name in self.on and self.random.random() < min(0.5, probability * self.shape.heat)

    def worker_id(self, number: int) -> str:
        return self._names[number]

    def number_of(self, worker_id: str) -> int:
        return self._names.index(worker_id)

    def partition_of(self, worker_id: str) -> int:
        return partition_of(worker_id, self.shape.partitions)

    def publishers_of(self, number: int) -> list[Publisher]:
        return [one for one in (*self.publishers, *self.zombies) if one.number == number]

    # ------------------------------------------------------------ moves

    def step(self) -> None:
        self.now_s += 0.05
        weights, names, moves = zip(*self._moves(), strict=True)
        at = self.random.choices(range(len(moves)), weights)[0]
        self.log.append(names[at])
        moves[at]()

    def _moves(self) -> list[tuple[float, str, Callable[[], object]]]:
        r, shape = self.random, self.shape
        number, partition, shard = (r.randrange(n) for n in (shape.engines, shape.partitions, shape.shards))
        owner = r.choice(self.owners)
        one = r.choice([*self.publishers, *self.zombies])
        moves: list[tuple[float, str, Callable[[], object]]] = [
            (8, f"engine {number} works", self.engines[number].work),
            (14 if one.feed else 0, f"feed of {one.number}", one.on_feed),
            (3, f"probe {one.number}", one.probe),
            (4, f"settle {one.number}", one.settle),
            (8 if one.changelog.incarnation_due else 0, f"begin {one.number}", one.begin),
            (2 if one.changelog.incarnation_due else 0, f"no grant for {one.number}", one.withdraw),
            (24, f"send {one.number}", one.send),
            (2, f"late ack {one.number}", one.late_ack),
            (4, f"go back {one.number}", one.go_back),
            (1, f"checkpoint {one.number}", one.checkpoint),
            (6, f"save {one.number}", lambda: self._save(one)),
            (60 * self._pace, f"read {partition}", lambda: owner.step(f"read {partition}")),
            (8, f"heartbeat {one.number}", lambda: self._heartbeat(one)),
            (8, "judge", lambda: owner.step("judge")),
            (12, "beat", lambda: owner.step("beat")),
            (8, "sweep", lambda: owner.step(f"sweep {shard}")),
            (4 if self.requests else 0, "request", self._request),
            (3 if self.limbo else 0, "late message arrives", self._deliver_late),
            (2, "a second passes", self._wait),
        ]
        return moves if self.calm else moves + self._faults()

    @property
    def _pace(self) -> float:
        """Fraction of the usual reading that is done now."""
        return SLOW if "slow" in self.on and not self.calm and int(self.now_s / SLOW_S) % 2 else 1.0

    def _faults(self) -> list[tuple[float, str, Callable[[], object]]]:
        r, shape = self.random, self.shape
        number, shard = r.randrange(shape.engines), r.randrange(shape.shards)
        faults: list[tuple[str, float, str, Callable[[], object]]] = [
            ("restart", 0.6, f"ENGINE RESTART {number}", self.engines[number].restart),
            ("crash", 0.8, f"PUBLISHER CRASH {number}", lambda: self._crash(number)),
            ("zombie", 0.3, f"SECOND PUBLISHER {number}", lambda: self._crash(number, zombie=True)),
            ("stream", 0.7, "STREAM LOSES ITS OLDEST", lambda: self.stream.lose_oldest(r.randint(1, 8))),
            ("stream", 0.2, "PURGE", lambda: self.stream.lose_oldest(1 << 30)),
            ("stream", 0.3, "STREAM LOSES ITS NEWEST", lambda: self.stream.lose_newest(r.randint(1, 5))),
            ("recreate", 0.4, "STREAM MADE AGAIN", self.stream.create_again),
            ("store", 1.0, f"FAILOVER {shard}", lambda: self.index.failover(shard, r.randint(1, 8))),
            ("wipe", 0.3, f"WIPE {shard}", lambda: self.index.wipe(shard)),
            ("owner", 0.8, "OWNER CRASH", self._owner_crash),
            ("silence", 0.4, f"SILENCE OF {number}", lambda: self._silence(number)),
            ("clock", 0.2, "CLOCK STEPS BACK", self._set_clock_back),
            ("full", 0.4, f"NO ROOM {shard}", lambda: self.index.fill(shard, True)),
            ("full", 0.8, f"ROOM {shard}", lambda: self.index.fill(shard, False)),
            ("damage", 0.5, f"BLOCKS CHANGED BY HAND {shard}", lambda: self._damage(shard)),
        ]
        return [(w * shape.heat, name, move) for what, w, name, move in faults if what in self.on]

    def _save(self, one: Publisher) -> None:
        if one.ready:
            self._saved[one.number] = one.saved()

    def _crash(self, number: int, *, zombie: bool = False) -> None:
        old = self.publishers[number]
        if zombie and len(self.zombies) < 2:
            self.zombies.append(old)
        else:
            self.gone_snapshots += old.counters.snapshots
        saved = self._saved.get(number) if self.random.random() < 0.7 else None
        self.publishers[number] = Publisher(self, number, saved)

    def _owner_crash(self) -> None:
        at = self.random.randrange(len(self.owners))
        self.owners[at].crash()
        self.owners[at] = Owner(self)

    def _silence(self, number: int) -> None:
        """Lose a worker's heartbeats until it counts as lost, or is retired."""
        self._silent_until_s[number] = self.now_s + self.random.choice((6, 70))
        if self.random.random() < 0.5:
            self._time_passes(65)

    def _time_passes(self, seconds: float) -> None:
        """Let time pass in which nothing happens but heartbeats and the owners' rounds."""
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            for one in (*self.publishers, *self.zombies):
                self._heartbeat(one)
            for owner in self.owners:
                owner.finish("beat")

    def _set_clock_back(self) -> None:
        self.skew_s = -self.random.uniform(0, self.now_s)

    def _damage(self, shard: int) -> None:
        """Change blocks without a message. From then on, only the end is checked."""
        blocks = self.index.shard_states()[shard].table.blocks
        held = [(scope_id, key) for scope_id, keys in blocks.items() for key in keys]
        if not held:
            return
        self.invariants.damaged = True
        for _ in range(self.random.randint(1, 3)):
            scope_id, key = self.random.choice(held)
            value = blocks[scope_id].get(key, b"")
            entry = self.random.choice(
                (value[:4] or b"\x00\x00\x01\x01", b"\x00\x00" + self.random.randbytes(1) + b"\x01")
            )
            change = self.random.choice((b"", (value or entry)[:3] + b"\x04" + value[4:], _with_entry(value, entry)))
            if change:
                blocks[scope_id][key] = change
            else:
                blocks[scope_id].pop(key, None)
            if self.random.random() < 0.3:
                blocks.setdefault(scope_of("never used").scope_id, {})[key] = entry

    def _wait(self) -> None:
        self.now_s += 1

    def _heartbeat(self, one: Publisher) -> None:
        if not self.calm and self._silent_until_s.get(one.number, 0.0) > self.now_s:
            return
        beat = one.heartbeats.heartbeat()
        for owner in self.owners:
            if not self.fault("request", 0.3):
                owner.hear(beat)

    def _request(self) -> None:
        at = 0 if self.calm else self.random.randrange(len(self.requests))
        worker_id, above = self.requests[at]
        if not self.fault("request", 0.3):  # otherwise it comes twice
            del self.requests[at]
        if self.fault("request", 0.2):
            return
        for one in self.publishers_of(self._names.index(worker_id)):
            one.request_snapshot(above)

    def _deliver_late(self) -> None:
        self.stream.append(*self.limbo.pop(self.random.randrange(len(self.limbo))))

    # ------------------------------------------------------------ the end

    def settle(self) -> None:
        """Stop the faults; the index must then become exact by itself."""
        for _ in range(3):  # final faults: no later message shows what they hit
            weights, names, moves = zip(*self._faults(), strict=True)
            at = self.random.choices(range(len(moves)), weights)[0]
            self.log.append(names[at])
            moves[at]()
        if "damage" in self.on:
            self._damage(0)
        for shard in range(self.shape.shards):
            self.index.fill(shard, False)
        self.log.append("--- the faults stop")
        self.calm = True
        for zombie in self.zombies:
            self.gone_snapshots += zombie.counters.snapshots
        self.zombies.clear()
        gone = self.publishers.pop() if self.random.random() < 0.3 else None
        before = sum(one.counters.snapshots for one in self.publishers)
        self.run_laps(self.random.choice((0, 0, 25)))
        self.invariants.check_end(sum(one.counters.snapshots for one in self.publishers) - before)
        if gone is not None:
            self._time_passes(70)
            self.run_laps(0)
            self.invariants.check_end(0)
            self.invariants.check_gone(gone)

    def run_laps(self, busy: int) -> None:
        """Run laps until nothing more happens; engines work only in the first `busy` ones."""
        quiet = 0
        for lap in range(LAPS):
            self._run_lap(lap, busy)
            quiet = quiet + 1 if lap > busy and not self._why_busy() else 0
            if quiet >= QUIET_LAPS:
                return
        raise Violation(f"I1 not quiet after {LAPS * LAP_S:g} s: {self._why_busy()}")

    def _run_lap(self, lap: int, busy: int) -> None:
        self.now_s += LAP_S
        if lap < busy:
            for engine in self.engines:
                engine.work()
        self.publish()
        while self.limbo and (lap > 10 or self.random.random() < 0.3):
            self._deliver_late()
        slow = "slow" in self.on and lap < SLOW_LAPS
        for owner in self.owners:
            for partition in range(self.shape.partitions):
                for _ in range(1 if slow else 20):
                    if not slow or self.random.random() < SLOW:
                        owner.finish(f"read {partition}")
            for one in self.publishers:
                self._heartbeat(one)
            if lap % 2:
                owner.finish("beat")
                owner.finish("judge")
            for shard in range(self.shape.shards):
                owner.finish(f"sweep {shard}")
                if lap % 10 == 9:
                    owner.finish(f"scrub {shard}")
        while self.requests:
            self._request()

    def publish(self) -> None:
        """Let publishers send what their engines reported."""
        for one in self.publishers:
            while one.feed:
                one.on_feed()
            one.probe()
            one.begin()
            one.begin()
            one.go_back()
            for _ in range(60):
                one.send()
                one.late_ack()

    def _why_busy(self) -> str:
        living = {one.worker_id for one in self.publishers}
        doubts = {w: doubt.value for owner in self.owners for w, doubt in owner.doubt.doubts.items() if w in living}
        if doubts:
            return f"doubts {doubts}"
        retired = [list(shard.table.retired) for shard in self.index.shard_states()]
        if any(retired):
            return f"retired holders {retired}"
        publishing = [one.worker_id for one in self.publishers if not one.quiet]
        return f"still publishing {publishing}" if publishing else "late messages" if self.limbo else ""


def _with_entry(value: bytes, entry: bytes) -> bytes:
    """The holders value with this entry added, unless its holder already has one."""
    entries = {value[at : at + 3]: value[at : at + 4] for at in range(0, len(value), 4)}
    return b"".join(entries.get(number, entry) for number in sorted({*entries, entry[:3]}))


def _worker_ids(shape: Shape) -> list[str]:
    """Worker ids in all partitions, and so in all shards."""
    names: list[str] = []
    for number in range(shape.engines):
        wanted = number % shape.partitions
        candidates = (f"w{number}-{i}" for i in range(1_000))
        names.append(next(name for name in candidates if partition_of(name, shape.partitions) == wanted))
    assert len({shard_of(partition_of(n, shape.partitions), shape.shards) for n in names}) == min(
        shape.shards, len(names)
    )
    return names
