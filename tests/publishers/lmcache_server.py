"""LMCache's multiprocess server as a subscriber sees it: its ZMQ transport and records of 0.5.6, and its bounded log."""

from collections import deque
from typing import Any, Self

import anyio
import msgpack
import zmq
import zmq.asyncio
from anyio.abc import TaskGroup

PING = msgpack.packb(22)
SUBSCRIBE = msgpack.packb("subscribe_kv_events")


class LMCacheServer:
    """`store` and `evict` append to its log; a subscriber gets the records after its cursor, one batch per acknowledgement."""

    def __init__(self, port: int = 0, *, incarnation: int = 1, log_size: int = 1_000, host: str = "127.0.0.1") -> None:
        self._host = host
        self._port = port
        self.incarnation = incarnation
        self.enabled = True
        self.pings = 0
        self.asked: list[list[Any]] = []
        self._log: deque[dict[str, Any]] = deque(maxlen=log_size)
        self._next_seq = 1
        self._streams: dict[bytes, dict[str, Any]] = {}

    @property
    def endpoint(self) -> str:
        return f"tcp://{self._host}:{self._port}"

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.IPV6, 1)
        if self._port:
            self._router.bind(self.endpoint)
        else:
            self._port = self._router.bind_to_random_port(f"tcp://{self._host}")
        self._tasks: TaskGroup = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._serve)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)
        self._context.destroy(linger=0)

    # ---------------------------------------------------------------- the cache

    async def store(self, name: bytes, tokens: list[int], parent: bytes | None = None, model: str = "model") -> None:
        await self._append(
            kind="stored", model_name=model, block_hashes=[name], parent_block_hash=parent, token_ids=tokens
        )

    async def evict(self, *names: bytes, model: str = "model") -> None:
        await self._append(
            kind="removed", model_name=model, block_hashes=list(names), parent_block_hash=None, token_ids=[]
        )

    async def lose(self) -> None:
        """Lose records: something happened that is not in the log."""
        await self._append(kind="lost", model_name="", block_hashes=[], parent_block_hash=None, token_ids=[])

    async def end_subscriptions(self) -> None:
        """End all subscriptions, as if no instance had pinged for too long."""
        for identity in list(self._streams):
            del self._streams[identity]
            await self._router.send_multipart([identity, msgpack.packb(0), SUBSCRIBE])

    async def _append(self, **record: Any) -> None:
        self._log.append({"seq": self._next_seq, "medium": "CPU", **record})
        self._next_seq += 1
        for identity in list(self._streams):
            await self._push(identity)

    # ---------------------------------------------------------------- the wire

    async def _serve(self) -> None:
        while True:
            identity, uid, operation, *payloads = await self._router.recv_multipart()
            if operation == b"":
                assert payloads == [b"ack"]
                if (stream := self._streams.get(identity)) is not None:
                    stream["free"] = True
                    await self._push(identity)
            elif operation == PING:
                self.pings += 1
                await self._router.send_multipart([identity, uid, operation, msgpack.packb(True)])
            else:
                assert operation == SUBSCRIBE and len(payloads) == 4
                asked = [msgpack.unpackb(one) for one in payloads]
                self.asked.append(asked)
                self._streams[identity] = {"cursor": asked[2], "model": asked[1], "free": True, "first": True}
                await self._push(identity)

    async def _push(self, identity: bytes) -> None:
        stream = self._streams[identity]
        if stream["free"] and (batch := self._next_batch(stream)) is not None:
            stream["free"] = False
            await self._router.send_multipart([identity, msgpack.packb(0), SUBSCRIBE, msgpack.packb(batch)])

    def _next_batch(self, stream: dict[str, Any]) -> dict[str, Any] | None:
        """The records after the stream's cursor; None if there are none, except in its first batch."""
        last = self._next_seq - 1
        first = self._log[0]["seq"] if self._log else last + 1
        cursor = stream["cursor"]
        lost = cursor + 1 < first or cursor > last
        events: list[dict[str, Any]] = []
        for record in self._log:
            if record["seq"] <= cursor:
                continue
            if record["kind"] == "lost":
                lost, events = True, []
            elif record["model_name"] == stream["model"]:
                events.append(record)
        if not (events or lost or stream["first"]):
            return None
        stream.update(cursor=last, first=False)
        return {
            "enabled": self.enabled,
            "incarnation": self.incarnation,
            "next_cursor": last,
            "lost": lost,
            "events": events,
        }
