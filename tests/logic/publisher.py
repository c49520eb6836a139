"""A publisher process: the project's own continuity, ledger, changelog and outbox, connected as in the sidecar."""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.bus.subjects import events_subject
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.feed.continuity import Batch, Continuity, Step
from kvatlas_publishers.feed.undecodable import Distrust
from kvatlas_publishers.heartbeat import HeartbeatSender
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.ledger.settings import LedgerSettings
from kvatlas_publishers.stream.changelog import Changelog, IncarnationReason
from kvatlas_publishers.stream.outbox import OutboxLimits
from tests.logic.engine import BLOCK_SIZE, TieredBlock

if TYPE_CHECKING:
    from tests.logic.world import World

LIMITS = OutboxLimits(outbox_messages=14, window_messages=3, message_bytes=330)


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of a publisher's state file."""

    continuity: bytes
    ledger: bytes
    incarnation: int
    process: int


class Publisher:
    def __init__(self, world: "World", number: int, saved: Saved | None) -> None:
        self.world, self.number = world, number
        self.worker_id = world.worker_id(number)
        self.engine = world.engines[number]
        self.feed: list[Batch] = []
        self.counters = PublisherCounters()
        self.process = self.engine.process
        self.ready = False
        self._late_acks: list[tuple[int, int, int]] = []
        self._next_incarnation = 0
        self._distrust = Distrust()
        settings = LedgerSettings("m", "t", block_size=BLOCK_SIZE, granularity=world.shape.granularity)
        self.continuity, ledger = Continuity(), Ledger(settings)
        if saved is not None:
            self.continuity, ledger = Continuity.load(saved.continuity), Ledger.load(saved.ledger, settings)
            if "poll" in world.on and saved.process != self.process:
                self.continuity, ledger = Continuity(), Ledger(settings)
        self.changelog = Changelog(
            self.worker_id,
            ledger,
            self.counters,
            limits=LIMITS,
            saved_incarnation=saved.incarnation if saved is not None else 0,
            rng=random.Random(world.random.getrandbits(64)),
        )
        endpoint = EngineEndpoint(id=self.worker_id, kind=EngineKind.MOCK, model_id="m", tokenizer_id="t")
        self.heartbeats = HeartbeatSender(
            None,  # type: ignore[arg-type]  # heartbeats are made, not sent
            lambda: endpoint,
            self.changelog.outbox,
            state=lambda: EngineState.UP,
            load=lambda: None,
        )
        self.catch_up()

    # ------------------------------------------------------------ the engine's feed

    def catch_up(self) -> None:
        """Check, before the first incarnation, whether the engine's process is still the saved one."""
        self._follow(self.continuity.resume())
        if not self.continuity.unproven:
            self.changelog.require_incarnation(IncarnationReason.START)
            self.ready = True

    def on_feed(self) -> None:
        if not self.ready:
            self.catch_up()
            return
        self._follow(self.continuity.offer(*self.feed.pop(0)))
        if self.world.random.random() < 0.7:
            self.settle()

    def probe(self) -> None:
        """Check whether the engine has restarted and, if it is silent, whether a last batch was lost."""
        if not self.ready:
            self.catch_up()
        elif "poll" in self.world.on and self.process != self.engine.process:
            self.process = self.engine.process
            self.feed.clear()
            self._follow(self.continuity.restart())
        elif not self.feed:
            self._follow(self.continuity.probe())
        self.settle()

    def _follow(self, step: Step) -> None:
        while True:
            if step.empty:
                self.changelog.start_over(self.world.now_us)
            for _, payload in step.take:
                batch = self.engine.payloads[payload]
                if batch.lost and self._distrust.record_loss(self.world.now_s):
                    self.changelog.start_over(self.world.now_us)
                if self._distrust.is_trusted(self.world.now_s):
                    self.changelog.record(batch)
            if step.ask_from is None:
                return
            step = self.continuity.take_replay(*self.engine.replay(step.ask_from))

    # ------------------------------------------------------------ changelog

    def settle(self) -> None:
        self.changelog.publish(self.changelog.fold(), self.world.now_us, self.world.now_s)

    def checkpoint(self) -> None:
        self.settle()
        self.changelog.checkpoint(self.world.now_us)

    def begin(self) -> None:
        """Take a number for the incarnation that is due; the next call, like one after a grant, begins it."""
        if self.changelog.incarnation_due is None:
            return
        if not self._next_incarnation:
            self._next_incarnation = self.changelog.next_incarnation(self.world.now_us)
            return
        incarnation, self._next_incarnation = self._next_incarnation, 0
        self.changelog.begin_incarnation(incarnation, self.world.now_us)

    def withdraw(self) -> None:
        """Withdraw, because a grant is refused."""
        self.changelog.withdraw(self.world.now_us)

    def request_snapshot(self, above: int) -> None:
        self.changelog.request_snapshot(above)

    @property
    def announced(self) -> set[TieredBlock]:
        return {
            (scope_id, sequence_hash.to_bytes(8, "little"), tier)
            for scope_id, tier, _, sequence_hash in self.changelog.ledger.announced()
        }

    # ------------------------------------------------------------ sending

    def send(self) -> None:
        """Send one message: it may get lost, be stored without an acknowledgement, wait in a client's buffer, or come twice."""
        world, outbox = self.world, self.changelog.outbox
        outgoing = outbox.take()
        if outgoing is None:
            return
        world.invariants.remember(self.worker_id, outgoing.payload)
        if world.fault("send", 0.08):
            return
        subject = events_subject(self.worker_id, world.shape.partitions)
        if world.fault("late", 0.05):
            world.limbo.append((subject, outgoing.payload))
            return
        position = world.stream.append(subject, outgoing.payload)
        if world.fault("late", 0.03):
            world.limbo.append((subject, outgoing.payload))
        if world.fault("send", 0.08):
            return
        if world.fault("late", 0.1):
            self._late_acks.append((outgoing.round, outgoing.seq, position))
        else:
            self._acknowledge(outgoing.round, outgoing.seq, position)

    def late_ack(self) -> None:
        if self._late_acks:
            self._acknowledge(*self._late_acks.pop(self.world.random.randrange(len(self._late_acks))))

    def _acknowledge(self, round_: int, seq: int, position: int) -> None:
        self.changelog.outbox.acknowledge(round_, seq, position)
        if self.changelog.outbox.misplaced:
            self.go_back()

    def go_back(self) -> None:
        self.changelog.outbox.go_back()

    # ------------------------------------------------------------ saved state

    def saved(self) -> Saved:
        self.settle()
        changelog = self.changelog
        incarnation = max(changelog.outbox.incarnation, changelog.saved_incarnation)
        return Saved(self.continuity.dump(), changelog.ledger.dump(), incarnation, self.process)

    @property
    def quiet(self) -> bool:
        return (
            self.ready
            and not self.feed
            and self.changelog.flushed
            and not self._late_acks
            and not self.continuity.unproven
        )
