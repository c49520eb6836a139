"""A service's log on stderr."""

import json
import logging
import re

import pytest
from opentelemetry.sdk.trace import TracerProvider

from kvatlas.runtime.rate_limited_log import QUIET_S, RateLimitedLog
from kvatlas_cli.logs import RepetitionFilter, log_to_stderr, notice_text

_log = logging.getLogger("kvatlas.indexer")


def test_a_line_for_people_has_time_level_component_and_trace(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("info", "console")
    _log.info("worker w1: back after %g s", 2.5)
    with TracerProvider().get_tracer("test").start_as_current_span("request") as span:
        logging.getLogger("kvatlas_router.proxy").warning("worker w2: refused; trying another")
    first, second = capsys.readouterr().err.splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf"{time} info indexer: worker w1: back after 2\.5 s", first)
    trace_id = f"{span.get_span_context().trace_id:032x}"
    assert re.fullmatch(
        rf"{time} warning router\.proxy: worker w2: refused; trying another \(trace {trace_id}\)", second
    )


def test_a_json_line_has_the_same_as_fields(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("info", "json")
    with TracerProvider().get_tracer("test").start_as_current_span("request") as span:
        _log.info("worker w1: %s", "two\nlines")
    try:
        raise ValueError("why\nnot")
    except ValueError:
        _log.exception("shard 3: apply failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["component"], first["worker"]) == ("info", "indexer", "w1")
    assert first["message"] == "worker w1: two\nlines" and first["time"].endswith("Z")
    context = span.get_span_context()
    assert (first["trace_id"], first["span_id"]) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")
    assert (second["level"], second["error"]) == ("error", "ValueError: why not")
    assert "worker" not in second and "trace_id" not in second
    assert json.loads(notice_text("router at http://127.0.0.1:1"))["message"] == "router at http://127.0.0.1:1"


def test_a_name_writes_no_second_line_and_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    forged = "m\r\n2026-01-01T00:00:00.000Z error store: gone\x1b[2J\u2028\x9b1A\x00é😀"
    for style in ("console", "json"):
        log_to_stderr("info", style)
        _log.info("model %s; %s", forged, "x" * 100_000)
        written = capsys.readouterr().err
        (line,) = written.splitlines()
        assert len(line) < 10_000 and "é😀" in line and line.isprintable()
        if style == "json":
            assert json.loads(line)["message"].startswith(f"model {forged}")
    log_to_stderr("debug", "console")
    try:
        raise ValueError("why\nnot")
    except ValueError:
        _log.exception("apply failed")
    assert "Traceback" in capsys.readouterr().err


def passed(seconds: list[float], *args: object) -> list[str]:
    """The messages that pass if one line is logged at each of these times."""
    limit, found = RepetitionFilter(), []
    for second in seconds:
        record = logging.LogRecord("kvatlas.indexer", logging.WARNING, "", 0, "shard %d: failed (%s)", args, None)
        record.created = second
        if limit.filter(record):
            found.append(record.getMessage())
    return found


def test_a_condition_is_not_a_line_each_second_but_ever_fewer_with_a_count() -> None:
    found = passed([float(second) for second in range(100)], 3, "refused")
    line = "shard 3: failed (refused)"
    counted = [f"{line} ({left_out} similar lines left out)" for left_out in (9, 19, 39)]
    assert found == [line, *counted]


def test_a_condition_that_comes_again_later_is_logged_at_once() -> None:
    assert passed([0, 1, 1_000], 3, "refused")[1] == "shard 3: failed (refused) (1 similar lines left out)"
    assert passed([0, 1_000], 3, "refused") == ["shard 3: failed (refused)"] * 2


def test_workers_are_told_apart_and_shards_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("info", "console")
    for number in range(4):
        _log.warning("worker %s: lost", f"w{number}")
        _log.warning("shard %d: apply failed (%s)", number, "connection refused")
    lines = [line.partition("indexer: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert sorted(lines) == ["shard 0: apply failed (connection refused)", *(f"worker w{n}: lost" for n in range(4))]


def test_every_request_is_in_the_access_log_and_limited_lines_pass(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("info", "console")
    now_s = 0.0
    limited = RateLimitedLog(_log, clock=lambda: now_s)
    for _ in range(3):
        logging.getLogger("router_client.access").info("POST /v1/completions 200")
        limited.report("kind", "the same line")
        now_s += QUIET_S
    err = capsys.readouterr().err
    assert err.count("POST /v1/completions 200") == 3 and err.count("the same line") == 3
