"""The protocols by which two engines share a request, and the fields of a request body that belong to them."""

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineKind

_PARAMS = "kv_transfer_params"
WITHHELD = frozenset(
    {
        _PARAMS,
        "bootstrap_host",
        "bootstrap_pair_key",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "decode_tp_size",
        "disagg_prefill_dp_rank",
        "disaggregated_params",
        "ec_transfer_params",
        "encoder_urls",
        "kv_hint",
        "kv_hints",
        "need_wait_for_mm_inputs",
        "num_items_assigned",
        "routed_dp_rank",
    }
)
"""Fields of vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM that determine where an engine reads KV or embeddings from, or which
of its ranks answers."""
WITHHELD_HEADERS = frozenset(
    {
        "x-body-compressed",
        "x-data-parallel-host-port",
        "x-data-parallel-rank",
        "x-encoder-hosts-ports",
        "x-kv-cache-source-host-port",
        "x-prefiller-host-port",
        *(
            f"x-override-{name}"
            for name in (
                "bootstrap-host",
                "bootstrap-port",
                "bootstrap-room",
                "conversation-id",
                "disagg-prefill-dp-rank",
                "priority",
                "rid",
                "routed-dp-rank",
            )
        ),
    }
)
"""Headers with the same effect: those of llm-d's routing sidecars, and those with which SGLang overrides a body's
fields."""
_CONTAINERS = frozenset({"extra_args", "sampling_params", "vllm_xargs"})
"""Fields whose nested fields vLLM treats in the same way: all of them end up in `SamplingParams.extra_args`."""
_CHANGED = WITHHELD | _CONTAINERS
_PASSING_PARAM = "lmcache."
"""Prefix of the names of parameters that LMCache reads as hints, such as tags."""


class NotForClients(InvalidValue):
    """A body that can't be changed contains a field that must be withheld from engines."""


class TransferProtocol(Enum):
    """`KV_TRANSFER_PARAMS`: vLLM (NixlConnector and others) computes the prompt first, and its answer says where the KV
    is. `BOOTSTRAP`: SGLang gets both requests at the same time, and the engines meet in a room of the prefill server's
    bootstrap server."""

    KV_TRANSFER_PARAMS = "kv_transfer_params"
    BOOTSTRAP = "bootstrap"

    @classmethod
    def of(cls, kind: EngineKind) -> "TransferProtocol | None":
        """The protocol of an engine kind; None if it is unknown."""
        return _PROTOCOLS.get(kind)


_PROTOCOLS = {
    EngineKind.VLLM: TransferProtocol.KV_TRANSFER_PARAMS,
    EngineKind.LMCACHE: TransferProtocol.KV_TRANSFER_PARAMS,
    EngineKind.MOCK: TransferProtocol.KV_TRANSFER_PARAMS,
    EngineKind.SGLANG: TransferProtocol.BOOTSTRAP,
}


def withdraw_transfer_fields(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields to replace in a client's body. Only the router may say where an engine reads KV from: a client that could say
    so would be able to read other clients' prompts, and to choose the hosts that an engine connects to."""
    withdrawn: dict[str, Any] = {}
    for name in _CHANGED & body.keys():
        value = body[name]
        kept = _without_withheld(value) if name in _CONTAINERS else _passing(value) if name == _PARAMS else None
        if kept != value:
            withdrawn[name] = kept
    return withdrawn


def _passing(params: Any) -> Any:
    if not isinstance(params, dict):
        return None
    return {name: value for name, value in params.items() if name.startswith(_PASSING_PARAM)} or None


def _without_withheld(value: Any) -> Any:
    """Remove withheld fields from a container, or from a list of containers: SGLang accepts one for each prompt."""
    if isinstance(value, list):
        return [_without_withheld(one) for one in value]
    if isinstance(value, dict) and (withdrawn := withdraw_transfer_fields(value)):
        return {name: field for name, field in {**value, **withdrawn}.items() if field is not None}
    return value


def replace_fields(decoded: Mapping[str, Any], body: bytes, fields: Mapping[str, Any]) -> bytes:
    """The JSON object `body`, already `decoded`, with these fields added or replaced. A long body is only serialized
    again if a field is replaced."""
    if not fields:
        return body
    if any(name in decoded for name in fields):
        return json.dumps({**decoded, **fields}).encode()
    at = body.index(b"{") + 1
    return json.dumps(fields).encode()[:-1] + b"," + body[at:]
