"""Fleet and control records: round trip, defaults, and errors that name the wrong field."""

from typing import Any

import msgpack
import pytest

from kvatlas.bus.control import ControlOp, ControlReply, ControlRequest, GrantReply, GrantRequest
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import (
    EngineEndpoint,
    EngineKind,
    EngineState,
    FleetRecord,
    ForwardPassMetrics,
    Heartbeat,
    Liveness,
    Role,
    WorkerState,
    to_jsonable,
)

ENDPOINT = EngineEndpoint(
    id="w1",
    kind=EngineKind.VLLM,
    base_url="http://127.0.0.1:8000",
    model_id="m",
    tokenizer_id="t",
    labels={"zone": "a"},
    transfer_groups=("rack-1",),
    block_size=16,
)
LOAD = WorkerState(
    id="w1",
    hbm_capacity_bytes=80 << 30,
    hbm_used_bytes=1 << 30,
    running_decodes=3,
    queued_prefill_tokens=700,
    forward_pass=ForwardPassMetrics(requests_waiting=2, cache_usage=0.5, prefix_hit_rate=0.25),
    sampled_us=1,
)
RECORDS = [
    ENDPOINT,
    LOAD,
    Heartbeat(worker_id="w1", incarnation=(1 << 64) - 1, acked_seq=-1, state=EngineState.ASLEEP, endpoint=ENDPOINT),
    FleetRecord(endpoint=ENDPOINT, state=EngineState.UP, liveness=Liveness.ALIVE, load=LOAD, incarnation=5, heard_us=9),
    ControlRequest(op=ControlOp.SNAPSHOT, above=12),
    ControlReply(ok=True, worker_id="w1", incarnation=3, acked_seq=4, digest=[1, 2], status={"a": [1]}),
    GrantRequest(worker_id="w1", incarnation=3, snapshot_bytes=70_000),
    GrantReply(granted=False, retry_after_ms=250),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_round_trips(record: Any) -> None:
    assert type(record).unpack(record.pack()) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_fields_of_newer_versions_are_ignored(record: Any) -> None:
    newer = {**msgpack.unpackb(record.pack()), "field_of_tomorrow": [1]}
    assert type(record).unpack(msgpack.packb(newer)) == record


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        (ENDPOINT, "id", "a.b"),
        (ENDPOINT, "kind", "llama.cpp"),
        (ENDPOINT, "role", "draft"),
        (ENDPOINT, "block_size", 0),
        (ENDPOINT, "granularity", 0),
        (ENDPOINT, "tier_block_bytes", {"cpu_dram": 0}),
        (LOAD, "running_decodes", -1),
        (LOAD, "forward_pass", {"cache_usage": 1.5}),
        (LOAD, "forward_pass", {"prefix_hit_rate": -0.1}),
        (RECORDS[2], "incarnation", 1 << 63 << 1),
        (RECORDS[2], "acked_seq", -2),
        (RECORDS[2], "state", "fine"),
        (RECORDS[4], "op", "reboot"),
    ],
)
def test_the_error_names_the_wrong_field_in_one_line(record: Any, field: str, value: object) -> None:
    fields = {**record.model_dump(mode="json"), field: value}
    if isinstance(value, int) and value >= 1 << 64:
        fields[field] = str(value)
    with pytest.raises(InvalidValue, match=f"{type(record).__name__} field {field}") as caught:
        type(record).unpack(msgpack.packb(fields))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x01", b"\x90", b"garbage"])
def test_malformed_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(InvalidValue):
        FleetRecord.unpack(payload)


def test_the_defaults_of_an_endpoint() -> None:
    endpoint = EngineEndpoint(id="w", kind=EngineKind.MOCK, model_id="m", tokenizer_id="t", base_url="http://a:1")
    assert endpoint.transfer_groups == ()
    assert endpoint.role is Role.BOTH
    assert endpoint.tenant_id == "default"
    assert endpoint.url == "http://a:1"
    assert endpoint.model_copy(update={"advertised_url": "http://b:2"}).url == "http://b:2"


@pytest.mark.parametrize("state", EngineState)
@pytest.mark.parametrize("liveness", Liveness)
def test_only_a_live_worker_whose_engine_is_up_is_routable(state: EngineState, liveness: Liveness) -> None:
    record = FleetRecord(endpoint=ENDPOINT, state=state, liveness=liveness)
    assert record.routable == (state is EngineState.UP and liveness is Liveness.ALIVE)


def test_a_record_converts_to_json_types() -> None:
    shown = to_jsonable(RECORDS[3])
    assert shown["endpoint"]["kind"] == "vllm"
    assert shown["load"]["forward_pass"]["cache_usage"] == 0.5
