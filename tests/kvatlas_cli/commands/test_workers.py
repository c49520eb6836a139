"""`kvatlas workers` against a real store."""

import json

from tests.kvatlas_cli.conftest import Cli


def test_workers_are_printed_as_json(cli: Cli, fleet_store_url: str) -> None:
    done = cli("workers", "--json", "--redis-url", fleet_store_url)
    assert (done.code, done.err) == (0, "")
    found = {entry["worker"]: entry for entry in json.loads(done.out)}
    assert found["w1"]["blocks"] == 4 and found["w2"]["blocks"] == 1
    assert found["w1"]["state"] == "up" and found["w1"]["liveness"] == "alive" and found["w1"]["routable"] is True
    assert found["w1"]["load"]["running_decodes"] == 3
    assert found["w1"]["incarnation"] == str((1 << 63) + 1)


def test_workers_are_printed_as_a_table_with_one_line_each(cli: Cli, fleet_store_url: str) -> None:
    done = cli("workers", "--redis-url", fleet_store_url)
    assert done.code == 0 and "2 workers" in done.out
    for worker_id in ("w1", "w2"):
        assert len([line for line in done.out.splitlines() if worker_id in line]) == 1
