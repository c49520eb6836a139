"""`kvatlas export` against a real store."""

import json
import signal

import pytest

from kvatlas.blocks.hashing import unpack_hashes
from tests.kvatlas_cli.conftest import CHAIN, UNUSED_ADDRESS, Cli, start_command


def test_each_residency_is_one_json_line(cli: Cli, fleet_store_url: str) -> None:
    done = cli("export", "--redis-url", fleet_store_url)
    assert (done.code, done.err) == (0, "")
    lines = [json.loads(line) for line in done.out.splitlines()]
    scope = ["model_id", "tokenizer_id", "adapter_id", "tenant_id", "chain"]
    assert list(lines[0]) == [
        "worker",
        "kind",
        *scope,
        "tier",
        "sequence_hash",
        "bytes",
        "pinned",
        "resumable",
        "age_ms",
    ]
    expected = {("w1", "hbm", f"{value:016x}") for value in unpack_hashes(CHAIN)}
    expected.add(("w2", "cpu_dram", f"{unpack_hashes(CHAIN)[0]:016x}"))
    assert {(line["worker"], line["tier"], line["sequence_hash"]) for line in lines} == expected
    assert {(line["bytes"], line["pinned"]) for line in lines} == {(1024, False)}
    assert all(line["age_ms"] > 1_000_000 for line in lines)  # the fleet last heard them in 1970
    assert {line["tenant_id"] for line in lines} == {"default"} and {line["adapter_id"] for line in lines} == {None}


def test_a_summary_adds_up_blocks_and_bytes_by_scope_and_tier(cli: Cli, fleet_store_url: str) -> None:
    done = cli("export", "--summary", "--redis-url", fleet_store_url)
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [(line["model_id"], line["tier"], line["blocks"], line["bytes"]) for line in lines] == [
        ("m", "hbm", 4, 4096),
        ("m", "cpu_dram", 1, 1024),
    ]
    refused = cli("export", "--summary", "--worker", "w1", "--redis-url", fleet_store_url)
    assert refused.code == 2 and "--summary is for all workers; expected one of the two" in refused.err


def test_only_one_worker_is_exported_on_request(cli: Cli, fleet_store_url: str) -> None:
    done = cli("export", "--worker", "w2", KVATLAS_REDIS_URL=fleet_store_url)
    assert [json.loads(line)["worker"] for line in done.out.splitlines()] == ["w2"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_waiting_command_can_be_interrupted(number: signal.Signals) -> None:
    process = start_command("export", "--wait", "--redis-url", f"redis://{UNUSED_ADDRESS}")
    assert process.stderr is not None and process.stdout is not None
    with process.stderr as errors, process.stdout:
        assert "retrying in" in errors.readline()
        process.send_signal(number)
        assert "Traceback" not in errors.read()
    assert process.wait(timeout=30) == 130
