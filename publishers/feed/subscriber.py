"""Follows one engine's KV events over ZMQ (thin: the rules are in connection_state, continuity, engines and ledger).

It never stops on bad input: an undecodable payload is counted, kept as a dead letter, and skipped (see `undecodable`).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

import anyio
import anyio.lowlevel
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvatlas.errors import EngineEventError, InvalidValue, Unreachable
from kvatlas.fleet.records import EngineKind
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.diagnoses import Diagnoses
from kvatlas_publishers.engine_events import EngineBatch, EngineStarted
from kvatlas_publishers.engines import decode_batch
from kvatlas_publishers.engines.decoder_check import diagnose_kind, kind_of_batch
from kvatlas_publishers.feed.connection_state import FIRST_SILENCE_S, Connection, ConnectionState, Task
from kvatlas_publishers.feed.continuity import Continuity, Step
from kvatlas_publishers.feed.dead_letters import DeadLetters
from kvatlas_publishers.feed.endpoints import to_connect
from kvatlas_publishers.feed.receiver import Receiver
from kvatlas_publishers.feed.replay import SEQ_BYTES, Replay, request_replay
from kvatlas_publishers.feed.socket_watch import SocketWatch, Suspicion
from kvatlas_publishers.feed.undecodable import RATION_S, STARTING_OVER, Distrust, UndecodableQueue, UndecodableRecorder
from kvatlas_publishers.feed.zmq_sockets import open_socket

POLL_S = 0.5
"""Longest wait for a message before the connection is checked."""
QUEUED_MESSAGES = 10_000
PAYLOADS_TO_RECOGNIZE = 64
"""Number of payloads that are checked to recognize the engine that wrote them: all of the first RECOGNITION_STRIDE,
then one in RECOGNITION_STRIDE."""
RECOGNITION_STRIDE = 16
BATCHES_AT_ONCE = 16
"""Number of messages taken before other tasks get a turn."""

log = logging.getLogger("kvatlas.publisher")


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """An engine's sockets. `bind`: bind the event socket here, and the engine connects to it.

    `distrust_poison`: see `kvatlas_publishers.feed.undecodable`."""

    engine: EngineKind
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    rank: int | None = None
    bind: bool = False
    distrust_poison: bool = False
    first_silence_s: float = FIRST_SILENCE_S
    replay_silence_s: float = 2.0


class Feed:
    """Call `open`, `catch_up`, `run` (until cancelled), `close`. Passes each batch to `on_batch`; calls `on_empty` when
    all known blocks must be dropped."""

    def __init__(
        self,
        settings: FeedSettings,
        worker_id: str,
        continuity: Continuity,
        counters: PublisherCounters,
        diagnoses: Diagnoses,
        dead_letters: DeadLetters,
        context: zmq.asyncio.Context,
        *,
        on_batch: Callable[[EngineBatch], object],
        on_empty: Callable[[], None],
        on_alive: Callable[[], None] = lambda: None,
        engine_up: Callable[[], bool | None] = lambda: None,
    ) -> None:
        """`on_alive`: called when `alive` changes. `engine_up`: True if the engine is known to be up, regardless of the
        connection (None: unknown). If it is up, its events are requested from replay even without a connection."""
        self.continuity = continuity
        self.consistent = True
        """True if every batch up to the feed's position was passed to `on_batch`."""
        self._settings = settings
        self._worker_id = worker_id
        self._counters = counters
        self._diagnoses = diagnoses
        self._context = context
        self._on_batch = on_batch
        self._on_empty = on_empty
        self._on_alive = on_alive
        self._engine_up = engine_up
        self._log = RateLimitedLog(log, f"worker {worker_id}: ")
        self._undecodable = UndecodableRecorder(counters, dead_letters, self._log, diagnoses)
        self._aside = UndecodableQueue()
        self._distrust = Distrust()
        self._decoded: tuple[bytes, EngineBatch] | None = None
        self._state = ConnectionState(settings.first_silence_s, monotonic())
        self._connection = Connection.CONNECTING
        self._socket_watch = SocketWatch(settings.endpoint, settings.replay_endpoint, settings.topic, settings.rank)
        self._topic = settings.topic.encode()
        self._all_topics = False
        self._payloads_to_recognize = 0 if settings.engine is EngineKind.OPEN else PAYLOADS_TO_RECOGNIZE
        self._received = 0

    # ---------------------------------------------------------------- life

    def open(self) -> None:
        """Connect, or bind. Raises Unreachable if the endpoint can't be used."""
        settings = self._settings
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        self._socket = open_socket(context, zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        events = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        address = f"inproc://monitor-{id(self)}"
        self._socket.monitor(address, events)
        self._monitor = self._context.socket(zmq.PAIR)  # outlives the monitoring: without a reader, reports would block
        self._monitor.connect(address)
        self._socket.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._subscribe_to_all(True)
        try:
            if settings.bind:
                self._socket.bind(settings.endpoint)
            else:
                self._socket.connect(to_connect(settings.endpoint))
        except zmq.ZMQError as error:
            self.close()
            raise Unreachable(f"event socket {settings.endpoint}: {error.strerror or error}") from error
        self._receiver = Receiver(self._socket)
        self._state = ConnectionState(settings.first_silence_s, monotonic())

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()
        self._monitor.close()

    @property
    def is_away(self) -> bool:
        """True if there has been no connection for longer than the grace period."""
        return self._connection is Connection.AWAY

    def move(self, endpoint: str, replay_endpoint: str | None) -> bool:
        """Follow the engine's sockets to a new address. Returns False if the address is unchanged or can't be used."""
        before = self._settings
        if (endpoint, replay_endpoint) == (before.endpoint, before.replay_endpoint) or before.bind:
            return False
        try:
            self._socket.connect(to_connect(endpoint))
        except zmq.ZMQError:
            return False
        if endpoint != before.endpoint:
            self._socket.disconnect(to_connect(before.endpoint))
        self._settings = replace(before, endpoint=endpoint, replay_endpoint=replay_endpoint)
        self._socket_watch = SocketWatch(endpoint, replay_endpoint, before.topic, before.rank)
        self.continuity.can_replay = replay_endpoint is not None
        log.info("worker %s: the engine's event socket moved to %s from %s", self._worker_id, endpoint, before.endpoint)
        return True

    async def catch_up(self) -> None:
        """Call before the first incarnation: checks whether the engine's process is still the saved one, and reads its earlier
        batches.

        Returns once replay has confirmed the saved state, or the state has been dropped. Don't publish anything before that.
        """
        await self._follow(self.continuity.resume())
        while self.continuity.unproven:
            await self._follow(self.continuity.probe())

    async def run(self) -> None:
        """Follow the feed until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_connection)
            await self._receive()

    def record_restart(self) -> None:
        """Start over: the engine's process was replaced."""
        self._state.record_restart()

    @property
    def alive(self) -> bool:
        """True if the engine is up, judging by the connection. False until it has connected once."""
        return self._state.connection(monotonic()).alive

    # ---------------------------------------------------------------- receiving

    async def _receive(self) -> None:
        self._state.finish(Task.TAKE, monotonic())
        while True:
            self._received += 1
            if self._received >= BATCHES_AT_ONCE:
                self._received = 0
                await anyio.lowlevel.checkpoint()
            frames = await self._receiver.receive(POLL_S)
            if frames is not None and not self._is_of_topic(frames[0]):
                frames = None
            engine_up = self._engine_up() if frames is None else False
            task = self._state.next_task(monotonic(), message=frames is not None, engine_up=bool(engine_up))
            if task is Task.RESTART:
                self._drop_queued()
                await self._follow(self.continuity.restart())
            elif task is Task.RECONNECT:
                self._drop_queued()
                await self._follow(self.continuity.reconnect())
            elif task is Task.TAKE and frames is not None:
                await self._take_queued(frames)
            elif task is Task.PROBE:
                await self._follow(self.continuity.probe(), probes=True)
            self._state.finish(task, monotonic())
            self._report_connection()
            if frames is None or self._diagnoses.current:
                self._diagnose(engine_up)

    def _drop_queued(self) -> None:
        """Drop queued messages: they may come from either engine process, and replay returns them again."""
        while self._receiver.receive_queued() is not None:
            pass

    async def _take_queued(self, frames: list[bytes]) -> None:
        """Take this message and, without a task switch for each, the queued ones that follow in order, up to
        BATCHES_AT_ONCE."""
        queued: list[bytes] | None = frames
        while queued is not None and (message := self._read(queued)) is not None:
            seq, payload = message
            for earlier_seq, earlier in self._aside.take_before(seq):
                await self._follow(self.continuity.offer(earlier_seq, earlier))
            try:
                step = self.continuity.offer(seq, payload)
            except InvalidValue as error:
                self._undecodable.record_message(str(error), seq, payload)
                return
            if not step.is_next_batch:
                await self._follow(step)
                return
            self._take(seq, payload)
            self._received += 1
            if self._received >= BATCHES_AT_ONCE:
                return
            queued = self._receiver.receive_queued()
            if queued is not None and not self._is_of_topic(queued[0]):
                return

    def _read(self, frames: list[bytes]) -> tuple[int, bytes] | None:
        """The seq and payload of a message, after decoding its batch; None if it can't be decoded, which is
        recorded."""
        if len(frames) < 2 or len(frames[-2]) != SEQ_BYTES:
            why = f"message of {len(frames)} frames; expected topic, seq of {SEQ_BYTES} bytes, payload"
            self._undecodable.record_message(why, None, frames[-1])
            return None
        seq, payload = int.from_bytes(frames[-2], "big"), frames[-1]
        try:
            self._decoded = payload, decode_batch(self._settings.engine, payload)
        except EngineEventError as error:
            self._undecodable.record_payload(seq, payload, error)
            self._aside.put(seq, payload, self.continuity.last_seq)
            return None
        if self._socket_watch.record_message():
            log.info("worker %s: receiving events from %s, from seq %d", self._worker_id, self._settings.endpoint, seq)
        if self._payloads_to_recognize and (seq < RECOGNITION_STRIDE or seq % RECOGNITION_STRIDE == 0):
            self._recognize_engine(payload)
        return seq, payload

    async def _follow(self, step: Step, *, probes: bool = False) -> None:
        """Execute the continuity's steps until it requests no more replay. `probes`: no message has announced a missing
        batch."""
        while True:
            if step.why:
                what_follows = f"; {STARTING_OVER}" if step.empty else ""
                log.warning("worker %s: %s%s", self._worker_id, step.why, what_follows)
            if step.empty:
                self._on_empty()
            await self._take_all(step.take)
            self._copy_counters()
            if step.ask_from is None:
                return
            replay = await self._replay(step.ask_from)
            step = self.continuity.take_replay(replay.batches, replay.complete)
            if self._socket_watch.record_replay(
                complete=replay.complete,
                answered=replay.complete or bool(replay.batches),
                late_batches=len(step.take) if probes else 0,
            ):
                self._state.request_probe()

    async def _take_all(self, batches: Sequence[tuple[int, bytes]]) -> None:
        """Take all batches, even if cancelled: the feed's position already includes them."""
        left = iter(batches)
        self.consistent = False
        try:
            for taken, (seq, payload) in enumerate(left, start=1):
                self._take(seq, payload)
                if taken % BATCHES_AT_ONCE == 0:
                    await anyio.lowlevel.checkpoint()
        finally:
            for seq, payload in left:
                self._take(seq, payload)
            self.consistent = True

    async def _replay(self, first_seq: int) -> Replay:
        self._counters.feed_replays += 1
        endpoint = self._settings.replay_endpoint
        if endpoint is None:
            return Replay([], False)
        return await request_replay(self._context, to_connect(endpoint), first_seq, self._settings.replay_silence_s)

    def _take(self, seq: int, payload: bytes) -> None:
        batch = self._decode(seq, payload)
        now_s = monotonic()
        self._counters.feed_lost += batch is None or batch.has_lost(distrust_unknown=True)
        if batch is None or batch.has_lost(distrust_unknown=self._settings.distrust_poison):
            if self._distrust.record_loss(now_s):
                self._log.report(
                    "lost", f"feed message {seq} is not fully readable and may have removed blocks; {STARTING_OVER}"
                )
                self._on_empty()
            if batch is None:
                return
            batch = replace(batch, events=batch.known_events)
        elif seq == 0 and batch.header is None:
            batch = replace(batch, events=[EngineStarted(), *batch.events])
        if self._distrust.is_trusted(now_s):
            self._on_batch(batch)
        else:
            self._counters.feed_unheard += 1
            self._log.report(
                "ignored",
                f"feed message {seq} ignored: too many were unreadable; publishing no blocks for up to {RATION_S:g} s",
            )

    def _decode(self, seq: int, payload: bytes) -> EngineBatch | None:
        if self._decoded is not None and self._decoded[0] is payload:
            return self._decoded[1]
        try:
            return decode_batch(self._settings.engine, payload)
        except EngineEventError as error:
            self._undecodable.record_payload(seq, payload, error)
            return None

    def _copy_counters(self) -> None:
        counted, counters = self.continuity.counters, self._counters
        counters.feed_gaps = counted.gaps
        counters.feed_gaps_filled = counted.gaps_filled
        counters.feed_duplicates = counted.duplicates
        counters.feed_restarts = counted.restarts
        counters.feed_replays_failed = counted.replays_failed
        counters.feed_started_over = counted.started_over

    # ---------------------------------------------------------------- settings that look wrong

    def _subscribe_to_all(self, wanted: bool) -> None:
        """Also receive other topics until a message under ours arrives. Otherwise a wrong topic would go unnoticed."""
        if self._topic and wanted is not self._all_topics:
            self._all_topics = wanted
            self._socket.setsockopt(zmq.SUBSCRIBE if wanted else zmq.UNSUBSCRIBE, b"")

    def _is_of_topic(self, topic: bytes) -> bool:
        if not self._all_topics:
            return True
        if not topic.startswith(self._topic):
            self._socket_watch.record_foreign_topic(topic, monotonic())
            return False
        self._subscribe_to_all(False)
        return True

    def _recognize_engine(self, payload: bytes) -> None:
        found = kind_of_batch(payload)
        self._payloads_to_recognize = 0 if found is not None else self._payloads_to_recognize - 1
        if found is not None:
            diagnose_kind(self._diagnoses, self._settings.engine, found, f"the feed at {self._settings.endpoint}")

    def _diagnose(self, engine_up: bool | None) -> None:
        watch, now_s = self._socket_watch, monotonic()
        self._tell("feed", watch.suspicion(self._connection, engine_up=engine_up, now_s=now_s))
        self._tell("replay", watch.replay_suspicion(self._connection))

    def _tell(self, name: str, suspicion: Suspicion | None) -> None:
        if suspicion is None:
            self._diagnoses.clear(name)
        else:
            self._diagnoses.set(name, suspicion.seen, suspicion.cure)

    # ---------------------------------------------------------------- connection

    async def _watch_connection(self) -> None:
        # a bound socket may have several connections, and a handshake does not name its connection
        connected = zmq.EVENT_ACCEPTED if self._settings.bind else zmq.EVENT_HANDSHAKE_SUCCEEDED
        while True:
            event = int((await recv_monitor_message(self._monitor))["event"])
            if event == connected:
                self._state.record_connect()
                self._socket_watch.record_connect()
            elif event == zmq.EVENT_CONNECTED:
                self._socket_watch.record_listener()
            elif event == zmq.EVENT_DISCONNECTED and self._state.connected:
                self._state.record_disconnect(monotonic())
                if not self._state.connected:
                    self._socket_watch.record_disconnect()
                    self._subscribe_to_all(True)
            self._report_connection()

    def _report_connection(self) -> None:
        before, self._connection = self._connection, self._state.connection(monotonic())
        if self._connection is before:
            return
        if self._connection.alive != before.alive:
            self._on_alive()
        endpoint = self._settings.endpoint
        if self._connection is Connection.AWAY:  # a wrong address looks like an engine that has not started yet
            log.warning("worker %s: event socket %s is not connected; receiving no events", self._worker_id, endpoint)
        elif self._connection is Connection.CONNECTED and before is not Connection.LOST:
            log.info("worker %s: event socket %s is connected", self._worker_id, endpoint)
