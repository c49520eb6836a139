"""How a request names the worker from which its engine is to fetch KV: in fields of its body, or in llm-d's header.

Sources: vLLM's OffloadingConnector (`kv_offload/tiering/p2p`: `remote_kv_source`), the envelope of KV hints that vLLM 0.30
accepts (`kv_hints/protocol.py`) with the action `kv.fetch` 1.0 of KVCR and Dynamo, SGLang's field of the same name and form,
and llm-d-router v0.9.0 (`pkg/common/routing`: `x-kv-cache-source-host-port`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from kvatlas.fleet.records import EngineEndpoint, KvConnector

_PARAMS = "kv_transfer_params"


@dataclass(frozen=True, slots=True)
class Fetch:
    """One fetch for a request: `tokens` tokens of its prompt, from `source`. `block_hashes`: the source's own hashes of the
    prompt's blocks, from the first one on, if its connector requests blocks by them."""

    source: EngineEndpoint
    tokens: int
    block_hashes: Sequence[int] = ()

    @property
    def needs_hashes(self) -> bool:
        """True if the connector requests blocks by the source's own hashes."""
        return self.source.kv_connector is KvConnector.KVCR

    def fields(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields to add to a request's body, or to replace in it; none if the engine finds the source on its own. Each
        attempt needs fields of its own."""
        match self.source.kv_connector:
            case KvConnector.P2P:
                kept = body.get(_PARAMS)
                source = {"kv_request_id": uuid4().hex, "remote_host": self._host, "remote_port": self.source.kv_port}
                return {_PARAMS: {**(kept if isinstance(kept, dict) else {}), "remote_kv_source": source}}
            case KvConnector.KVCR if self.block_hashes:
                endpoint = f"tcp://{self._host}:{self.source.kv_port}"
                action = {
                    "action_id": "fetch",
                    "action_type": "kv.fetch",
                    "action_version": "1.0",
                    "payload": {"source_control_endpoint": endpoint, "block_hashes": list(self.block_hashes)},
                }
                return {"kv_hints": {"protocol_version": "0.1", "message_id": uuid4().hex, "actions": [action]}}
            case _:
                return {}

    @property
    def _host(self) -> str:
        host = urlsplit(self.source.url).hostname or ""
        return f"[{host}]" if ":" in host else host
