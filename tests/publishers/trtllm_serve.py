"""trtllm-serve's KV cache events: a real HTTP server that returns each record once, in the real formats.

The forms are those of TensorRT-LLM 1.2 and 1.3 (`KVCacheEventSerializer`, `kvCacheEventManager.cpp`): a bounded queue whose
oldest records are dropped, ids that count from 0 in each process, hashes that cover adapter and salt.
"""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from time import sleep
from typing import Any

from kvatlas_publishers.engines.tensorrt_llm import plain_block_hash

BLOCK = 4
WINDOW = 256
ADAPTER_MIX, SALT_MIX = 0x5EED5EED5EED5EED, 0x0DDBA11
"""Replaces the engine's own mixing; any other hash will do."""


class TrtllmServe:
    """`store`, `remove`, `move` put records in the queue; POST /kv_cache_events takes all of them."""

    def __init__(self, buffer: int = 10_000) -> None:
        self._buffer = buffer
        self._lock = Lock()
        self.url = ""
        self.drains = 0
        self.status = 200
        self.streams: str | None = None
        """Content type of streamed answers; None: answers are not streamed."""
        self.restart()

    def restart(self, *windows: int) -> None:
        """Act as another process, whose cache has these windows."""
        with self._lock:
            self.records: deque[dict[str, Any]] = deque(maxlen=self._buffer)
        self._next_id = 0
        for window in windows or (WINDOW,):
            self.put({"type": "created", "num_blocks_per_cache_level": [100, 100]}, window)

    def put(self, data: Any, window: int = WINDOW, **fields: Any) -> None:
        with self._lock:
            self.records.append({"event_id": self._next_id, "data": data, "window_size": window, **fields})
        self._next_id += 1

    def store(
        self,
        tokens: Sequence[int],
        parent: int | None = None,
        *,
        level: int = 0,
        window: int = WINDOW,
        adapter: bool = False,
        salt: str | None = None,
        mm_block: int | None = None,
        tell_salt: bool = True,
    ) -> list[int]:
        """Store the tokens' blocks after `parent`; the last one may be short. Returns their hashes."""
        hashes: list[int] = []
        blocks = []
        before = parent
        for at in range(0, len(tokens), BLOCK):
            own = tokens[at : at + BLOCK]
            name = plain_block_hash(own, before or 0)
            name ^= (ADAPTER_MIX if adapter else 0) ^ (SALT_MIX if salt and before is None else 0)
            image = mm_block is not None and at == mm_block * BLOCK
            name ^= 77 if image else 0
            hashes.append(name)
            blocks.append(
                {
                    "type": "stored_block",
                    "block_hash": name,
                    "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in own],
                    "cache_level": level,
                    "priority": 35,
                    "mm_keys": [{"type": "mm_key", "hash": "ab" * 32, "start_offset": 0}] if image else [],
                    "cache_salt": salt if tell_salt else None,
                }
            )
            before = name
        self.put({"type": "stored", "parent_hash": parent, "blocks": blocks}, window)
        return hashes

    def remove(self, *hashes: int, window: int = WINDOW) -> None:
        self.put({"type": "removed", "block_hashes": list(hashes)}, window)

    def move(self, name: int, old: int, new: int, window: int = WINDOW) -> None:
        diff = {"type": "event_diff", "new_value": new, "old_value": old}
        self.put({"type": "updated", "block_hash": name, "cache_level": diff, "priority": None}, window)

    def drain(self) -> bytes:
        """The answer that a reader gets now."""
        with self._lock:
            taken = list(self.records)
            self.records.clear()
            self.drains += 1
        return json.dumps(taken).encode()


@contextmanager
def serving(engine: TrtllmServe) -> Iterator[TrtllmServe]:
    """The engine's HTTP server, on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(200 if self.path == "/health" else 404, b"")

        def do_POST(self) -> None:
            if self.path != "/kv_cache_events":
                self._answer(404, b'{"detail":"Not Found"}')
            elif engine.streams is not None:
                self._stream(engine.streams)
            elif engine.status != 200:
                self._answer(engine.status, b"event_buffer_max_size is 0")
            else:
                self._answer(200, engine.drain())

        def _stream(self, kind: str) -> None:
            """Send events one by one, in an answer that does not end while the reader stays connected."""
            self.send_response(200)
            if kind:
                self.send_header("Content-Type", kind)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            record = b'data: {"event_id": 1}\n\n' if kind else b'{"event_id": 1}\n'
            with suppress(ConnectionError):
                for _ in range(1_000):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(record), record))
                    sleep(0.01)

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    engine.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
