"""Engines as both subjects see them: ZMQ sockets that publish vLLM's KV events, one per worker.

A real engine drops messages for a slow subscriber; these wait instead, so both subjects get all messages.
"""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgpack
import zmq

from kvatlas.blocks.hashing import HASH_BYTES, extend_chain

SUBSCRIBED_MS = 20_000


def encode_stored(tokens: Sequence[int], block_size: int, parent: int | None = None) -> tuple[bytes, int]:
    """(the batch of one BlockStored, the engine hash of its last block), which continues the block `parent`.

    Engine hashes are sequence hashes; both subjects take them as opaque.
    """
    chain = extend_chain(tokens, block_size, parent)
    hashes = [int.from_bytes(chain[i : i + HASH_BYTES], "little") for i in range(0, len(chain), HASH_BYTES)]
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        "medium": "GPU",
    }
    return msgpack.packb([time.time(), [event], None]), hashes[-1]  # each socket is a separate engine without ranks


def encode_cleared() -> bytes:
    """The batch of an AllBlocksCleared."""
    return msgpack.packb([time.time(), [{"type": "AllBlocksCleared"}], None])


class Engines:
    """Event sockets of several engines, bound to loopback ports. `ports`: those given, or a free one for each
    engine."""

    def __init__(self, count: int, first_port: int | None = None) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, count + 8)
        self._sockets = [self._context.socket(zmq.XPUB) for _ in range(count)]
        self._seqs = [0] * count
        self.endpoints = []
        for number, socket in enumerate(self._sockets):
            socket.setsockopt(zmq.XPUB_NODROP, 1)
            socket.setsockopt(zmq.LINGER, 0)
            if first_port is None:
                port = socket.bind_to_random_port("tcp://127.0.0.1")
            else:
                port = first_port + number
                socket.bind(f"tcp://127.0.0.1:{port}")
            self.endpoints.append(f"tcp://127.0.0.1:{port}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def wait_for_subscribers(self, count: int | None = None) -> None:
        """Wait until each engine, or each of the first `count`, has a subscriber. Raises TimeoutError."""
        for endpoint, socket in list(zip(self.endpoints, self._sockets, strict=True))[:count]:
            if not socket.poll(SUBSCRIBED_MS, zmq.POLLIN):
                raise TimeoutError(f"nobody subscribed to {endpoint} within {SUBSCRIBED_MS / 1e3:.0f} s")
            socket.recv()

    def publish(self, engine: int, payload: bytes) -> None:
        """Publish the next batch of an engine; waits while its subscriber has too many unread ones."""
        self._sockets[engine].send_multipart([b"", self._seqs[engine].to_bytes(8, "big"), payload])
        self._seqs[engine] += 1
