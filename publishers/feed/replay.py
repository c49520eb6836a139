"""Requests earlier batches from an engine's replay socket (thin).

Sources: vLLM 0.9 to 0.33 and SGLang 0.4.7 to 0.5.23. Request: `[b"", seq]`; answers: `[b"", (topic,) seq, payload]`, ended
by `[b"", (b"",) ff*8, b""]`. Up to vLLM 0.32 a slow reader can lose batches and the end, hence the deadline.
"""

from dataclasses import dataclass
from time import monotonic

import anyio
import zmq
import zmq.asyncio

from kvatlas_publishers.feed.zmq_sockets import open_socket

SEQ_BYTES = 8
END_SEQ = b"\xff" * SEQ_BYTES
SILENCE_S = 2.0
"""Longest wait for the next answer. Engines check the socket ten times a second, between scheduler steps."""
DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Replay:
    """The batches in the order received. `complete`: True if the end marker arrived."""

    batches: list[tuple[int, bytes]]
    complete: bool


async def request_replay(
    context: zmq.asyncio.Context,
    endpoint: str,
    first_seq: int,
    silence_s: float = SILENCE_S,
    deadline_s: float = DEADLINE_S,
) -> Replay:
    """Ask for the batches that the engine still has from `first_seq` on. The answer may start at a later seq without notice.

    Each request uses its own socket, so that it never receives a late answer to an earlier request.
    """
    socket = open_socket(context, zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 0)
    batches: list[tuple[int, bytes]] = []
    ends_at_s = monotonic() + deadline_s
    try:
        socket.connect(endpoint)
        with anyio.move_on_after(silence_s):
            await socket.send_multipart([b"", first_seq.to_bytes(SEQ_BYTES, "big")])
        while (left_s := ends_at_s - monotonic()) > 0:
            frames: list[bytes] | None = None
            with anyio.move_on_after(min(silence_s, left_s)):
                frames = await socket.recv_multipart()
            if frames is None:
                break
            if len(frames) < 2 or len(frames[-2]) != SEQ_BYTES:
                continue
            if frames[-2] == END_SEQ:
                return Replay(batches, True)
            batches.append((int.from_bytes(frames[-2], "big"), frames[-1]))
        return Replay(batches, False)
    finally:
        socket.close()
