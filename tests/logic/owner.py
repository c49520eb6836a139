"""An indexer replica that believes it owns every partition: the project's own reading rules, judges, repair and sweeps.

Its tasks are stepped, and dropped together when it crashes.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from indexer.counters import IndexerCounters
from indexer.liveness.heartbeats import Heartbeats
from indexer.liveness.judge import LivenessJudge
from indexer.partition.admission import Admission
from indexer.partition.start_position import start_position
from indexer.repair.doubt import DoubtJudge
from indexer.repair.grants import GrantBudget
from indexer.repair.repair import Repair
from kvatlas.bus.control import ControlRequest
from kvatlas.bus.subjects import alive_subject
from kvatlas.errors import KvatlasError
from kvatlas.fleet.records import Heartbeat
from kvatlas.index.protocol import PartitionBatch, Position
from tests.logic.stepping import Steps, pause

if TYPE_CHECKING:
    from tests.logic.world import World

CALL_MESSAGES = 6


@dataclass(frozen=True, slots=True)
class Message:
    """What a subscription's callback gets."""

    subject: str
    data: bytes
    reply: str = ""
    headers: None = None


class BusClient:
    """The part of a NATS client that heartbeats and repair use."""

    is_connected = True

    def __init__(self, world: "World") -> None:
        self._world = world
        self.callbacks: dict[str, Callable[[Any], Coroutine[Any, Any, None]]] = {}

    def new_inbox(self) -> str:
        return "_INBOX"

    async def subscribe(self, subject: str, cb: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        self.callbacks[subject] = cb

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        request = ControlRequest.unpack(payload)
        self._world.requests.append((subject.rsplit(".", 1)[-1], request.above))


class Owner:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.counters = IndexerCounters()
        self.doubt = DoubtJudge()
        self.liveness = LivenessJudge()
        client: Any = BusClient(world)
        self._client: BusClient = client
        fleet: Any = world.fleet
        partitions = range(world.shape.partitions)
        self.heartbeats = Heartbeats(
            client=client,
            index=world.index,
            fleet=fleet,
            liveness=self.liveness,
            doubt=self.doubt,
            counters=self.counters,
            owns=lambda worker_id: True,
            on_gone=self._on_gone,
            clock=lambda: world.now_s,
        )
        self.repair = Repair(
            client=client,
            index=world.index,
            doubt=self.doubt,
            grants=GrantBudget(),
            counters=self.counters,
            owned=lambda: partitions,
            at_end=lambda worker_id: self._at_end(world.partition_of(worker_id)),
            start_over=lambda partition, why: self._reading.update({partition: None}),
            on_records=self.heartbeats.on_records,
            clock=lambda: world.now_s,
        )
        self._reading: dict[int, Position | None] = dict.fromkeys(partitions)
        self._tasks: dict[str, Steps] = {}
        self.heartbeats.adopt()
        subscribing = Steps(self._subscribe())
        assert not subscribing.step()

    async def _subscribe(self) -> None:
        await self.heartbeats.listen()

    def crash(self) -> None:
        """SIGKILL between any two of its steps."""
        for task in self._tasks.values():
            task.drop()

    # ------------------------------------------------------------ steps

    def step(self, name: str) -> None:
        """One step of `judge`, `beat`, `sweep <shard>`, `scrub <shard>` or `read <partition>`; of a new round, if need be."""
        task = self._tasks.get(name)
        if task is None:
            what, _, number = name.partition(" ")
            task = self._tasks[name] = Steps(self._guarded(what, int(number or 0)))
        if not task.step():
            del self._tasks[name]

    def finish(self, name: str) -> None:
        """What goes on of the task, and one round more."""
        for _ in range(2):
            self.step(name)
            while name in self._tasks:
                self.step(name)

    async def _guarded(self, what: str, number: int) -> None:
        try:
            if what == "judge":
                await self.repair.tick()
            elif what == "beat":
                await self.heartbeats.tick()
            elif what == "sweep":
                await self.world.index.sweep(number, 1_000)
            elif what == "scrub":
                await self.world.index.scrub(number, 1_000)
            else:
                await self._read(number)
        except KvatlasError:
            if what == "read":
                self._reading[number] = None

    def hear(self, beat: Heartbeat) -> None:
        callback = self._client.callbacks["kvatlas.alive.*"]
        heard = Steps(callback(Message(alive_subject(beat.worker_id), beat.pack())))
        assert not heard.step()

    # ------------------------------------------------------------ reading

    async def _read(self, partition: int) -> None:
        """Goes on where this reading stands, for a few messages."""
        world = self.world
        at = self._reading[partition]
        if at is None or world.random.random() < 0.03:
            self._reading[partition] = None  # not at its end, whatever happens
            at, _ = await start_position(world.index, partition, world.stream.info)
            if at.creation_us != world.stream.creation_us:
                return
            self._reading[partition] = at
            await pause()
        if at.creation_us != world.stream.creation_us:
            self._reading[partition] = None
            return
        got = world.stream.read(partition, at.seq, world.random.randint(1, CALL_MESSAGES))
        if not got:
            return
        admission = Admission(partition, world.shape.partitions)
        raws = [admission.admit(subject, payload) for _, subject, payload in got]
        after = Position(at.creation_us, got[-1][0])
        await pause()
        for _ in range(3):
            try:
                batch = PartitionBatch(partition, raws, after, at.seq)
                applied = await world.index.apply(partition % world.shape.shards, [batch])
            except KvatlasError:
                continue  # applying it again is right
            self.repair.on_applied(applied)
            self._reading[partition] = None if partition in applied.moved else after
            return
        self._reading[partition] = None

    def _at_end(self, partition: int) -> bool:
        at = self._reading[partition]
        if at is None or at.creation_us != self.world.stream.creation_us:
            return False
        return not self.world.stream.read(partition, at.seq, 1)

    def _on_gone(self, worker_id: str) -> None:
        self.doubt.forget([worker_id])
        self.liveness.forget(lambda other: other == worker_id)
