"""Follows the events of LMCache's multiprocess server (0.5.6) over ZMQ, its default transport.

A DEALER sends `[request id, operation, payload...]`, each frame msgpack; the server answers `[request id, operation, answer]`.
`subscribe_kv_events(instance_id, model_name, cursor, max_events)` gets many answers: each batch follows once the previous one
is acknowledged by `[request id, b"", b"ack"]`. An answer without its last frame is the end. A subscription expires if its
instance sends no `ping`.

When a subscription ends for any reason, we withdraw all chunks of the server and subscribe again from the start of its log.
"""

import logging
import secrets
from collections.abc import Callable
from time import monotonic
from typing import Self

import anyio
import msgpack
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvatlas.errors import EngineEventError
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.settings import PublishSettings
from kvatlas_publishers.engine_events import EngineBatch, EngineEvent
from kvatlas_publishers.engines.lmcache import MAX_EVENTS, ChunkEvents
from kvatlas_publishers.feed.zmq_sockets import open_socket
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.publisher import Publisher

SUBSCRIBE = "subscribe_kv_events"
PING = 22
"""The ping operation's number. Newer operations have names."""
LOOK_S = 0.5
PING_S = 5.0
SILENT_S = 15.0
RETRY_S = 1.0

log = logging.getLogger("kvatlas.publisher")


class LMCacheSubscription:
    """Call `run` (until cancelled). Once the engine's block size is known, it passes the chunks in the server's CPU memory to
    `on_batch`."""

    def __init__(
        self,
        endpoint: str,
        model_name: str,
        worker_id: str,
        ledger: Callable[[], Ledger],
        *,
        on_batch: Callable[[EngineBatch], object],
    ) -> None:
        """`model_name`: the engine's name for its model in LMCache. `ledger`: returns the ledger in use."""
        self._endpoint = endpoint
        self._model_name = model_name
        self._ledger = ledger
        self._on_batch = on_batch
        self._log = RateLimitedLog(log, f"worker {worker_id}: ")
        self._worker_id = worker_id
        self._instance_id = secrets.randbits(62)  # an id allows one subscription; engines have their own ids
        self._chunks = ChunkEvents()
        self._again = False
        self._subscribed = False

    @classmethod
    def of(cls, settings: PublishSettings, publisher: Publisher) -> Self | None:
        """The publisher's subscription; None if the settings name no server."""
        if settings.lmcache_endpoint is None:
            return None
        return cls(
            settings.lmcache_endpoint,
            settings.lmcache_model or settings.model_id,
            publisher.worker_id,
            lambda: publisher.ledger,
            on_batch=publisher.record,
        )

    def restart(self) -> None:
        """Read all chunks again, because the ledger has dropped its blocks."""
        self._chunks = ChunkEvents()
        self._again = True

    async def run(self, context: zmq.asyncio.Context) -> None:
        while self._ledger().block_size is None:  # chunks are split into blocks of this size
            await anyio.sleep(LOOK_S)
        self._chunks = ChunkEvents([name for _, _, name in self._ledger().resident()])  # from a saved ledger
        self._withdraw()
        while True:
            self._again = False
            try:
                await self._follow(context)
            except (EngineEventError, zmq.ZMQError) as error:
                held = len(self._chunks.held)
                self._log.report(
                    "lmcache", f"LMCache at {self._endpoint}: {error}; withdrawing {held} chunks of its cache"
                )
            self._withdraw()
            await anyio.sleep(RETRY_S)

    def _withdraw(self) -> None:
        if events := self._chunks.withdraw():
            self._on_batch(EngineBatch(events))

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        """Follow one subscription until it ends. Raises EngineEventError with the reason; returns if `restart` was called."""
        self._subscribed = False
        with open_socket(context, zmq.DEALER) as socket:
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            try:
                socket.connect(self._endpoint)
                asked = [self._instance_id, self._model_name, 0, MAX_EVENTS]
                await socket.send_multipart([_pack(0), _pack(SUBSCRIBE), *map(_pack, asked)])
                await self._receive(socket, monitor)
            finally:
                socket.disable_monitor()
                monitor.close()

    async def _receive(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        heard_s = pinged_s = monotonic()
        pings = 0
        while not self._again:
            now_s = monotonic()
            if now_s - heard_s > SILENT_S:
                raise EngineEventError(f"no answer in {SILENT_S:g} s")
            if await monitor.poll(0):
                await recv_monitor_message(monitor)
                raise EngineEventError("the connection was lost")
            if now_s - pinged_s > PING_S:
                pinged_s, pings = now_s, pings + 1
                await socket.send_multipart([_pack(pings), _pack(PING), _pack(self._instance_id)])
            if not await socket.poll(LOOK_S * 1000):
                continue
            frames = await socket.recv_multipart()
            heard_s = monotonic()
            if frames[0] != _pack(0):
                continue  # the answer to a ping
            if len(frames) != 3:
                raise EngineEventError("the server ended the subscription")
            self._take(self._chunks.decode(frames[2]))
            await socket.send_multipart([_pack(0), b"", b"ack"])

    def _take(self, events: list[EngineEvent]) -> None:
        if events:
            self._on_batch(EngineBatch(events))
        if not self._subscribed:
            self._subscribed = True
            log.info("worker %s: reading LMCache's events at %s", self._worker_id, self._endpoint)


def _pack(value: object) -> bytes:
    return bytes(msgpack.packb(value))
