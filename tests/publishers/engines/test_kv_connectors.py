"""The connector that an engine reports."""

from typing import Any

import pytest

from kvatlas.blocks.tiers import Tier
from kvatlas.fleet.records import KvConnector
from kvatlas_publishers.engines.kv_connectors import FoundConnector, sglang_connector, vllm_connector


def offloading(*tiers: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"secondary_tiers": list(tiers)}}


P2P = {"type": "p2p", "host": "10.0.0.7", "port": 7777}
NIXL = {"kv_connector": "NixlConnector"}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (offloading(P2P), FoundConnector(KvConnector.P2P, 7777)),
        (offloading({"type": "fs"}, {"type": "p2p"}), FoundConnector(KvConnector.P2P, 5710)),
        (
            offloading({**P2P, "tiers": ["gpu", "cpu"]}),
            FoundConnector(KvConnector.P2P, 7777, (Tier.HBM, Tier.CPU_DRAM)),
        ),
        (offloading({"type": "kvcr", "control_ports": [24000, 24001]}), FoundConnector(KvConnector.KVCR, 24000)),
        (
            offloading({"type": "x", "router_capabilities": ["router_hint"], "control_port": "23280"}),
            FoundConnector(KvConnector.KVCR, 23280),
        ),
        (
            {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [NIXL, offloading(P2P)]}},
            FoundConnector(KvConnector.P2P, 7777),
        ),
        (NIXL, None),
        (offloading({"type": "fs"}), None),
        (offloading({**P2P, "port": "none", "tiers": ["nowhere"]}), FoundConnector(KvConnector.P2P, 5710)),
        (None, None),
        ("VllmConfig(...)", None),
        ({"kv_connector": "MultiConnector", "kv_connector_extra_config": 3}, None),
    ],
)
def test_of_vllm(config: Any, found: FoundConnector | None) -> None:
    assert vllm_connector({"vllm_config": {"kv_transfer_config": config}}) == found


@pytest.mark.parametrize("info", [None, [], {"vllm_config": "VllmConfig(...)"}])
def test_a_server_that_shows_no_configuration_has_none_that_is_known(info: Any) -> None:
    assert vllm_connector(info) is None


@pytest.mark.parametrize(
    ("info", "found"),
    [
        ({}, None),
        ({"hicache_storage_backend": "mooncake"}, None),
        ({"hicache_storage_backend": "kvcr"}, FoundConnector(KvConnector.KVCR)),
        (
            {"hicache_storage_backend": "kvcr", "hicache_storage_backend_extra_config": '{"control_port": 25000}'},
            FoundConnector(KvConnector.KVCR, 25000),
        ),
        (
            {"hicache_storage_backend": "kvcr", "hicache_storage_backend_extra_config": "[" * 100_000},
            FoundConnector(KvConnector.KVCR, None, ()),
        ),
        (
            {"hicache_storage_backend": "kvcr", "hicache_storage_backend_extra_config": "{"},
            FoundConnector(KvConnector.KVCR),
        ),
    ],
)
def test_of_sglang(info: dict[str, Any], found: FoundConnector | None) -> None:
    assert sglang_connector(info) == found
