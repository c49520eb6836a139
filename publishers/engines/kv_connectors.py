"""Determines from an engine's configuration how it fetches KV from other engines (pure).

vLLM     /server_info?config_format=json (development server only): `kv_transfer_config` of an OffloadingConnector, also
         inside a MultiConnector, with a `p2p` tier or one that takes router hints (KVCR)
SGLang   /server_info: `hicache_storage_backend` kvcr, and its `hicache_storage_backend_extra_config`
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.blocks.tiers import Tier, parse_tier
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import KvConnector

P2P_PORT = 5710
"""vLLM's default, VLLM_P2P_SIDE_CHANNEL_PORT."""


@dataclass(frozen=True, slots=True)
class FoundConnector:
    """`port`: the port at which others fetch from the first data-parallel rank; None: unknown. If `tiers` is empty, the
    connector's usual tiers apply."""

    connector: KvConnector
    port: int | None = None
    tiers: tuple[Tier, ...] = ()


def vllm_connector(server_info: Any) -> FoundConnector | None:
    """The connector that vLLM's server info describes; None if none can fetch the blocks that a request names."""
    config = _get(_get(server_info, "vllm_config"), "kv_transfer_config")
    for extra in _offloading_configs(config):
        for tier in _list(_get(extra, "secondary_tiers")):
            if _get(tier, "type") == "p2p":
                return FoundConnector(KvConnector.P2P, _port(_get(tier, "port")) or P2P_PORT, _tiers(tier))
            if _get(tier, "type") == "kvcr" or "router_hint" in _list(_get(tier, "router_capabilities")):
                ports = _list(_get(tier, "control_ports")) or [_get(tier, "control_port")]
                return FoundConnector(KvConnector.KVCR, _port(ports[0]), _tiers(tier))
    return None


def sglang_connector(info: Mapping[str, Any]) -> FoundConnector | None:
    """The connector that SGLang's server info describes."""
    if info.get("hicache_storage_backend") != "kvcr":
        return None
    extra = info.get("hicache_storage_backend_extra_config")
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except (ValueError, RecursionError):
            extra = None
    return FoundConnector(KvConnector.KVCR, _port(_get(extra, "control_port")))


def _offloading_configs(config: Any) -> Iterator[Any]:
    extra = _get(config, "kv_connector_extra_config")
    match _get(config, "kv_connector"):
        case "OffloadingConnector":
            yield extra
        case "MultiConnector":
            for one in _list(_get(extra, "connectors")):
                yield from _offloading_configs(one)


def _tiers(tier: Any) -> tuple[Tier, ...]:
    try:
        return tuple(parse_tier(name) for name in _list(_get(tier, "tiers")))
    except InvalidValue:
        return ()


def _port(value: Any) -> int | None:
    number = int(value) if isinstance(value, str) and value.isdigit() else value
    return number if type(number) is int and 0 < number < 65_536 else None


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
