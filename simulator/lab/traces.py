"""Request traces as files: Mooncake's JSON lines, and logs of OpenAI-style requests; plain or gzipped.

Mooncake: `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one per block of 512 tokens]}`.
Equal ids mean equal blocks. Answers have no ids, so later requests are assumed not to share them. `kvatlas record` writes
the same format, with blocks of `block_tokens`, no id for a partial last one, and a number as `tenant`.

Logs: `{"timestamp": s or ISO 8601, "messages": [...] or "prompt": text or token ids, "usage": {"completion_tokens": n},
"max_tokens": n, "model": adapter, "user": tenant}`. Text counts as one token per 4 bytes of UTF-8; only hashes are kept.
"""

import gzip
import json
from collections.abc import Iterator
from datetime import datetime
from itertools import count, pairwise
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import xxhash
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvatlas.errors import InvalidValue
from kvatlas.identity import DEFAULT_TENANT
from kvatlas.validation import describe_invalid
from kvatlas_simulator.lab.requests import CONTENT_IDS, Identity, LabRequest, Workload

MOONCAKE_BLOCK_TOKENS = 512
LOG_BLOCK_TOKENS = 64
BYTES_PER_TOKEN = 4
MAX_TOKENS = 1 << 24
MAX_LINE_BYTES = 64 << 20

_Tokens: TypeAlias = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _MooncakeLine(_Line):
    timestamp: Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
    input_length: _Tokens
    output_length: Annotated[int, Field(ge=0, le=MAX_TOKENS)]
    hash_ids: list[Annotated[int, Field(ge=0, lt=CONTENT_IDS)]]
    block_tokens: _Tokens | None = None
    tenant: Annotated[int, Field(ge=0)] | None = None


class _Usage(_Line):
    completion_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class _LogLine(_Line):
    timestamp: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] | AwareDatetime
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[Annotated[int, Field(ge=0, lt=1 << 32)]] | None = None
    usage: _Usage | None = None
    max_tokens: _Tokens | None = None
    model: str | None = None
    user: str = DEFAULT_TENANT


_MOONCAKE = TypeAdapter(_MooncakeLine)
_LOG = TypeAdapter(_LogLine)


def read_trace(path: Path) -> Workload:
    """The requests of a trace, by arrival. Raises InvalidValue, whose message names the file, line and field, for
    anything else."""
    numbered = [(number, line) for number, line in enumerate(_lines(path), 1) if line.strip()]
    if not numbered:
        raise InvalidValue(f"{path}: no requests; expected JSON lines")
    mooncake = b'"hash_ids"' in numbered[0][1]
    builder = _TraceBuilder(None if mooncake else LOG_BLOCK_TOKENS)
    for number, line in numbered:
        try:
            if mooncake:
                builder.add_mooncake(_MOONCAKE.validate_json(line))
            else:
                builder.add_log(_LOG.validate_json(line))
        except ValidationError as error:
            raise InvalidValue(f"{path}, line {number}: {describe_invalid(error, 'the line')}") from error
        except InvalidValue as error:
            raise InvalidValue(f"{path}, line {number}: {error}") from error
    return builder.build(path.name)


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file. Raises InvalidValue for a damaged gzip file, or OSError for one that can't be read."""
    with path.open("rb") as probe:
        zipped = probe.read(2) == b"\x1f\x8b"
    with gzip.open(path) if zipped else path.open("rb") as file:
        try:
            while line := file.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise InvalidValue(f"{path}: a line of more than {MAX_LINE_BYTES >> 20} MiB; expected JSON lines")
                yield line
        except (EOFError, gzip.BadGzipFile) as error:
            raise InvalidValue(f"{path}: damaged gzip file ({error})") from error


