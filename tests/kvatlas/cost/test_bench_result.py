"""Results of vLLM's benchmark as observed requests, each with the load caused by the others."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas.cost.bench_result import BenchResult
from kvatlas.cost.calibration import calibrate
from kvatlas.errors import InvalidValue

REAL = Path(__file__).with_name("vllm_bench.json")
"""40 requests of `vllm bench serve` 0.33 to a simulated engine that takes 45 us per prompt token; without texts."""


def result(**changed: Any) -> bytes:
    """Three requests: the second arrives while the first one runs, the third while the second waits for its first token."""
    lists = {
        "input_lens": [100, 200, 300],
        "output_lens": [11, 5, 1],
        "start_times": [50.0, 51.0, 51.5],
        "ttfts": [0.5, 1.0, 2.0],
        "itls": [[0.1] * 10, [0.5] * 4, []],
        "errors": ["", "", ""],
    }
    return json.dumps({**lists, **changed}).encode()


def test_each_request_has_the_load_when_it_came() -> None:
    first, second, third = BenchResult.parse(result()).requests()
    assert (first.running_requests, first.queued_tokens, first.kv_tokens) == (0, 0, 0)
    assert first.ttft_ms == pytest.approx(500) and first.tpot_ms == pytest.approx(100)
    assert (second.running_requests, second.queued_tokens) == (1, 0)
    assert second.kv_tokens in (105, 106)  # half of the first answer
    assert (third.running_requests, third.queued_tokens, third.kv_tokens) == (0, 200, 0)
    assert third.tpot_ms is None


def test_requests_that_failed_are_left_out() -> None:
    assert len(list(BenchResult.parse(result(errors=["", "refused", ""])).requests())) == 2
    assert len(list(BenchResult.parse(result(ttfts=[0.0, 1.0, 2.0])).requests())) == 2


def test_a_real_result_has_the_rates_of_its_engine() -> None:
    found = calibrate(BenchResult.parse(REAL.read_bytes()).requests())
    assert found.rates.prefill_us_per_token == pytest.approx(45, rel=0.2)
    assert found.first_token is not None and found.first_token.median_error < 0.3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (result(start_times=None), "start_times is None"),
        (b'{"ttfts": [1]}', "input_lens is missing"),
        (result(ttfts=[1.0]), "its lists have 1 and 3 entries"),
        (result(ttfts=[1e400, 1, 1]), "ttfts.0 is"),
        (result(itls=[[-1.0], [], []]), "itls.0.0 is -1"),
        (b'{"ttfts"', "the benchmark's result is"),
        (result(ttfts=[1e9, 1, 1]), "ttfts.0 is"),
        (result(itls=[[3_000.0] * 40_000, [0.5], []], output_lens=[2, 5, 1]), "request at 50.000 s: tpot_ms is"),
    ],
)
def test_a_result_of_another_form_is_one_clear_error(text: bytes, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        list(BenchResult.parse(text).requests())
