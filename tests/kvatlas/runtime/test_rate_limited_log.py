import logging

import pytest

from kvatlas.runtime.rate_limited_log import MAX_KINDS, QUIET_S, RateLimitedLog


def test_one_line_of_a_kind_is_logged_in_a_while_with_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    log = RateLimitedLog(logging.getLogger("kvatlas.test"), "worker w: ", clock=lambda: now_s)
    log.report("poison", "payload 1")
    log.report("poison", "payload 2")
    log.report("poison", "payload 3")
    log.report("control", "request 1")
    now_s += QUIET_S
    log.report("poison", "payload 4")
    log.report("control", "request 2")
    assert caplog.messages == [
        "worker w: payload 1",
        "worker w: request 1",
        "worker w: payload 4 (2 similar lines left out)",
        "worker w: request 2",
    ]


def test_the_kinds_remembered_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog(logging.getLogger("kvatlas.test"), clock=lambda: 0.0)
    for number in range(MAX_KINDS + 1):
        log.report(f"kind {number}", f"line {number}")
    log.report("kind 0", "line again")
    assert len(caplog.messages) == MAX_KINDS + 2, "the first kind was forgotten"
