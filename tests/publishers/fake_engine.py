"""An engine's two ZMQ sockets, for payloads recorded from real engines."""

import gzip
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import anyio
import zmq
import zmq.asyncio
from anyio.abc import TaskGroup

RECORDINGS = Path(__file__).parent.parent / "data" / "engine-recordings"
END = b"\xff" * 8


def recording(name: str) -> tuple[dict[str, Any], list[bytes]]:
    """The header and the payloads of one recording."""
    with gzip.open(RECORDINGS / f"{name}.jsonl.gz", "rt") as file:
        head, *lines = [json.loads(line) for line in file]
    return head, [bytes.fromhex(line["payload_hex"]) for line in lines]


class FakeEngine:
    """PUB and ROUTER as vLLM has them. `lose` keeps a batch for replay only, as if a slow subscriber had missed it."""

    def __init__(
        self,
        *,
        topic: bytes = b"",
        buffer: int = 10_000,
        replay_topic: bool = True,
        answers: bool = True,
        ports: Sequence[int] = (),
        host: str = "127.0.0.1",
    ) -> None:
        """`ports`: those of an earlier engine. `answers`: True if the replay socket answers. `host`: as in a URL."""
        self.topic = topic
        self.next_seq = 0
        self.replays: list[int] = []
        self.answers = answers
        self._replay_topic = replay_topic
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB that sees its subscribers
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._ports = list(ports)
        self._address = f"tcp://{host}"
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.IPV6, 1)

    @property
    def endpoint(self) -> str:
        return f"{self._address}:{self._ports[0]}"

    @property
    def replay_endpoint(self) -> str:
        return f"{self._address}:{self._ports[1]}"

    @property
    def ports(self) -> Sequence[int]:
        return self._ports

    async def __aenter__(self) -> Self:
        for socket, port in zip((self._pub, self._router), self._ports, strict=False):
            socket.bind(f"{self._address}:{port}")
        self._ports = self._ports or [socket.bind_to_random_port(self._address) for socket in (self._pub, self._router)]
        self._tasks: TaskGroup = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._answer)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)
        self._context.destroy(linger=0)

    def connect(self, endpoint: str) -> None:
        """Connect to a bound subscriber, like an engine whose endpoint names a single host."""
        self._pub.connect(endpoint)

    async def subscribed(self) -> None:
        """Wait for a subscriber: nothing sent after that is lost."""
        with anyio.fail_after(60):
            while (await self._pub.recv())[:1] != b"\x01":
                pass

    async def send(self, *payloads: bytes) -> None:
        for payload in payloads:
            await self.raw(self.topic, self.next_seq.to_bytes(8, "big"), payload)
            self.lose(payload)

    def lose(self, payload: bytes) -> None:
        self._buffer.append((self.next_seq, payload))
        self.next_seq += 1

    async def raw(self, *frames: bytes) -> None:
        """Send any frames."""
        await self._pub.send_multipart(list(frames))

    def restart(self) -> None:
        """Act as another process: seq starts at 0 again, and the replay buffer is empty."""
        self.next_seq = 0
        self._buffer.clear()

    async def _answer(self) -> None:
        while True:
            client, *question = await self._router.recv_multipart()
            if len(question) != 2 or question[0] != b"":
                continue  # as the engines do
            first = int.from_bytes(question[1], "big")
            self.replays.append(first)
            if not self.answers:
                continue
            extra = [self.topic] if self._replay_topic else []
            for seq, payload in [one for one in self._buffer if one[0] >= first]:
                await self._router.send_multipart([client, b"", *extra, seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", *([b""] if self._replay_topic else []), END, b""])