class _TraceBuilder:
    def __init__(self, block_tokens: int | None) -> None:
        """`block_tokens` None: the lines give it."""
        self._told_block_tokens = block_tokens
        self._requests: list[LabRequest] = []
        self._own = count(CONTENT_IDS)
        self._content_ids: dict[int, int] = {}
        self._sessions: dict[int, int] = {}
        """Sessions by the last full block of the prompt that first had it: a later prompt that contains this block continues
        the session."""
        self._seen: set[int] = set()

    @property
    def _block_tokens(self) -> int:
        assert self._told_block_tokens is not None, "the first line says it"
        return self._told_block_tokens

    def add_mooncake(self, line: _MooncakeLine) -> None:
        size = line.block_tokens or MOONCAKE_BLOCK_TOKENS
        if size != (self._told_block_tokens or size):
            raise InvalidValue(f"block_tokens is {size}; expected {self._told_block_tokens}, as in the first line")
        self._told_block_tokens, full = size, line.input_length // size
        needed = full if line.block_tokens else -(-line.input_length // size)
        if len(line.hash_ids) != needed:
            raise InvalidValue(
                f"{len(line.hash_ids)} hash_ids for an input_length of {line.input_length}; expected {needed}, one for each "
                f"{size} tokens"
            )
        identity = Identity() if line.tenant is None else Identity(tenant=str(line.tenant))
        self._add(line.timestamp * 1e3, line.input_length, line.output_length, line.hash_ids[:full], identity)

    def add_log(self, line: _LogLine) -> None:
        hashes, tokens = self._hash_prompt(line)
        output = line.usage.completion_tokens if line.usage is not None else line.max_tokens
        if output is None:
            raise InvalidValue("neither usage.completion_tokens nor max_tokens; expected the answer's length")
        when = line.timestamp.timestamp() if isinstance(line.timestamp, datetime) else line.timestamp
        shared = [self._content_ids.setdefault(value, len(self._content_ids)) for value in hashes]
        self._add(when * 1e6, tokens, output, shared, Identity(line.model or None, line.user or DEFAULT_TENANT))

    def _hash_prompt(self, line: _LogLine) -> tuple[list[int], int]:
        """One hash for each full block of the prompt, and the number of tokens."""
        if (line.prompt is None) == (line.messages is None):
            raise InvalidValue("expected either prompt or messages")
        if isinstance(line.prompt, list):
            packed, each = b"".join(token.to_bytes(4, "little") for token in line.prompt), 4
        else:
            text = line.prompt if line.prompt is not None else json.dumps(line.messages, ensure_ascii=False)[1:-1]
            packed, each = text.encode(errors="replace"), BYTES_PER_TOKEN
        tokens = -(-len(packed) // each)
        if not 1 <= tokens <= MAX_TOKENS:
            raise InvalidValue(f"a prompt of {tokens} tokens; expected 1 to {MAX_TOKENS}")
        size = each * self._block_tokens
        ends = range(size, tokens // self._block_tokens * size + 1, size)
        return [xxhash.xxh3_64_intdigest(packed[end - size : end]) for end in ends], tokens

    def _add(
        self, arrival_us: float, input_tokens: int, output_tokens: int, shared: list[int], identity: Identity
    ) -> None:
        number, output = len(self._requests), max(1, output_tokens)
        blocks = -(-(input_tokens + output) // self._block_tokens)
        contents = (*shared, *(next(self._own) for _ in range(blocks - len(shared))))
        session = next((self._sessions[one] for one in reversed(shared) if one in self._sessions), number)
        if shared and shared[-1] not in self._seen:
            self._sessions[shared[-1]] = session
        self._seen.update(shared)
        self._requests.append(LabRequest(number, arrival_us, input_tokens, output, contents, session, identity))

    def build(self, name: str) -> Workload:
        requests = sorted(self._requests, key=lambda request: request.arrival_us)
        first_us = requests[0].arrival_us
        times = sorted({request.arrival_us for request in requests})
        gaps = sorted(after - before for before, after in pairwise(times))
        # several requests at each time: the clock is coarse, and its tick is the usual gap
        coarse = gaps and len(requests) > 3 * len(times)
        return Workload(
            name,
            self._block_tokens,
            [
                LabRequest(
                    i, r.arrival_us - first_us, r.input_tokens, r.output_tokens, r.contents, r.session, r.identity
                )
                for i, r in enumerate(requests)
            ],
            gaps[len(gaps) // 2] if coarse else 0.0,
        )
