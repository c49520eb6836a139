"""A feed of answered requests: hashes, sizes and times, no token ids. `kvatlas record` turns them into traces."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.request import SelectionResult
from router_client.learning.timings import Timings
from router_client.learning.token_counts import Usage
from router_client.prompt import Prompt
from router_client.prompt_chain import PromptChain

BLOCK_TOKENS = 64
"""Block size of the published hashes."""
MOST_WAITING = 4_096
"""Maximum number of lines that wait for a follower. Any more are dropped, and their number is reported."""


@dataclass(slots=True, eq=False)
class _Follower:
    lines: "asyncio.Queue[bytes | None]" = field(default_factory=lambda: asyncio.Queue(MOST_WAITING))
    dropped: int = 0


class RequestFeed:
    """Publishes each answered request to all followers. Costs nothing without followers."""

    def __init__(self) -> None:
        self._followers: set[_Follower] = set()
        self._closed = False

    @property
    def followed(self) -> bool:
        return bool(self._followers)

    def publish(self, request: dict[str, Any]) -> None:
        """Publish a request. Never waits."""
        line = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        for follower in self._followers:
            if follower.lines.full():
                follower.dropped += 1
            else:
                follower.lines.put_nowait(line)

    async def follow(self) -> AsyncIterator[bytes]:
        """Yield JSON lines from now on, until the feed is closed. The first line is empty, to show the reader that it is
        connected."""
        if self._closed:
            return
        follower = _Follower()
        self._followers.add(follower)
        try:
            yield b"\n"
            while (line := await follower.lines.get()) is not None:
                yield line
                if follower.dropped:
                    dropped, follower.dropped = follower.dropped, 0
                    yield b'{"dropped":%d}\n' % dropped
        finally:
            self._followers.discard(follower)

    def close(self) -> None:
        """End all followers."""
        self._closed = True
        for follower in self._followers:
            while follower.lines.full():
                follower.lines.get_nowait()
            follower.lines.put_nowait(None)


def describe_request(
    prompt: Prompt, result: SelectionResult, usage: Usage, timings: Timings | None, arrived_us: int
) -> dict[str, Any]:
    """A request as a JSON object. `at_us`: microseconds since 1970. `hashes`: packed sequence hashes of the prompt's
    blocks of BLOCK_TOKENS in base64; empty if unknown. The engine's load and the times are omitted if they don't belong
    together."""
    told: dict[str, Any] = {
        "at_us": arrived_us,
        "model": prompt.scope.model_id,
        "scope": prompt.scope.scope_id.hex(),
        "input_length": usage.prompt_tokens,
        "output_length": usage.completion_tokens,
        "block_tokens": BLOCK_TOKENS,
        "hashes": b64encode(_hashes(prompt)).decode(),
    }
    if usage.cached_tokens is not None:
        told["cached_tokens"] = usage.cached_tokens
    plan = result.plan
    if timings is not None and plan is not None and result.load_known and not plan.load.waiting_requests:
        moved = any(not piece.at_hand for piece in plan.pieces)
        if timings.ttft_us is not None and not moved:
            told["ttft_ms"] = round(timings.ttft_us / 1e3, 3)
        if timings.tpot_us is not None:
            told["tpot_ms"] = round(timings.tpot_us / 1e3, 3)
        told["queued_tokens"] = plan.load.queued_prefill_tokens
        told["running_requests"] = plan.load.running_decodes
        told["kv_tokens"] = plan.load.kv_tokens
    return told


def _hashes(prompt: Prompt) -> bytes:
    if prompt.tokens is not None:
        return b"" if prompt.extra_keys else PromptChain(prompt, BLOCK_TOKENS).all_hashes()
    size = prompt.block_size or BLOCK_TOKENS
    if BLOCK_TOKENS % size:
        return b""
    step, packed = BLOCK_TOKENS // size, PromptChain(prompt, size).all_hashes()
    ends = range(step * HASH_BYTES, len(packed) + 1, step * HASH_BYTES)
    return b"".join(packed[end - HASH_BYTES : end] for end in ends)
