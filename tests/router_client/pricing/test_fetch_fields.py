"""The request formats that name a source, as in the engines' own source code."""

from dataclasses import replace
from typing import Any

import pytest

from kvatlas.fleet.records import EngineEndpoint, KvConnector
from router_client.pricing.fetch_fields import Fetch
from tests.router_client.pools import PEER, worker

SOURCE: EngineEndpoint = worker("s", **PEER).endpoint


def of(**changed: Any) -> EngineEndpoint:
    return SOURCE.model_copy(update=changed)


def test_vllms_p2p_tier_gets_host_port_and_an_id_for_each_try() -> None:
    fetch = Fetch(SOURCE, 320)
    first, second = (fetch.fields({"kv_transfer_params": {"lmcache.tag.user": "x"}}) for _ in range(2))
    params = first["kv_transfer_params"]
    assert params["lmcache.tag.user"] == "x"
    source = params["remote_kv_source"]
    assert (source["remote_host"], source["remote_port"]) == ("10.0.0.1", 5710)
    assert (
        source["kv_request_id"]
        and source["kv_request_id"] != second["kv_transfer_params"]["remote_kv_source"]["kv_request_id"]
    )


def test_an_ipv6_host_is_in_brackets() -> None:
    source = Fetch(of(base_url="http://[fd00::7]:8000"), 1).fields({})["kv_transfer_params"]["remote_kv_source"]
    assert source["remote_host"] == "[fd00::7]"


def test_kvcr_gets_one_fetch_action_with_the_sources_own_hashes() -> None:
    fetch = Fetch(of(kv_connector=KvConnector.KVCR), 320, [11, 22])
    assert fetch.needs_hashes
    hints = fetch.fields({})["kv_hints"]
    assert hints.pop("message_id")
    assert hints == {
        "protocol_version": "0.1",
        "actions": [
            {
                "action_id": "fetch",
                "action_type": "kv.fetch",
                "action_version": "1.0",
                "payload": {"source_control_endpoint": "tcp://10.0.0.1:5710", "block_hashes": [11, 22]},
            }
        ],
    }
    assert not replace(fetch, block_hashes=()).fields({})  # an envelope without hashes is refused


@pytest.mark.parametrize("connector", [KvConnector.LMCACHE, None])
def test_who_finds_its_source_by_itself_gets_no_field(connector: KvConnector | None) -> None:
    assert not Fetch(of(kv_connector=connector), 320).fields({"kv_transfer_params": None})
