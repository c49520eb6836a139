"""`kvatlas calibrate` reads a result of vLLM's benchmark just as it reads rows."""

import json
from pathlib import Path

from tests.kvatlas.cost.test_bench_result import REAL
from tests.kvatlas_cli.conftest import Cli


def test_a_benchmarks_result_gives_rates_for_replays(cli: Cli, tmp_path: Path) -> None:
    done = cli("calibrate", str(REAL), "--out", str(tmp_path / "rates.json"), "--json")
    assert done.code == 0 and 36 < json.loads(done.out)["rates"]["prefill_us_per_token"] < 54
    assert "prefill_us_per_token" in (tmp_path / "rates.json").read_text()


def test_a_result_without_start_times_is_refused_in_one_line(cli: Cli, tmp_path: Path) -> None:
    result = json.loads(REAL.read_text())
    del result["start_times"]
    (tmp_path / "bench.json").write_text(json.dumps(result))
    done = cli("calibrate", str(tmp_path / "bench.json"))
    assert done.code == 1 and done.err.count("\n") == 1 and "start_times is missing" in done.err


def test_rates_are_printed_without_powers_of_ten(cli: Cli) -> None:
    done = cli("calibrate", str(REAL))
    assert done.code == 0 and "tpot_base_us" in done.out and "e+" not in done.out
