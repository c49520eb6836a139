"""`export`, `workers`, `rates`, `overlap`, `route` against a real store."""

import asyncio
import json
from pathlib import Path

import pytest

from kvatlas.blocks.hashing import unpack_hashes
from kvatlas.cost import EngineRates, Plan
from kvatlas.cost.learned_rates import FinishedRequest, estimate_of, rows_of
from kvatlas.cost.regression import Evidence
from kvatlas.fleet.store import FleetStore
from kvatlas.reservations import RedisReservations
from kvatlas.store.connection import open_store
from tests.kvatlas_cli.conftest import CHAIN, TOKENS, Cli, child


def test_export_prints_each_residency_as_one_json_line(cli: Cli, fleet: str) -> None:
    done = cli("export", "--redis-url", fleet)
    assert (done.code, done.err) == (0, "")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert list(lines[0]) == ["worker", "model_id", "tokenizer_id", "adapter_id", "tenant_id", "tier", "sequence_hash"]
    expected = {("w1", "hbm", f"{value:016x}") for value in unpack_hashes(CHAIN)}
    expected.add(("w2", "cpu_dram", f"{unpack_hashes(CHAIN)[0]:016x}"))
    assert {(line["worker"], line["tier"], line["sequence_hash"]) for line in lines} == expected
    assert {line["tenant_id"] for line in lines} == {"default"} and {line["adapter_id"] for line in lines} == {None}


def test_export_of_one_worker(cli: Cli, fleet: str) -> None:
    done = cli("export", "--worker", "w2", KVATLAS_REDIS_URL=fleet)
    assert [json.loads(line)["worker"] for line in done.out.splitlines()] == ["w2"]


def test_export_of_an_unknown_worker_is_empty_and_says_so(cli: Cli, fleet: str) -> None:
    done = cli("export", "--worker", "w9", "--redis-url", fleet)
    assert (done.code, done.out, done.err) == (0, "", "kvatlas: worker 'w9' is not known to the index\n")


def test_workers_as_json(cli: Cli, fleet: str) -> None:
    done = cli("workers", "--json", "--redis-url", fleet)
    assert (done.code, done.err) == (0, "")
    found = {entry["worker"]: entry for entry in json.loads(done.out)}
    assert found["w1"]["blocks"] == 4 and found["w2"]["blocks"] == 1
    assert found["w1"]["state"] == "up" and found["w1"]["liveness"] == "alive" and found["w1"]["routable"] is True
    assert found["w1"]["load"]["running_decodes"] == 3
    assert found["w1"]["incarnation"] == str((1 << 63) + 1)


def test_workers_as_a_table_has_a_line_a_worker(cli: Cli, fleet: str) -> None:
    done = cli("workers", "--redis-url", fleet)
    assert done.code == 0 and "2 workers" in done.out
    for worker_id in ("w1", "w2"):
        assert len([line for line in done.out.splitlines() if worker_id in line]) == 1


def test_rates_are_the_defaults_until_something_is_learned(cli: Cli, fleet: str) -> None:
    asyncio.run(
        _teach(fleet, "w2", FinishedRequest(Plan("w2", 1_000, 10), 1_000, 10, 0, ttft_us=200_000, tpot_us=14_000))
    )
    done = cli("rates", "--json", "--redis-url", fleet)
    assert (done.code, done.err) == (0, "")
    found = {entry["worker"]: entry for entry in json.loads(done.out)}
    assert {id: entry["requests"] for id, entry in found.items()} == {"w1": 0, "w2": 20}
    assert found["w2"]["rates"]["prefill_us_per_token"] > 100
    assert found["w1"]["rates"]["prefill_us_per_token"] == pytest.approx(40)
    table = cli("rates", "--redis-url", fleet)
    assert table.code == 0 and "2 workers" in table.out
    assert "25 / 50 / 200 / 1250" in next(line for line in table.out.splitlines() if "w1" in line)


async def _teach(url: str, worker_id: str, request: FinishedRequest) -> None:
    """That a worker is so fast, by twenty requests."""
    store = await open_store(url, wait=False)
    try:
        (pool_id,) = await FleetStore(store).pools()
        for _ in range(20):
            reservations = RedisReservations(store)
            known = (await reservations.read_evidence(pool_id)).get(worker_id, Evidence())
            said = Evidence.of(rows_of(request), estimate_of(known, EngineRates()))
            await reservations.add_evidence(pool_id, {worker_id: said})
    finally:
        await store.close()


@pytest.mark.parametrize("text", [json.dumps(TOKENS), " ".join(map(str, TOKENS)), ",\n".join(map(str, TOKENS))])
def test_overlap_takes_tokens_from_a_file_in_any_form(cli: Cli, fleet: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "tokens").write_text(text)
    done = cli("overlap", "--tokens", "tokens", "--model-id", "m", "--json", "--redis-url", fleet)
    assert (done.code, done.err) == (0, "")
    answer = json.loads(done.out)
    assert answer["input_tokens"] == 16
    assert {w["worker"]: w["resident_blocks"] for w in answer["workers"]} == {"w1": 4, "w2": 1}


def test_overlap_of_another_scope_is_zero(cli: Cli, fleet: str) -> None:
    words = ["overlap", "--tokens", "-", "--model-id", "m", "--json", "--redis-url", fleet]
    for other in (["--tenant-id", "x"], ["--adapter-id", "x"]):
        done = cli(*words, *other, stdin=json.dumps(TOKENS))
        assert [worker["resident_blocks"] for worker in json.loads(done.out)["workers"]] == [0, 0]


def test_route_picks_the_worker_with_the_prefix_from_stdin(cli: Cli, fleet: str) -> None:
    words = ["route", "--tokens", "-", "--model-id", "m", "--redis-url", fleet]
    done = cli(*words, "--json", stdin=json.dumps(TOKENS * 2))
    assert (done.code, done.err) == (0, "")
    answer = json.loads(done.out)
    assert (answer["worker"], answer["url"]) == ("w1", "http://w1:8000")
    assert [candidate["worker"] for candidate in answer["candidates"]] == ["w1", "w2"]
    for candidate in answer["candidates"]:
        assert sum(term["us"] for term in candidate["terms"]) == candidate["score_us"]
    table = cli(*words, "--cost-profile", "quillcache", stdin=json.dumps(TOKENS * 2))
    assert table.code == 0 and table.out.startswith("w1 at http://w1:8000")


def test_route_of_a_pair_without_prefill_workers_is_of_one_worker(cli: Cli, fleet: str) -> None:
    words = ["route", "--pd", "--tokens", "-", "--model-id", "m", "--redis-url", fleet]
    done = cli(*words, "--json", stdin=json.dumps(TOKENS * 2))
    assert (done.code, done.err) == (0, "")
    answer = json.loads(done.out)
    assert (answer["prefill"], answer["decode"]["worker"], answer["otherwise"]) == (None, "w1", None)
    assert cli(*words, stdin=json.dumps(TOKENS)).out.startswith("no separate prefill: w1 at http://w1:8000")


def test_output_that_nobody_reads_any_more_is_no_traceback(fleet: str) -> None:
    process = child("export", "--redis-url", fleet)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as errors:
        assert (errors.read(), process.wait(timeout=30)) == ("", 1)
