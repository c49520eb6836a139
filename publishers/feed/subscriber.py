"""Follows one engine's KV events over ZMQ (thin: what they mean is in continuity, engines and ledger).

Nothing stops it: a payload that can't be understood is counted, kept as a dead letter, and passed over. It may have said that
blocks are gone: where that is asked for (`distrust_poison`), what was held before it is given up (`distrust.py`); so
too for an event of an unknown kind.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic

import anyio
import anyio.lowlevel
import zmq
import zmq.asyncio
from xxhash import xxh3_128_digest
from zmq.utils.monitor import recv_monitor_message

from kvatlas.errors import EngineEventError, InvalidValue, Unreachable
from kvatlas.events import EngineBatch
from kvatlas.fleet.records import EngineKind
from kvatlas.runtime.rate_limited_log import Complaints
from publishers.counters import PublisherCounters
from publishers.engines import MAX_PAYLOAD_BYTES, decode_batch
from publishers.feed.continuity import Continuity, Step
from publishers.feed.dead_letters import DeadLetters
from publishers.feed.distrust import Mistrust
from publishers.feed.endpoints import to_connect
from publishers.feed.replay import SEQ_BYTES, Replay, ask_replay
from publishers.feed.undecodable import PoisonAside

FIRST_SILENCE_S = 2.0
LONGEST_SILENCE_S = 15.0
LOOK_S = 0.5
GRACE_S = 3.0
"""So long may the connection be away before the engine counts as down: ZMQ connects again by itself."""
HELD_MESSAGES = 10_000
BATCHES_AT_ONCE = 64

log = logging.getLogger("kvatlas.publisher")


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """Where an engine's sockets are. `bind`: the engine connects to the event socket, so it is bound here.

    `distrust_poison`: see `publishers.feed.distrust`."""

    engine: EngineKind
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    bind: bool = False
    distrust_poison: bool = False
    first_silence_s: float = FIRST_SILENCE_S
    replay_silence_s: float = 2.0


class Feed:
    """`open`, `catch_up`, `run` until cancelled, `close`. Hands each batch to `on_batch` and a lost story to `on_empty`."""

    def __init__(
        self,
        settings: FeedSettings,
        worker_id: str,
        continuity: Continuity,
        counters: PublisherCounters,
        dead_letters: DeadLetters,
        context: zmq.asyncio.Context,
        *,
        on_batch: Callable[[EngineBatch], object],
        on_empty: Callable[[], None],
        on_alive: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_alive`: `alive` is another than before."""
        self.continuity = continuity
        self._settings = settings
        self._worker_id = worker_id
        self._counters = counters
        self._dead_letters = dead_letters
        self._on_batch = on_batch
        self._on_empty = on_empty
        self._on_alive = on_alive
        self._complaints = Complaints(log, f"worker {worker_id}: ")
        self._aside = PoisonAside()
        self._mistrust = Mistrust() if settings.distrust_poison else None
        self._seen_poison: deque[bytes] = deque(maxlen=256)
        self._decoded: tuple[bytes, EngineBatch] | None = None
        self._context = context
        self._connections = 0
        self._connected_once = False
        self._was_alive = False
        self._said_away = False
        self._lost_s = 0.0
        self._restarted = False
        self._probe_now = False
        self._connection_lost = False
        self._reconnected = False
        self.engine_up: Callable[[], bool] = lambda: False
        """is the engine known to be there, whatever the connection says? Then what it does without it is asked for, too"""
        self.silence_s = settings.first_silence_s
        self.settled = True
        """everything up to the feed's position was handed on"""

    # ---------------------------------------------------------------- life

    def open(self) -> None:
        """Connect, or bind. Raises Unreachable where the endpoint can't be used."""
        settings = self._settings
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, HELD_MESSAGES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._socket.setsockopt_string(zmq.SUBSCRIBE, settings.topic)
        try:
            if settings.bind:
                self._socket.bind(settings.endpoint)
            else:
                self._socket.connect(to_connect(settings.endpoint))
        except zmq.ZMQError as error:
            self.close()
            raise Unreachable(f"event socket {settings.endpoint}: {error.strerror or error}") from error
        self._lost_s = monotonic()

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()
        self._monitor.close()

    async def catch_up(self) -> None:
        """Before the first incarnation: is it still the life that was saved, and what came before we listened?

        What was saved is not told before the engine said that it still lives that life, or is given up.
        """
        await self._follow(self.continuity.resume())
        while self.continuity.unproven:
            await self._follow(self.continuity.probe())

    async def run(self) -> None:
        """Follow the feed until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_connection)
            await self._receive()

    def restarted(self) -> None:
        """The engine's process is known to be another one now."""
        self._restarted = True

    @property
    def alive(self) -> bool:
        """Is the engine there, as far as the connection tells? False before it was there once."""
        if self._connections > 0:
            return True
        return self._connected_once and monotonic() - self._lost_s < GRACE_S

    # ---------------------------------------------------------------- receiving

    async def _receive(self) -> None:
        heard_s = monotonic()
        for received in count(1):
            if received % BATCHES_AT_ONCE == 0:  # what waits already is received without a task switch
                await anyio.lowlevel.checkpoint()
            frames: list[bytes] | None = None
            with anyio.move_on_after(LOOK_S):
                frames = await self._socket.recv_multipart()
            if self._restarted:
                self._restarted = False
                await self._drop_queued()
                await self._follow(self.continuity.restarted())
            elif self._reconnected:
                self._reconnected = self._probe_now = False
                await self._drop_queued()
                await self._follow(self.continuity.reconnected())
                heard_s, self.silence_s = monotonic(), self._settings.first_silence_s
            elif frames is not None:
                await self._on_frames(frames)
                heard_s, self.silence_s = monotonic(), self._settings.first_silence_s
            elif self._probe_now or (
                monotonic() - heard_s >= self.silence_s and (self._connections > 0 or self.engine_up())
            ):
                self._probe_now = False
                await self._follow(self.continuity.probe())
                heard_s, self.silence_s = monotonic(), min(2 * self.silence_s, LONGEST_SILENCE_S)
            self._tell_alive()

    async def _drop_queued(self) -> None:
        """What waits in the socket may be of either life of the engine: replay brings it again."""
        while await self._socket.poll(0):
            await self._socket.recv_multipart()

    async def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) < 2 or len(frames[-2]) != SEQ_BYTES:
            self._counters.poison_frames += 1
            self._poison(
                f"message of {len(frames)} frames; expected topic, seq of {SEQ_BYTES} bytes, payload", None, frames[-1]
            )
            return
        seq, payload = int.from_bytes(frames[-2], "big"), frames[-1]
        try:
            self._decoded = payload, decode_batch(self._settings.engine, payload)
        except EngineEventError as error:
            self._not_understood(seq, payload, error)
            self._aside.put(seq, payload, self.continuity.last_seq)
            return
        for earlier_seq, earlier in self._aside.before(seq):
            await self._follow(self.continuity.offer(earlier_seq, earlier))
        try:
            step = self.continuity.offer(seq, payload)
        except InvalidValue as error:
            self._counters.poison_frames += 1
            self._poison(str(error), seq, payload)
            return
        await self._follow(step)

    async def _follow(self, step: Step) -> None:
        """Do what the continuity says, until it has nothing more to ask."""
        while True:
            if step.why:
                log.warning("worker %s: %s", self._worker_id, step.why)
            if step.empty:
                self._on_empty()
            await self._take_all(step.take)
            self._count()
            if step.ask_from is None:
                return
            replay = await self._replay(step.ask_from)
            step = self.continuity.replayed(replay.batches, replay.complete)

    async def _take_all(self, batches: Sequence[tuple[int, bytes]]) -> None:
        """The position says already that all of them are taken: so all are, also when this is cancelled."""
        left = iter(batches)
        self.settled = False
        try:
            for taken, (seq, payload) in enumerate(left, start=1):
                self._take(seq, payload)
                if taken % BATCHES_AT_ONCE == 0:
                    await anyio.lowlevel.checkpoint()
        finally:
            for seq, payload in left:
                self._take(seq, payload)
            self.settled = True

    async def _replay(self, first_seq: int) -> Replay:
        self._counters.feed_replays += 1
        endpoint = self._settings.replay_endpoint
        if endpoint is None:
            return Replay([], False)
        return await ask_replay(self._context, to_connect(endpoint), first_seq, self._settings.replay_silence_s)

    def _take(self, seq: int, payload: bytes) -> None:
        batch = self._understood(seq, payload)
        now_s = monotonic()
        if batch is None or batch.lost:
            self._counters.feed_lost += 1
            if self._mistrust is not None and self._mistrust.lost(now_s):
                self._complaints.say(
                    "lost", f"feed message {seq} may have taken blocks away: what was held is given up, telling it anew"
                )
                self._on_empty()
        if batch is None:
            return
        if self._mistrust is None or self._mistrust.listening(now_s):
            self._on_batch(batch)
        else:
            self._counters.feed_unheard += 1
            self._complaints.say(
                "unheard",
                f"feed message {seq} is not listened to, after so much that could not be read: the worker claims nothing "
                "for a while",
            )

    def _understood(self, seq: int, payload: bytes) -> EngineBatch | None:
        if self._decoded is not None and self._decoded[0] is payload:
            return self._decoded[1]
        try:
            return decode_batch(self._settings.engine, payload)
        except EngineEventError as error:
            self._not_understood(seq, payload, error)
            return None

    # ---------------------------------------------------------------- what could not be understood

    def _not_understood(self, seq: int, payload: bytes, error: EngineEventError) -> None:
        digest = xxh3_128_digest(payload)
        if digest in self._seen_poison:  # put aside before, or replayed
            return
        self._seen_poison.append(digest)
        if len(payload) > MAX_PAYLOAD_BYTES:
            self._counters.poison_oversized += 1
        else:
            self._counters.poison_malformed += 1
        self._poison(str(error), seq, payload)

    def _poison(self, why: str, seq: int | None, payload: bytes) -> None:
        self._counters.poison += 1
        if not self._dead_letters.keep(why, seq, payload):
            self._counters.dead_letters_dropped += 1
        place = "" if seq is None else f" {seq}"
        self._complaints.say("poison", f"feed message{place} passed over: {why}")

    def _count(self) -> None:
        counted, counters = self.continuity.counters, self._counters
        counters.feed_gaps = counted.gaps
        counters.feed_gaps_filled = counted.gaps_filled
        counters.feed_duplicates = counted.duplicates
        counters.feed_restarts = counted.restarts
        counters.feed_replays_failed = counted.replays_failed
        counters.feed_started_over = counted.started_over

    # ---------------------------------------------------------------- connection

    async def _watch_connection(self) -> None:
        while True:
            event = int((await recv_monitor_message(self._monitor))["event"])
            if event in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED):
                self._connections += 1
                self._probe_now = self._connected_once = True  # what was sent meanwhile is asked for, not waited for
                self._reconnected, self._connection_lost = self._reconnected or self._connection_lost, False
            elif event == zmq.EVENT_DISCONNECTED:
                self._connections = max(0, self._connections - 1)
                self._connection_lost = self._connection_lost or not self._connections
                self._lost_s = monotonic()
            self._tell_alive()

    def _tell_alive(self) -> None:
        if self.alive != self._was_alive:
            self._was_alive = self.alive
            self._on_alive()
            if self.alive and self._said_away:
                self._said_away = False
                log.info("worker %s: event socket %s is connected", self._worker_id, self._settings.endpoint)
        if not self.alive and not self._said_away and monotonic() - self._lost_s >= GRACE_S:
            self._said_away = True  # a wrong address looks like an engine that is not there yet
            log.warning(
                "worker %s: event socket %s is not connected: nothing of the engine is heard",
                self._worker_id,
                self._settings.endpoint,
            )
