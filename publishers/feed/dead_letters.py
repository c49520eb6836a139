"""Keeps payloads that could not be decoded in a file of bounded size, for later inspection.

One JSON line each: `{"at": seconds since 1970, "worker", "why", "seq", "bytes", "payload": base64 of the first 64 KiB}`.
"""

import base64
import json
import os
from pathlib import Path
from time import time

MAX_FILE_BYTES = 16 << 20
KEPT_PAYLOAD_BYTES = 64 << 10


class DeadLetters:
    """Appends to `<worker>.dead-letters.jsonl`. At half of `max_bytes`, the file is renamed to `<path>.1`, replacing an
    earlier file of that name."""

    def __init__(self, folder: Path | None, worker_id: str, max_bytes: int = MAX_FILE_BYTES) -> None:
        """`folder=None`: keep nothing."""
        self.path = folder / f"{worker_id}.dead-letters.jsonl" if folder else None
        self._worker_id = worker_id
        self._half_bytes = max_bytes // 2

    def keep(self, why: str, seq: int | None, payload: bytes) -> bool:
        """Keep a payload. Returns False if there is no path or the file can't be written."""
        if self.path is None:
            return False
        letter = {
            "at": round(time(), 6),
            "worker": self._worker_id,
            "why": why,
            "seq": seq,
            "bytes": len(payload),
            "payload": base64.b64encode(payload[:KEPT_PAYLOAD_BYTES]).decode(),
        }
        line = json.dumps(letter) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size + len(line) > self._half_bytes:
                os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            with self.path.open("a", encoding="ascii") as file:
                file.write(line)
        except OSError:
            return False
        return True
