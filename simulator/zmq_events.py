"""vLLM's KV event feed: a PUB socket, and a ROUTER socket that replays the last batches.

Frames and fields as vLLM 0.33 sends them: PUB `[topic, seq (8 bytes big-endian), payload]`; the payload is msgpack
`[ts, events, data_parallel_rank]` with events as maps whose fields at their default are left out. Replay is asked with
`["", first seq (8 bytes big-endian)]` and answered with `["", topic, seq, payload]`..., `["", "", ff * 8, ""]`.
"""

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio.lowlevel
import msgpack
import zmq
import zmq.asyncio

from kvatlas.errors import SettingsError
from simulator.cache.block_changes import BlockChange, BlockRemoved, BlocksStored, GpuCleared, Medium

_log = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
HIGH_WATER_MARK = 100_000
REPLAY_BURST = 64


@dataclass(frozen=True, slots=True)
class EventEncoding:
    """How an engine words its changes."""

    block_size: int
    adapters: tuple[str, ...] = ()
    """LoRA ids are their places in it, from 1."""
    self_describing_offload: bool = True
    """Whether events of the CPU tier carry tokens and parent; else they are placeholders that only name the hashes."""

    def batch(self, ts: float, changes: Sequence[BlockChange]) -> bytes:
        """One payload. `ts` is in seconds since the epoch."""
        packed: bytes = msgpack.packb([ts, [self._event(change) for change in changes], 0])
        return packed

    def _event(self, change: BlockChange) -> dict[str, Any]:
        match change:
            case GpuCleared():
                return {"type": "AllBlocksCleared"}
            case BlockRemoved():
                return {
                    "type": "BlockRemoved",
                    "block_hashes": [change.block_hash],
                    "medium": change.medium.value,
                    "group_idx": 0,
                }
            case BlocksStored():
                return self._stored(change)

    def _stored(self, change: BlocksStored) -> dict[str, Any]:
        if change.medium is Medium.CPU and not self.self_describing_offload:
            return {
                "type": "BlockStored",
                "block_hashes": list(change.block_hashes),
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": 0,
                "lora_id": None,
                "medium": change.medium.value,
                "lora_name": None,
            }
        return {
            "type": "BlockStored",
            "block_hashes": list(change.block_hashes),
            "parent_block_hash": change.parent_hash,
            "token_ids": list(change.token_ids),
            "block_size": self.block_size,
            "lora_id": None if change.adapter is None else self.adapters.index(change.adapter) + 1,
            "medium": change.medium.value,
            "lora_name": change.adapter,
            "extra_keys": [list(keys) or None for keys in change.extra_keys],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """The two sockets. A port of 0 or `*` takes a free one."""

    endpoint: str
    replay_endpoint: str | None = None
    bind: bool = True
    """False: as vLLM, the PUB socket connects unless its endpoint has `*` or `::` or is ipc or inproc."""
    topic: str = ""
    buffer_steps: int = 10_000


class ZmqEventFeed:
    """Sends batches with a seq from 0 on, and keeps the last ones for replay."""

    def __init__(
        self,
        encoding: EventEncoding,
        settings: FeedSettings,
        pub: zmq.asyncio.Socket,
        router: zmq.asyncio.Socket | None,
    ) -> None:
        self._encoding = encoding
        self._topic = settings.topic.encode()
        self._pub = pub
        self._router = router
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._next_seq = 0
        self.endpoint = _bound_to(pub, settings.endpoint)
        """Where the events are, with the real port."""
        self.replay_endpoint = None if router is None else _bound_to(router, settings.replay_endpoint or "")

    @property
    def next_seq(self) -> int:
        """The seq of the next batch, which is the number of batches so far."""
        return self._next_seq

    async def publish(self, changes: tuple[BlockChange, ...]) -> None:
        """Send one batch. With nobody listening it is only kept for replay."""
        seq = self._next_seq.to_bytes(8, "big")
        payload = self._encoding.batch(time.time(), changes)
        self._next_seq += 1
        self._buffer.append((seq, payload))
        await self._pub.send_multipart((self._topic, seq, payload))

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled; returns at once without a replay socket."""
        if self._router is None:
            return
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                _log.warning("replay: %d frames can't be understood; expected an empty one and 8 bytes", len(frames))
                continue
            client, _, first = frames
            for sent, (seq, payload) in enumerate(batch for batch in tuple(self._buffer) if batch[0] >= first):
                await self._router.send_multipart((client, b"", self._topic, seq, payload))
                if sent % REPLAY_BURST == REPLAY_BURST - 1:
                    await anyio.lowlevel.checkpoint()  # a send that needn't wait doesn't let the engine run
            await self._router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


@asynccontextmanager
async def open_feed(encoding: EventEncoding, settings: FeedSettings) -> AsyncIterator[ZmqEventFeed]:
    """A feed whose sockets close with the context. Raises SettingsError for an endpoint that can't be used."""
    context = zmq.asyncio.Context()
    pub = context.socket(zmq.PUB)
    router = None
    try:
        pub.setsockopt(zmq.LINGER, 0)
        pub.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        _attach(pub, settings.endpoint, bind=settings.bind or _binds_in_vllm(settings.endpoint))
        if settings.replay_endpoint is not None:
            router = context.socket(zmq.ROUTER)
            router.setsockopt(zmq.LINGER, 0)
            # As vLLM from 0.33 on, a slow reader loses nothing: what can wait is bounded by the buffer itself.
            router.setsockopt(zmq.SNDHWM, 0)
            _attach(router, settings.replay_endpoint, bind=True)
        yield ZmqEventFeed(encoding, settings, pub, router)
    finally:
        pub.close()
        if router is not None:
            router.close()
        context.term()


def _binds_in_vllm(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _attach(socket: zmq.asyncio.Socket, endpoint: str, *, bind: bool) -> None:
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    wanted = f"{scheme}://{host}:*" if scheme == "tcp" and port == "0" else endpoint
    try:
        if bind:
            if "[" in wanted or "::" in wanted:
                socket.setsockopt(zmq.IPV6, 1)
            socket.bind(wanted)
        else:
            socket.connect(wanted)
    except zmq.ZMQError as error:
        doing = "listen on" if bind else "connect to"
        raise SettingsError(f"KV events can't {doing} {endpoint}: {error.strerror}") from error


def _bound_to(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    last = socket.getsockopt(zmq.LAST_ENDPOINT)
    return last.rstrip(b"\0").decode() if isinstance(last, bytes) and last else endpoint
