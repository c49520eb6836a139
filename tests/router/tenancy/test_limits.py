"""Limits of clients, against a model that remembers every request."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas_router.tenancy.caller import Caller, Limits
from kvatlas_router.tenancy.counters import TenancyCounters
from kvatlas_router.tenancy.limits import ClientLimits, OverLimit, Permit


def caller(name: str = "a", **limits: int) -> Caller:
    return Caller(name, name, limits=Limits(**limits))


@dataclass
class Naive:
    """Buckets as the sum of all that came in and went out."""

    per_minute: int
    left: float = field(init=False)
    at_s: float = 0.0

    def __post_init__(self) -> None:
        self.left = self.per_minute

    def allows(self, amount: int, now_s: float) -> bool:
        self.left = min(self.per_minute, self.left + (now_s - self.at_s) * self.per_minute / 60)
        self.at_s = now_s
        if self.left < amount:
            return False
        self.left -= amount
        return True


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.booleans()), max_size=60))
def test_what_passes_is_what_the_limits_say(steps: list[tuple[int, int, bool]]) -> None:
    limits, now_s, open_ = ClientLimits(TenancyCounters()), 0.0, list[Permit]()
    requests, tokens, in_flight = Naive(20), Naive(100), dict[int, int]()
    one = caller(requests_per_minute=20, tokens_per_minute=100, requests_in_flight=4, tokens_in_flight=60)
    for pause_s, size, ends in steps:
        now_s += pause_s
        if ends and open_:
            ended = open_.pop(0)
            ended.end()
            ended.end()
            in_flight.pop(id(ended), None)
            continue
        may = len(open_) < 4 and requests.allows(1, now_s)
        try:
            permit = limits.admit(one, now_s)
        except OverLimit:
            assert not may
            continue
        assert may
        open_.append(permit)
        may = sum(in_flight.values()) + size <= 60 and tokens.allows(size, now_s)
        try:
            permit.take_tokens(size, now_s)
            assert may
            in_flight[id(permit)] = size
        except OverLimit:
            assert not may


def test_the_time_to_come_again_is_when_the_request_passes() -> None:
    limits = ClientLimits(TenancyCounters())
    one = caller(requests_per_minute=6)
    for _ in range(6):
        limits.admit(one, 100.0)
    with pytest.raises(OverLimit) as refused:
        limits.admit(one, 100.0)
    assert refused.value.retry_after_s == 10
    limits.admit(one, 110.0)


def test_an_answer_that_was_longer_than_expected_is_paid_later() -> None:
    limits = ClientLimits(TenancyCounters())
    permit = limits.admit(caller(tokens_per_minute=60), 0.0)
    permit.take_tokens(10, 0.0)
    permit.correct(90)
    headers = dict(permit.headers(0.0))
    assert headers[b"x-ratelimit-remaining-tokens"] == b"0"
    with pytest.raises(OverLimit) as refused:
        permit.take_tokens(10, 0.0)
    assert refused.value.retry_after_s == 40


def test_clients_have_limits_of_their_own() -> None:
    limits = ClientLimits(TenancyCounters())
    limits.admit(caller("a", requests_in_flight=1), 0.0)
    limits.admit(caller("b", requests_in_flight=1), 0.0)
    with pytest.raises(OverLimit):
        limits.admit(caller("a", requests_in_flight=1), 0.0)
    assert limits.headers(caller("c"), 0.0) == []
