"""An indexer replica that believes that it owns every partition, with the project's own judges, repair and liveness.

Its tasks are stepped, and dropped together when it crashes.
"""

from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvatlas.bus.admission import Admission
from kvatlas.bus.control import ControlRequest
from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.bus.subjects import alive_subject
from kvatlas.errors import KvatlasError
from kvatlas.fleet.records import Heartbeat
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.liveness.failure_detector import FailureDetector
from kvatlas_indexer.liveness.heartbeats import Heartbeats
from kvatlas_indexer.liveness.suspicion import DoubtJudge
from kvatlas_indexer.partition.reader import start_position
from kvatlas_indexer.repair.grants import GrantBudget
from kvatlas_indexer.repair.repair_loop import RepairLoop
from tests.logic.steps import Steps, pause

if TYPE_CHECKING:
    from tests.logic.world import World

CALL_MESSAGES = 6


@dataclass(frozen=True, slots=True)
class Message:
    """The argument of a subscription's callback."""

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

    async def publish(
        self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        request = ControlRequest.unpack(payload)
        self._world.requests.append((subject.rsplit(".", 1)[-1], request.above))


class SteppedReader:
    """Reads one partition by the project's own rules, a few messages per round."""

    def __init__(self, owner: "Owner", partition: int) -> None:
        self._owner = owner
        self._world = owner.world
        self._partition = partition
        self._position: Position | None = None
        """Position of the last message read; None if not known yet."""

    @property
    def at_end(self) -> bool:
        stream, position = self._world.stream, self._position
        if position is None or position.creation_us != stream.creation_us:
            return False
        return not stream.read(self._partition, position.seq, 1)

    def restart(self) -> None:
        self._position = None

    async def read(self) -> None:
        """Read on from the position, and apply."""
        world, partition = self._world, self._partition
        position = self._position
        if position is None or world.random.random() < 0.03:
            self.restart()  # not at its end, whatever happens
            position, _ = await start_position(world.index, partition, world.stream.info)
            if position.creation_us != world.stream.creation_us:
                return
            self._position = position
            await pause()
        if position.creation_us != world.stream.creation_us:
            self.restart()
            return
        messages = world.stream.read(partition, position.seq, world.random.randint(1, CALL_MESSAGES))
        if not messages:
            return
        admission = Admission(partition, world.shape.partitions)
        admitted = [admission.admit(subject, payload) for _, subject, payload in messages]
        raws = [message for message in admitted if message is not None]
        last_seq, _, _ = messages[-1]
        after = Position(position.creation_us, last_seq)
        await pause()
        for _ in range(3):
            try:
                batch = PartitionBatch(partition, raws, after, position.seq)
                applied = await world.index.apply(partition % world.shape.shards, [batch])
            except KvatlasError:
                continue  # applying it again is right
            self._owner.grants.release_answering(applied.records)
            self._position = None if partition in applied.moved else after
            return
        self.restart()


class EveryPartition:
    """Replaces `OwnedPartitions` for the other parts: every partition is owned, and the world steps the readers."""

    def __init__(self, owner: "Owner") -> None:
        self.readers = {partition: SteppedReader(owner, partition) for partition in range(owner.world.shape.partitions)}
        self._owner = owner

    @property
    def partitions(self) -> Collection[int]:
        return self.readers.keys()

    def partition_of(self, worker_id: str) -> int:
        return self._owner.world.partition_of(worker_id)

    def owns(self, worker_id: str) -> bool:
        return True

    def at_end(self, worker_id: str) -> bool:
        return self.readers[self.partition_of(worker_id)].at_end

    def restart(self, partition: int, why: str) -> None:
        self.readers[partition].restart()

    def forget_worker(self, worker_id: str) -> None:
        for state in (self._owner.doubt, self._owner.detector, self._owner.grants):
            state.forget(lambda other: other == worker_id)


class Owner:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.counters = IndexerCounters()
        self.doubt = DoubtJudge()
        self.detector = FailureDetector()
        self.grants = GrantBudget()
        client: Any = BusClient(world)
        self._client: BusClient = client
        fleet: Any = world.fleet
        owned: Any = EveryPartition(self)
        self._owned: EveryPartition = owned
        self.heartbeats = Heartbeats(
            client=client,
            index=world.index,
            fleet=fleet,
            owned=owned,
            detector=self.detector,
            doubt=self.doubt,
            counters=self.counters,
            clock=lambda: world.now_s,
        )
        self.repair = RepairLoop(
            client=client,
            index=world.index,
            owned=owned,
            doubt=self.doubt,
            grants=self.grants,
            heartbeats=self.heartbeats,
            counters=self.counters,
            partitions=world.shape.partitions,
            clock=lambda: world.now_s,
        )
        self._tasks: dict[str, Steps] = {}
        self.heartbeats.adopt()
        subscription = Steps(self._subscribe())
        assert not subscription.step()

    async def _subscribe(self) -> None:
        await self.heartbeats.listen()

    def crash(self) -> None:
        """Crash as by SIGKILL, between any two of its steps."""
        for task in self._tasks.values():
            task.drop()

    # ------------------------------------------------------------ steps

    def step(self, name: str) -> None:
        """Run one step of `judge`, `beat`, `sweep <shard>`, `scrub <shard>` or `read <partition>`; begins a new round if none
        is under way."""
        task = self._tasks.get(name)
        if task is None:
            task_name, _, number = name.partition(" ")
            task = self._tasks[name] = Steps(self._round(task_name, int(number or 0)))
        if not task.step():
            del self._tasks[name]

    def finish(self, name: str) -> None:
        """Run the rest of the round under way, and one more round."""
        for _ in range(2):
            self.step(name)
            while name in self._tasks:
                self.step(name)

    async def _round(self, task_name: str, number: int) -> None:
        try:
            if task_name == "judge":
                await self.repair.tick()
            elif task_name == "beat":
                await self.heartbeats.tick()
            elif task_name == "sweep":
                await self.world.index.sweep(number, 1_000)
            elif task_name == "scrub":
                await self.world.index.scrub(number, 1_000)
            else:
                await self._owned.readers[number].read()
        except KvatlasError:
            if task_name == "read":
                self._owned.readers[number].restart()

    def hear(self, beat: Heartbeat) -> None:
        callback = self._client.callbacks["kvatlas.alive.*"]
        steps = Steps(callback(Message(alive_subject(beat.worker_id), beat.pack())))
        assert not steps.step()
