"""Calibration finds the rates from which rows were made, and files store them."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvatlas.cost.calibration import ObservedRequest, calibrate
from kvatlas.cost.engine import EngineRates
from kvatlas.cost.rates_file import NAMES, read_rates, write_rates
from kvatlas.errors import InvalidValue, SettingsError

REAL = EngineRates(
    prefill_us_per_token=70.0,
    attention_us_per_token_pair=0.004,
    tpot_base_us=11_000.0,
    tpot_us_per_running=90.0,
    tpot_us_per_kv_token=0.03,
)
OVERHEAD_US = 12_000.0


def observe(count: int, noise: float, seed: int = 1) -> list[ObservedRequest]:
    """Rows of an engine with the rates REAL; measured times are off by a random factor of about 1 +- `noise`."""
    random = Random(seed)
    rows = []
    for _ in range(count):
        prompt = random.randrange(200, 16_000)
        cached = random.randrange(prompt)
        running, kv_tokens, output = random.randrange(64), random.randrange(400_000), random.randrange(2, 400)
        ttft_us = OVERHEAD_US + REAL.prefill_us(prompt - cached, cached)
        tpot_us = REAL.tpot_us(running + 1, kv_tokens + prompt + output // 2)
        rows.append(
            ObservedRequest(
                prompt_tokens=prompt,
                cached_tokens=cached,
                output_tokens=output,
                running_requests=running,
                kv_tokens=kv_tokens,
                ttft_ms=ttft_us * random.lognormvariate(0, noise) / 1e3,
                tpot_ms=tpot_us * random.lognormvariate(0, noise) / 1e3,
            )
        )
    return rows


def test_known_rates_are_found_again() -> None:
    found = calibrate(observe(400, noise=0.0))
    for name in NAMES:
        assert getattr(found.rates, name) == pytest.approx(getattr(REAL, name), rel=0.02), name
    assert found.overhead_us == pytest.approx(OVERHEAD_US, rel=0.02)
    assert found.first_token is not None and found.next_token is not None
    assert found.first_token.median_error < 0.01 and found.next_token.median_error < 0.01
    assert found.first_token.explained > 0.999 and found.next_token.explained > 0.999


def test_noise_and_stalls_move_them_little() -> None:
    rows = observe(2_000, noise=0.1)
    stalled = [
        one.model_copy(update={"ttft_ms": one.ttft_ms * 20}) if i % 25 == 0 and one.ttft_ms else one
        for i, one in enumerate(rows)
    ]
    found = calibrate(stalled)
    assert found.rates.prefill_us_per_token == pytest.approx(REAL.prefill_us_per_token, rel=0.1)
    assert found.rates.tpot_base_us == pytest.approx(REAL.tpot_base_us, rel=0.1)
    assert found.first_token is not None and 0.04 < found.first_token.median_error < 0.12


def test_a_rate_that_no_row_tells_keeps_its_default() -> None:
    found = calibrate(one.model_copy(update={"ttft_ms": None}) for one in observe(100, noise=0.0))
    assert found.first_token is None
    assert found.rates.tpot_base_us == pytest.approx(REAL.tpot_base_us, rel=0.02)
    assert found.rates.prefill_us_per_token == pytest.approx(EngineRates().prefill_us_per_token)


def test_rows_with_much_queued_before_them_don_t_count() -> None:
    queued = [one.model_copy(update={"queued_tokens": 100_000, "tpot_ms": None}) for one in observe(100, noise=0.0)]
    with pytest.raises(InvalidValue, match="0 with a TTFT, 0 with a TPOT; expected at least 8 rows of either"):
        calibrate(queued)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{}", "prompt_tokens is missing"),
        (b'{"prompt_tokens": 0}', "prompt_tokens is 0; expected at least 1"),
        (b'{"prompt_tokens": 10, "ttft_ms": 1e400}', "ttft_ms is inf; expected"),
        (b'{"prompt_tokens": 10, "tpot_ms": -1}', "tpot_ms is -1; expected more than 0"),
        (b"[]", "the line is"),
        (b"\xff", "the line is"),
    ],
)
def test_a_row_of_another_form_is_one_clear_error(line: bytes, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        ObservedRequest.parse(line)


def test_a_file_carries_rates(tmp_path: Path) -> None:
    write_rates(tmp_path / "rates.json", REAL)
    assert read_rates(tmp_path / "rates.json") == REAL
    (tmp_path / "some.json").write_text('{"tpot_base_us": 9000}')
    assert read_rates(tmp_path / "some.json") == replace(EngineRates(), tpot_base_us=9_000.0)
    assert read_rates(None) == EngineRates()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the file is"),
        ('{"prefill_us_per_token": "fast"}', "prefill_us_per_token is 'fast'; expected a number"),
        ('{"prefill_us_per_token": -1}', "prefill_us_per_token is -1; expected at least 0"),
        ('{"speed": 1}', "'speed' is not a rate; expected prefill_us_per_token, "),
    ],
)
def test_a_file_of_another_form_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_rates(path)
    with pytest.raises(SettingsError, match="No such file"):
        read_rates(tmp_path / "nosuch.json")
