"""vLLM's KV event feed: a PUB socket, and a ROUTER socket that replays the last batches.

Frames and fields are those of vLLM 0.33: PUB `[topic, seq (8 bytes big-endian), payload]`; the payload is msgpack `[ts, events,
data_parallel_rank]` with events as maps, without the fields that have their default value. A replay request is `["", first seq
(8 bytes big-endian)]`; the reply is `["", topic, seq, payload]`..., `["", "", ff * 8, ""]`.
"""

import logging
import os
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

from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.errors import SettingsError
from kvatlas_publishers.feed.zmq_sockets import open_socket
from kvatlas_simulator.cache.kv_events import BlockRemoved, BlocksStored, GpuCleared, KVEvent, Medium
from kvatlas_simulator.hybrid_cache.groups import CacheGroup

_log = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
HIGH_WATER_MARK = 100_000
REPLAY_BURST = 64


@dataclass(frozen=True, slots=True)
class EventEncoding:
    """How an engine encodes its events."""

    block_size: int
    adapters: tuple[str, ...] = ()
    """An adapter's LoRA id is its position in this list, from 1."""
    self_describing_offload: bool = True
    """True: events of the CPU tier carry tokens and parent. False: they are placeholders that only name the hashes."""
    groups: tuple[CacheGroup, ...] = (CacheGroup(AttentionKind.FULL),)
    """The KV cache groups, by the events' group index."""
    rank: int = 0
    """The engine's data-parallel rank."""

    def encode_batch(self, ts: float, events: Sequence[KVEvent]) -> bytes:
        """Encode one payload. `ts` is in seconds since the epoch."""
        packed: bytes = msgpack.packb([ts, [self._encode(event) for event in events], self.rank])
        return packed

    def _encode(self, event: KVEvent) -> dict[str, Any]:
        match event:
            case GpuCleared():
                return {"type": "AllBlocksCleared"}
            case BlockRemoved():
                return {
                    "type": "BlockRemoved",
                    "block_hashes": [event.block_hash],
                    "medium": event.medium.value,
                    "group_idx": event.group,
                }
            case BlocksStored():
                return self._encode_stored(event)

    def _encode_stored(self, event: BlocksStored) -> dict[str, Any]:
        if event.medium is Medium.CPU and not self.self_describing_offload:
            return {
                "type": "BlockStored",
                "block_hashes": list(event.block_hashes),
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": 0,
                "lora_id": None,
                "medium": event.medium.value,
                "lora_name": None,
            }
        group = self.groups[event.group]
        window = {} if group.window_tokens is None else {"kv_cache_spec_sliding_window": group.window_tokens}
        return {
            "type": "BlockStored",
            "block_hashes": list(event.block_hashes),
            "parent_block_hash": event.parent_hash,
            "token_ids": list(event.token_ids),
            "block_size": self.block_size,
            "lora_id": None if event.adapter is None else self.adapters.index(event.adapter) + 1,
            "medium": event.medium.value,
            "lora_name": event.adapter,
            "extra_keys": [list(keys) or None for keys in event.extra_keys],
            "group_idx": event.group,
            "kv_cache_spec_kind": group.kind.value,
            **window,
        }


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """The two sockets. Port 0 or `*` picks a free port."""

    endpoint: str
    replay_endpoint: str | None = None
    bind: bool = True
    """False: the PUB socket connects unless its endpoint has `*` or `::` or is ipc or inproc, as in vLLM."""
    topic: str = ""
    buffer_steps: int = 10_000


class ZmqEventFeed:
    """Publishes batches with a seq from 0 on, and keeps the last ones for replay."""

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
        """The endpoint of the events, with the real port."""
        self.replay_endpoint = None if router is None else _bound_to(router, settings.replay_endpoint or "")

    async def publish(self, events: tuple[KVEvent, ...]) -> None:
        """Send one batch. If there are no subscribers, it is only kept for replay."""
        seq = self._next_seq.to_bytes(8, "big")
        payload = self._encoding.encode_batch(time.time(), events)
        self._next_seq += 1
        self._buffer.append((seq, payload))
        await self._pub.send_multipart((self._topic, seq, payload))

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled. Returns immediately if there is no replay socket."""
        if self._router is None:
            return
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                _log.warning(
                    "replay: ignoring a request of %d frames; expected an empty one and one of 8 bytes", len(frames) - 1
                )
                continue
            client, _, first = frames
            for sent, (seq, payload) in enumerate(
                (seq, payload) for seq, payload in tuple(self._buffer) if seq >= first
            ):
                await self._router.send_multipart((client, b"", self._topic, seq, payload))
                if sent % REPLAY_BURST == REPLAY_BURST - 1:
                    await anyio.lowlevel.checkpoint()  # a send that doesn't wait doesn't yield to the engine
            await self._router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


@asynccontextmanager
async def open_feed(encoding: EventEncoding, settings: FeedSettings) -> AsyncIterator[ZmqEventFeed]:
    """Open a feed whose sockets close with the context. Raises SettingsError for an endpoint that can't be used."""
    context = zmq.asyncio.Context()
    pub = open_socket(context, zmq.PUB)
    router = None
    try:
        pub.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        _attach(pub, settings.endpoint, "--endpoint", bind=settings.bind or _binds_in_vllm(settings.endpoint))
        if settings.replay_endpoint is not None:
            router = open_socket(context, zmq.ROUTER)
            # As in vLLM from 0.33 on, a slow reader loses nothing; the buffer limits how much can queue up.
            router.setsockopt(zmq.SNDHWM, 0)
            _attach(router, settings.replay_endpoint, "--replay-endpoint", bind=True)
        yield ZmqEventFeed(encoding, settings, pub, router)
    finally:
        pub.close()
        if router is not None:
            router.close()
        context.term()


def _binds_in_vllm(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _attach(socket: zmq.asyncio.Socket, endpoint: str, flag: str, *, bind: bool) -> None:
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    wanted = f"{scheme}://{host}:*" if scheme == "tcp" and port == "0" else endpoint
    try:
        if bind:
            socket.setsockopt(zmq.IPV6, int("[" in wanted))  # otherwise its address is reported as [::ffff:127.0.0.1]
            socket.bind(wanted)
        else:
            socket.connect(wanted)
    except zmq.ZMQError as error:
        action = "listen on" if bind else "connect to"
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SettingsError(f"KV events can't {action} {endpoint} ({flag}): {reason}") from error


def _bound_to(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    last = socket.getsockopt(zmq.LAST_ENDPOINT)
    return last.rstrip(b"\0").decode() if isinstance(last, bytes) and last else endpoint
