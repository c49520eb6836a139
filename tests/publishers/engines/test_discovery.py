"""Discovers over HTTP what running engines offer."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvatlas.blocks.tiers import Tier
from kvatlas.engine_access import EngineAccess
from kvatlas.errors import Unreachable
from kvatlas.fleet.records import EngineKind, KvConnector, Role
from kvatlas_publishers.engines.discovery import (
    EventSource,
    discover,
    resolve_endpoint,
    sglang_offer,
    shift_port,
    vllm_offer,
)
from kvatlas_publishers.engines.kv_connectors import FoundConnector
from tests.certificates import Authority
from tests.publishers.engines.engine_http import engine_http
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio

PAGE = """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="1",num_gpu_blocks="100"} 1.0
"""


async def test_a_running_engine_is_asked_for_everything() -> None:
    async with running_engine(block_size=8, kv_connector="p2p") as (addresses, _):
        offer = await discover(addresses.base_url)
    port = urlsplit(addresses.base_url).port
    assert offer.connector == FoundConnector(KvConnector.P2P, port, (Tier.HBM, Tier.CPU_DRAM))
    assert (offer.kind, offer.model_id, offer.block_size) == (EngineKind.VLLM, "mock-model", 8)
    assert not offer.notes
    assert offer.sources == [EventSource(addresses.endpoint, addresses.replay_endpoint)]


async def test_what_is_known_already_is_not_asked() -> None:
    async with running_engine() as (addresses, _):
        offer = await discover(addresses.base_url, model_id="m", kind=EngineKind.MOCK)
        assert (offer.kind, offer.model_id, len(offer.sources)) == (EngineKind.MOCK, "m", 1)
        offer = await discover(addresses.base_url, events=False)
        assert (offer.model_id, offer.block_size, offer.sources) == ("mock-model", 4, ())


async def test_an_engine_without_events_gets_a_note_that_says_what_to_do() -> None:
    async with running_engine(events=False) as (addresses, _):
        offer = await discover(addresses.base_url)
    assert (offer.sources, offer.ranks, offer.block_size) == ([], (None,), 4)
    (note,) = offer.notes
    assert "publishes no KV events" in note and "--kv-events-config" in note


async def test_a_model_that_the_engine_does_not_list_gets_a_note() -> None:
    async with running_engine() as (addresses, _):
        offer = await discover(addresses.base_url, model_id="other")
    assert offer.model_id == "other"
    assert offer.notes == ["it lists mock-model, not other: requests that name other may fail there"]


async def test_an_engine_that_does_not_answer_is_one_line() -> None:
    with pytest.raises(
        Unreachable,
        match=r"engine at http://127\.0\.0\.1:1/v1/models: .*; start it first, or give endpoint= and model=",
    ):
        await discover("http://127.0.0.1:1")


async def test_a_server_of_kvatlas_that_lists_no_models_is_no_engine() -> None:
    with engine_http() as engine:
        engine.pages = {"/version": (200, '{"version": "0.1.0", "server": "kvatlas index-server"}')}
        with pytest.raises(
            Unreachable, match=r"is a kvatlas index-server, not an engine; give the engines' own addresses"
        ):
            await discover(engine.url, events=False)


async def test_an_engine_behind_a_key_is_discovered_with_it() -> None:
    with engine_http() as engine:
        engine.key = "sk-one"
        engine.pages = {"/v1/models": (200, '{"data": [{"id": "m"}]}'), "/metrics": (200, PAGE)}
        with pytest.raises(Unreachable, match="status 401; give the engine's API key with --engine-key-file"):
            await discover(engine.url, events=False)
        offer = await discover(engine.url, events=False, access=EngineAccess.parse("w1 sk-one"), worker_id="w1")
    assert (offer.model_id, offer.block_size) == ("m", 32)


async def test_an_engine_with_a_private_certificate_is_discovered(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with engine_http(authority.issue("localhost")) as engine:
        engine.pages = {"/v1/models": (200, '{"data": [{"id": "m"}]}')}
        url = engine.url.replace("127.0.0.1", "localhost")
        with pytest.raises(Unreachable, match="certificate"):
            await discover(url, events=False)
        offer = await discover(url, events=False, access=EngineAccess(ca_file=authority.file))
    assert offer.model_id == "m"


VLLM_SOURCES: dict[str, dict[str, Any]] = {
    "1": {"enable_kv_cache_events": True, "endpoint": "tcp://10.0.0.2:7001", "replay_endpoint": None, "topic": "kv"},
    "0": {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://*:7000",
        "replay_endpoint": "tcp://*:7100",
        "topic": "kv",
    },
}


@pytest.mark.parametrize(
    "listed",
    [VLLM_SOURCES, [{"data_parallel_rank": int(rank), **source} for rank, source in VLLM_SOURCES.items()]],
    ids=["map", "array"],
)
def test_vllm_ranks_have_the_listed_sources_in_each_form(listed: Any) -> None:
    offer = vllm_offer(listed, PAGE, "m", "host")
    assert (offer.block_size, offer.assumed) == (32, False)
    assert offer.sources == [
        EventSource("tcp://host:7000", "tcp://host:7100", "kv", 0),
        EventSource("tcp://10.0.0.2:7001", None, "kv", 1),
    ]


def test_vllm_ranks_that_are_not_listed_have_the_usual_ports() -> None:
    assert vllm_offer(None, PAGE, "m", "host").sources == [
        EventSource("tcp://host:5557", "tcp://host:5558", "", 0),
        EventSource("tcp://host:5558", "tcp://host:5559", "", 1),
    ]
    assert vllm_offer(None, "", "m", "host").sources == [EventSource("tcp://host:5557", "tcp://host:5558")]
    nothing: tuple[Any, ...] = ({}, [], ["?", {"data_parallel_rank": "?"}])
    for empty in nothing:
        assert vllm_offer(empty, PAGE, "m", "host").sources == []


def test_prefix_caching_that_is_off_gets_a_note() -> None:
    (note,) = vllm_offer({}, PAGE.replace('"True"', '"False"'), "m", "host").notes
    assert "prefix caching is off" in note


def test_sglang_sources_come_from_its_server_arguments() -> None:
    config = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "topic": "kv"}
    info: dict[str, Any] = {"page_size": 64, "kv_events_config": json.dumps(config), "dp_size": 1}
    offer = sglang_offer({**info, "speculative_algorithm": "FROZEN_KV_MTP"}, "m", "10.1.1.1")
    assert offer.sources == [EventSource("tcp://10.1.1.1:5557", "tcp://10.1.1.1:5657", "kv")]
    assert (offer.block_size, offer.eagle) == (64, True)
    ranks = sglang_offer({**info, "dp_size": 2}, "m", "h").sources
    assert [(one.rank, one.endpoint) for one in ranks] == [(0, "tcp://h:5557"), (1, "tcp://h:5558")]
    eventless = sglang_offer({"dp_size": 2}, "m", "h")
    assert (list(eventless.sources), list(eventless.ranks)) == ([], [0, 1])
    assert sglang_offer({}, "m", "h").sources == sglang_offer({"kv_events_config": None}, "m", "h").sources == []
    (note,) = sglang_offer({"disable_radix_cache": True}, "m", "h").notes
    assert "radix cache is off" in note


def test_sglang_ports_of_the_systems_choice_are_the_listed_ones() -> None:
    config = {"publisher": "zmq", "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
    listed = {
        "dp_rank": 1,
        "endpoint": "tcp://127.0.0.1:4711",
        "replay_endpoint": "tcp://127.0.0.1:4712",
        "topic": "kv",
    }
    info = {"kv_events_config": json.dumps(config), "dp_size": 2, "kv_event_sources": [listed, {"dp_rank": 0}, "?"]}
    offer = sglang_offer(info, "m", "10.1.1.1")
    assert offer.sources == [EventSource("tcp://10.1.1.1:4711", "tcp://10.1.1.1:4712", "kv", 1)]
    (note,) = offer.notes
    assert "rank 0" in note and "--grpc-port" in note


@pytest.mark.parametrize(
    ("mode", "port", "expected"),
    [
        ("prefill", 9001, (Role.PREFILL, 9001)),
        ("prefill", "?", (Role.PREFILL, None)),
        ("decode", 9001, (Role.DECODE, None)),
        ("null", 9001, (Role.BOTH, None)),
        (None, None, (Role.BOTH, None)),
    ],
)
def test_an_sglang_server_says_its_part_of_a_disaggregated_fleet(
    mode: object, port: object, expected: tuple[Role, int | None]
) -> None:
    offer = sglang_offer({"disaggregation_mode": mode, "disaggregation_bootstrap_port": port}, "m", "h")
    assert (offer.role, offer.bootstrap_port) == expected


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:1", "h", "tcp://h:1"),
        ("tcp://[::]:1", "::1", "tcp://[::1]:1"),
        ("tcp://127.0.0.1:1", "h", "tcp://h:1"),
        ("tcp://127.0.0.1:1", "127.0.0.1", "tcp://127.0.0.1:1"),
        ("tcp://10.0.0.1:1", "h", "tcp://10.0.0.1:1"),
        ("ipc:///tmp/x", "h", "ipc:///tmp/x"),
    ],
)
def test_an_engines_own_address_is_that_of_its_http_server(endpoint: str, host: str, expected: str) -> None:
    assert resolve_endpoint(endpoint, host) == expected
    assert shift_port(shift_port(expected, 3), -3) == expected
