"""Writes the requests that routers report to a trace that `read_trace` reads, with hashes and scopes as numbers.

A line is Mooncake's, with blocks of `block_tokens`, a number for the request's identity scope as `tenant`, and the engine's
figures, to which `kvatlas calibrate` fits rates.
"""

import gzip
import json
from base64 import b64decode
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.validation import MAX_NUMBER, describe_invalid

MAX_TOKENS = 1 << 24
MAX_HASHES = 1 << 22
"""Maximum number of base64 characters in one request."""
FACTS = ("cached_tokens", "queued_tokens", "running_requests", "kv_tokens", "ttft_ms", "tpot_ms")

_Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
_Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None
_Ms = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None


class _Told(BaseModel):
    model_config = ConfigDict(extra="ignore")

    at_us: Annotated[int, Field(ge=0, le=1 << 53)]
    model: str
    scope: str
    input_length: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    output_length: _Tokens
    block_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    hashes: Annotated[str, Field(max_length=MAX_HASHES)]
    cached_tokens: _Count = None
    queued_tokens: _Count = None
    running_requests: _Count = None
    kv_tokens: _Count = None
    ttft_ms: _Ms = None
    tpot_ms: _Ms = None


class TraceRecorder:
    """Writes one file. Takes about 100 bytes of memory per distinct block.

    `requests`: those written. `dropped`: those that a router could not send in time. `unread`: those left out because
    their router did not know their tokens. `full`: `most_bytes` have been written, and writing has stopped.
    """

    def __init__(self, path: Path, most_bytes: int, model: str | None = None) -> None:
        """`model`: leave out requests for other models. Raises SettingsError for a path that can't be written."""
        self._model = model
        self._left = most_bytes
        self._numbers: dict[bytes, int] = {}
        self._scopes: dict[str, int] = {}
        self.models: set[str] = set()
        self.requests = self.dropped = self.unread = 0
        self.full = False
        try:
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror or error}") from error
        self._zipped = gzip.GzipFile(fileobj=self._file, mode="wb", filename="") if path.suffix == ".gz" else None

    def add(self, line: bytes) -> None:
        """Add a line from a router. Raises InvalidValue for an invalid line, or OSError if it can't be written."""
        if not line.strip() or self.full:
            return
        if line.startswith(b'{"dropped":'):
            self.dropped += int(json.loads(line)["dropped"])
            return
        try:
            told = _Told.model_validate_json(line)
        except ValidationError as error:
            raise InvalidValue(describe_invalid(error, "the line")) from error
        if self._model not in (None, told.model):
            return
        packed = _decode(told.hashes)
        blocks = told.input_length // told.block_tokens
        if len(packed) != blocks * HASH_BYTES:
            self.unread += 1
            return
        self.models.add(told.model)
        scope = self._scopes.setdefault(told.scope, len(self._scopes))
        own = scope.to_bytes(4, "little")
        ids = [
            self._numbers.setdefault(packed[at : at + HASH_BYTES] + own, len(self._numbers))
            for at in range(0, len(packed), HASH_BYTES)
        ]
        self._write(
            {
                "timestamp": told.at_us / 1e3,
                "input_length": told.input_length,
                "output_length": told.output_length,
                "block_tokens": told.block_tokens,
                "hash_ids": ids,
                "tenant": scope,
                **{name: value for name in FACTS if (value := getattr(told, name)) is not None},
            }
        )

    def close(self) -> None:
        """Close the file. Raises OSError."""
        if self._zipped is not None:
            self._zipped.close()
        self._file.close()

    def _write(self, request: dict[str, Any]) -> None:
        line = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        if len(line) > self._left:
            self.full = True
            return
        self._left -= len(line)
        (self._zipped or self._file).write(line)
        self.requests += 1


def _decode(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidValue(f"hashes is {text!r:.80}; expected base64") from error
