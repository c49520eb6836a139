"""vLLM's request forms. The prefill request asks the engine to generate one token and to keep the KV. The
`kv_transfer_params` of its answer go into the decode request, whose engine fetches the KV.

Source: vLLM 0.33, `NixlConnectorScheduler` (`request_finished`, `get_num_new_matched_tokens`) and the proxy of its own tests
(`tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`).
"""

import json
from collections.abc import Mapping
from typing import Any

from kvatlas.runtime.json_text import decode

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

_ONLY_FOR_ANSWERS = ("stream_options", "min_tokens", "min_completion_tokens")


def prefill_body(body: Mapping[str, Any], fetch: Mapping[str, Any]) -> bytes:
    """The prefill request: one token, not streamed. `fetch`: fields that name a source of KV. vLLM's MultiConnector passes to
    each of its connectors the params that the connector knows."""
    kept = {name: value for name, value in body.items() if name not in _ONLY_FOR_ANSWERS}
    one = {"max_completion_tokens": 1} if "max_completion_tokens" in body else {}
    params = {**(fetch.get("kv_transfer_params") or {}), **ASK}
    asked = {**kept, **one, **fetch, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
    return json.dumps(asked).encode()


def read_params(answer: bytes) -> Mapping[str, Any] | None:
    """The prefill engine's params that say where the KV is; None if it has no connector, or nothing to fetch."""
    try:
        params = decode(answer).get("kv_transfer_params")
    except (ValueError, AttributeError):
        return None
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None
