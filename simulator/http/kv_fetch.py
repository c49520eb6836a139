"""Fetches KV from the engine that a request names.

Request forms are those of real engines: vLLM's `kv_transfer_params.remote_kv_source` (OffloadingConnector with a p2p tier), and
the action `kv.fetch` in `kv_hints` (KVCR). How the KV travels is the simulator's own: the reader calls the source's
`/kv_fetch`, which answers when the KV would have arrived; all readers share the source's bandwidth, and are served one after
another. As with real engines, both must hash blocks in the same way (the same `--seed`), and the prompt is computed if the
source does not hold the blocks, or does not answer.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvatlas.fleet.records import KvConnector
from kvatlas_simulator.cache.block_hash import BlockHasher, Namespace
from kvatlas_simulator.engine.loop import EngineLoop
from kvatlas_simulator.http.request_bodies import ChatRequest, CompletionRequest

ANSWER_S = 60.0
CONNECT_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Source:
    """If `hashes` is None, everything that the source holds may be fetched, otherwise only blocks with these hashes."""

    host: str
    port: int
    hashes: frozenset[int] | None = None


class KvFetches:
    """The fetches of one engine: those that it makes from others, and those that others make from it."""

    def __init__(
        self,
        engine: EngineLoop,
        connector: KvConnector | None,
        hasher: BlockHasher,
        us_per_token: float,
        speed_up: float,
    ) -> None:
        """`connector` None: the engine fetches nothing, and others fetch nothing from it. `us_per_token`: time to send a
        token's KV."""
        self._engine = engine
        self._connector = connector
        self._hasher = hasher
        self._s_per_token = us_per_token / 1e6 / speed_up
        self._link = anyio.Lock()
        self.queried_tokens = 0
        self.fetched_tokens = 0

    async def fetch(self, body: CompletionRequest | ChatRequest, namespace: Namespace) -> int:
        """Fetch the KV that the request names. Returns the number of tokens at the prompt's start that are then held; 0
        if nothing arrived."""
        source = self._source_of(body)
        if source is None:
            return 0
        held = self._engine.core.cache.match(body.token_ids, namespace).hit_tokens
        wanted = (
            len(body.token_ids)
            if source.hashes is None
            else self._covered_tokens(body.token_ids, namespace, source.hashes)
        )
        self.queried_tokens += max(0, len(body.token_ids) - held)
        asked = {
            "token_ids": list(body.token_ids[:wanted]),
            "adapter": namespace.adapter,
            "cache_salt": namespace.cache_salt,
            "held": held,
            "hash": self._first_hash(body.token_ids, namespace),
        }
        try:
            timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
            async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
                answer = await client.post(f"http://{source.host}:{source.port}/kv_fetch", json=asked)
            tokens = int(answer.raise_for_status().json()["tokens"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
            _log.info("no KV from %s:%d (%s); computing the prompt", source.host, source.port, error)
            return 0
        self.fetched_tokens += max(0, tokens - held)
        return tokens

    async def serve(self, request: Request) -> Response:
        """Serve `POST /kv_fetch`: another engine fetches the part of a prompt that is held here, beyond what that engine holds
        itself."""
        if self._connector is None:
            return JSONResponse({"error": "no connector"}, status_code=404)
        asked = await request.json()
        tokens, namespace = tuple(asked["token_ids"]), Namespace(asked["adapter"], asked["cache_salt"])
        if asked["hash"] != self._first_hash(tokens, namespace):
            return JSONResponse({"tokens": 0})
        reach = self._engine.core.cache.match((*tokens, 0), namespace).hit_tokens  # the last token is not requested
        async with self._link:
            await anyio.sleep(max(0, reach - asked["held"]) * self._s_per_token)
        return JSONResponse({"tokens": reach})

    def _source_of(self, body: CompletionRequest | ChatRequest) -> _Source | None:
        """The source that the request names, if this engine's connector supports it."""
        if self._connector is KvConnector.P2P:
            named = (body.kv_transfer_params or {}).get("remote_kv_source") or {}
            host, port = named.get("remote_host"), named.get("remote_port")
            return _Source(str(host), int(port)) if host and port and named.get("kv_request_id") else None
        if self._connector is KvConnector.KVCR:
            for action in (body.kv_hints or {}).get("actions") or []:
                if (action.get("action_type"), action.get("action_version")) == ("kv.fetch", "1.0"):
                    return _fetch_action(action.get("payload") or {})
        return None

    def _covered_tokens(self, tokens: Sequence[int], namespace: Namespace, hashes: frozenset[int]) -> int:
        size, parent, end = self._engine.core.cache.block_size, None, 0
        while end + size <= len(tokens):
            parent = self._hasher(parent, tokens[end : end + size], namespace)
            if parent not in hashes:
                break
            end += size
        return end

    def _first_hash(self, tokens: Sequence[int], namespace: Namespace) -> int:
        return self._hasher(None, tokens[: self._engine.core.cache.block_size], namespace)


def _fetch_action(payload: dict[str, Any]) -> _Source | None:
    parts = urlsplit(str(payload.get("source_control_endpoint")))
    hashes = frozenset(payload.get("block_hashes") or ())
    return _Source(parts.hostname, parts.port, hashes) if parts.hostname and parts.port and hashes else None


def connector_config(connector: KvConnector | None, url: str) -> dict[str, Any] | None:
    """The configuration, as in vLLM's `--kv-transfer-config` except for `tiers`: the simulator serves others from all of
    its tiers, at its HTTP server `url`."""
    if connector is None:
        return None
    parts = urlsplit(url)
    tier: dict[str, Any] = {
        "type": connector.value,
        "host": parts.hostname,
        "port": parts.port,
        "tiers": ["hbm", "cpu_dram"],
    }
    if connector is KvConnector.KVCR:
        tier["control_ports"] = [tier.pop("port")]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]},
    }
