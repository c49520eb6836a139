"""Separate prefill and decode, like vLLM's NixlConnector and SGLang: the KV that one simulated engine hands to another.

The forms of requests and answers are those of the real engines (vLLM 0.33 `kv_transfer_params`, SGLang 0.5.23
`bootstrap_*`). The transfer itself is the simulator's own: the decode engine calls `/kv_transfer` of the prefill engine,
which answers when the KV would have arrived. SGLang's bootstrap server is the prefill engine's HTTP server.
"""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from uuid import uuid4

import anyio
import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas_simulator.engine.loop import EngineLoop
from kvatlas_simulator.http.request_bodies import ChatRequest, CompletionRequest

WAIT_S = 60.0
"""How long engines wait for each other."""
HELD_S = 480.0
"""How long a prompt's KV is held for a partner that does not come, like vLLM's VLLM_NIXL_ABORT_REQUEST_TIMEOUT."""


class Disaggregation(StrEnum):
    """The engine's role. `VLLM`: prefill or decode, as each request asks."""

    NONE = "none"
    VLLM = "vllm"
    SGLANG_PREFILL = "sglang-prefill"
    SGLANG_DECODE = "sglang-decode"


class TransferFailed(KvatlasError):
    """The partner is unreachable, or does not hold the KV (any longer)."""


@dataclass(slots=True)
class Transfer:
    """This engine's part of a transfer. `received_tokens`: the tokens received from the partner. `room`: where it meets
    the partner."""

    received_tokens: int = 0
    holds: bool = False
    room: int | None = None


@dataclass(slots=True)
class _Held:
    """A prompt's KV, held for the partner. `request_id` None: the prompt is not computed yet. `fetched`: set once the
    partner has the KV, or will never get it."""

    request_id: str | None = None
    tokens: int = 0
    since: float = field(default_factory=time.monotonic)
    ready: anyio.Event = field(default_factory=anyio.Event)
    fetched: anyio.Event = field(default_factory=anyio.Event)
    failed: bool = False


class KvTransfers:
    """The transfers of one engine."""

    def __init__(self, engine: EngineLoop, mode: Disaggregation, us_per_token: float, speed_up: float) -> None:
        self._engine = engine
        self._mode = mode
        self._s_per_token = us_per_token / 1e6 / speed_up
        self._engine_id = uuid4().hex
        self._held: dict[str, _Held] = {}
        self._rooms: dict[int, _Held] = {}

    async def receive(self, body: CompletionRequest | ChatRequest) -> Transfer:
        """Receive what a request gets from its partner before it is computed. Raises InvalidValue for a request that this
        engine can't accept, or TransferFailed."""
        params = body.kv_transfer_params or {}
        if self._mode is Disaggregation.VLLM:
            if params.get("do_remote_prefill"):
                asked = {"request_id": params.get("remote_request_id")}
                return Transfer(await _fetch(params.get("remote_host"), params.get("remote_port"), asked))
            return Transfer(holds=bool(params.get("do_remote_decode")))
        if self._mode is Disaggregation.NONE:
            return Transfer()
        if body.bootstrap_room is None or body.n > 1:
            raise InvalidValue("Disaggregated request received without bootstrap room id")
        room = body.bootstrap_room
        if self._mode is Disaggregation.SGLANG_PREFILL:
            self._rooms.setdefault(room, _Held())
            return Transfer(holds=True, room=room)
        return Transfer(await _fetch(body.bootstrap_host, body.bootstrap_port, {"room": room}), room=room)

    async def hand_over(
        self, transfer: Transfer, request_id: str, tokens: int, address: tuple[str, int]
    ) -> dict[str, Any]:
        """Hand over a computed prompt; return the fields for its answer. `address`: the address at which the caller
        reached this engine. In a room, this waits for the partner, and raises TransferFailed if it does not come."""
        if not transfer.holds:
            return {}
        self._expire()
        if transfer.room is None:
            self._held[request_id] = held = _Held(request_id, tokens)
            held.ready.set()
            host, port = address
            return {
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "remote_block_ids": list(range(-(-tokens // self._engine.core.cache.block_size))),
                    "remote_engine_id": self._engine_id,
                    "remote_request_id": request_id,
                    "remote_host": host,
                    "remote_port": port,
                    "tp_size": 1,
                }
            }
        held = self._rooms[transfer.room]
        held.request_id, held.tokens = request_id, tokens
        held.ready.set()
        with anyio.move_on_after(WAIT_S):
            await held.fetched.wait()
            return {}
        raise TransferFailed(f"no decode engine came to room {transfer.room} within {WAIT_S:g} s")

    def end(self, transfer: Transfer) -> None:
        """End the transfer of a request, whether it succeeded or not. A partner that is still waiting in its room gets
        nothing."""
        if transfer.room is None or not transfer.holds:
            return
        held = self._rooms.pop(transfer.room, None)
        if held is not None and not held.fetched.is_set():
            self._give_up(held)

    async def serve(self, request: Request) -> Response:
        """`POST /kv_transfer`: a partner fetches a prompt's KV."""
        asked = await request.json()
        room = asked.get("room")
        held = self._held.pop(str(asked.get("request_id")), None)
        if room is not None:  # its prefill request may arrive a little later
            held = self._rooms.setdefault(room, _Held())
            with anyio.move_on_after(WAIT_S):
                await held.ready.wait()
            if not held.ready.is_set():
                self._rooms.pop(room, None)
        if held is None or held.failed or held.request_id is None or not self._engine.core.release(held.request_id):
            return JSONResponse({"error": "no such KV"}, status_code=404)
        await anyio.sleep(held.tokens * self._s_per_token)
        held.fetched.set()
        return JSONResponse({"tokens": held.tokens})

    def _give_up(self, held: _Held) -> None:
        held.failed = True
        if held.request_id is not None:
            self._engine.core.release(held.request_id)
        held.ready.set()
        held.fetched.set()

    def _expire(self) -> None:
        late = time.monotonic() - HELD_S
        for request_id in [id for id, held in self._held.items() if held.since < late]:
            self._give_up(self._held.pop(request_id))


async def _fetch(host: object, port: object, asked: dict[str, object]) -> int:
    """Fetch a prompt's KV. Returns the number of prompt tokens that it covers. Raises TransferFailed."""
    url = f"http://{host}:{port}/kv_transfer"
    try:
        async with httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as client:
            answer = await client.post(url, json=asked)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TransferFailed(f"KV transfer from {host}:{port} failed: {str(error) or type(error).__name__}") from error
    if answer.status_code != 200:
        raise TransferFailed(f"KV transfer from {host}:{port} failed: status {answer.status_code}")
    return int(answer.json()["tokens"])
