"""The protocols by which two engines share a request, and the fields of a body that belong to them."""

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineKind

OF_A_TRANSFER = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank")
TRANSFER_FIELDS = frozenset({*OF_A_TRANSFER, "kv_transfer_params"})


class NotForClients(InvalidValue):
    """A body that is too large to be changed says from where an engine reads KV."""


class TransferProtocol(Enum):
    """`KV_TRANSFER_PARAMS`: vLLM's (NixlConnector and others): the prompt first; its answer says where the KV is.
    `BOOTSTRAP`: SGLang's: both requests at once; the engines meet in a room of the prefill server's bootstrap server."""

    KV_TRANSFER_PARAMS = "kv_transfer_params"
    BOOTSTRAP = "bootstrap"

    @classmethod
    def of(cls, kind: EngineKind) -> "TransferProtocol | None":
        """None for an engine whose protocol is not known here."""
        return _PROTOCOLS.get(kind)


_PROTOCOLS = {
    EngineKind.VLLM: TransferProtocol.KV_TRANSFER_PARAMS,
    EngineKind.LMCACHE: TransferProtocol.KV_TRANSFER_PARAMS,
    EngineKind.MOCK: TransferProtocol.KV_TRANSFER_PARAMS,
    EngineKind.SGLANG: TransferProtocol.BOOTSTRAP,
}


def withdraw_transfer_fields(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields to replace in a client's body: from where an engine reads KV is for the router to say, because whoever says it
    reads what other clients' prompts left there, and chooses the hosts that an engine connects to."""
    withdrawn: dict[str, Any] = {name: None for name in OF_A_TRANSFER if body.get(name) is not None}
    params = body.get("kv_transfer_params")
    if isinstance(params, dict) and (params.get("do_remote_prefill") or params.get("do_remote_decode")):
        withdrawn["kv_transfer_params"] = None
    return withdrawn


def replace_fields(decoded: Mapping[str, Any], body: bytes, fields: Mapping[str, Any]) -> bytes:
    """The JSON object `body`, which is `decoded`, with these fields added or replaced. A long one is only serialized again if
    a field is replaced."""
    if not fields:
        return body
    if any(name in decoded for name in fields):
        return json.dumps({**decoded, **fields}).encode()
    at = body.index(b"{") + 1
    return json.dumps(fields).encode()[:-1] + b"," + body[at:]
