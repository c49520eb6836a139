"""How much each client uses, and what it may: requests and tokens, in flight and a minute. In one process; no I/O.

A minute's allowance is a bucket that refills continuously, as OpenAI's: after a pause a whole minute's worth may come at once.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from kvatlas.errors import KvatlasError
from kvatlas_router.tenancy.caller import Caller
from kvatlas_router.tenancy.counters import TenancyCounters

MOST_KNOWN = 100_000
"""Clients whose use is remembered; idle ones are forgotten first."""
MINUTE_S = 60.0

Headers = list[tuple[bytes, bytes]]


class OverLimit(KvatlasError):
    """A client has used what it may. `retry_after_s`: when the same request may pass."""

    def __init__(self, line: str, retry_after_s: float, *, tokens: bool) -> None:
        super().__init__(line)
        self.retry_after_s = max(1, math.ceil(retry_after_s))
        self.tokens = tokens


@dataclass(slots=True)
class _Bucket:
    """What is left of a minute's allowance; below 0 if an answer took more than was expected."""

    left: float | None = None
    at_s: float = 0.0

    def refill(self, per_minute: int, now_s: float) -> float:
        """What is left now."""
        if self.left is None:
            self.left = float(per_minute)
        else:
            self.left = min(float(per_minute), self.left + (now_s - self.at_s) * per_minute / MINUTE_S)
        self.at_s = now_s
        return self.left

    def wait_s(self, amount: float, per_minute: int, now_s: float) -> float:
        """Seconds until this amount is there; 0: it is."""
        return max(0.0, (min(amount, per_minute) - self.refill(per_minute, now_s)) * MINUTE_S / per_minute)

    def take(self, amount: float) -> None:
        if self.left is not None:
            self.left -= amount


@dataclass(slots=True)
class _Use:
    """One client's."""

    requests: int = 0
    tokens: int = 0
    of_requests: _Bucket = field(default_factory=_Bucket)
    of_tokens: _Bucket = field(default_factory=_Bucket)


class Permit:
    """One admitted request, until `end`."""

    def __init__(self, caller: Caller, use: _Use, counters: TenancyCounters) -> None:
        self.caller = caller
        self._counters = counters
        self._use = use
        self._tokens = 0
        self._ended = False

    def take_tokens(self, tokens: int, now_s: float) -> None:
        """Its prompt and the answer that is expected. Raises OverLimit."""
        try:
            self._take_tokens(tokens, now_s)
        except OverLimit:
            self._counters.over_tokens += 1
            raise

    def _take_tokens(self, tokens: int, now_s: float) -> None:
        limits, use = self.caller.limits, self._use
        most, per_minute = limits.tokens_in_flight, limits.tokens_per_minute
        for limit, what in ((most, "in flight"), (per_minute, "a minute")):
            if limit is not None and tokens > limit:
                raise OverLimit(
                    f"the request has {tokens} tokens; this client may have {limit} {what}", 60, tokens=True
                )
        if most is not None and use.tokens + tokens > most:
            raise OverLimit(f"{use.tokens} tokens of this client are in flight, of {most}", 1, tokens=True)
        if per_minute is not None:
            if wait_s := use.of_tokens.wait_s(tokens, per_minute, now_s):
                raise OverLimit(f"this client has used its {per_minute} tokens a minute", wait_s, tokens=True)
            use.of_tokens.take(tokens)
        use.tokens += tokens
        self._tokens = tokens

    def correct(self, tokens: int) -> None:
        """What the request took in the end, as its engine reports it."""
        self._use.of_tokens.take(tokens - self._tokens)

    def end(self) -> None:
        """The request is over. Ending twice is fine."""
        if not self._ended:
            self._ended = True
            self._use.requests -= 1
            self._use.tokens -= self._tokens

    def headers(self, now_s: float) -> Headers:
        """What is left, in the words of OpenAI's API; only of what is limited."""
        return limit_headers(self.caller, self._use, now_s)


def limit_headers(caller: Caller, use: _Use, now_s: float) -> Headers:
    """`x-ratelimit-limit-requests` and so on."""
    found: Headers = []
    limits = caller.limits
    for what, per_minute, bucket in (
        ("requests", limits.requests_per_minute, use.of_requests),
        ("tokens", limits.tokens_per_minute, use.of_tokens),
    ):
        if per_minute is not None:
            left = bucket.refill(per_minute, now_s)
            reset_s = (per_minute - left) * MINUTE_S / per_minute
            for name, value in (
                ("limit", str(per_minute)),
                ("remaining", str(max(0, math.floor(left)))),
                ("reset", f"{reset_s:.3f}s"),
            ):
                found.append((f"x-ratelimit-{name}-{what}".encode(), value.encode()))
    return found


class ClientLimits:
    """The use of all clients of one process."""

    def __init__(self, counters: TenancyCounters) -> None:
        self._counters = counters
        self._uses: OrderedDict[str, _Use] = OrderedDict()

    def admit(self, caller: Caller, now_s: float) -> Permit:
        """Count one more request. Raises OverLimit."""
        use, limits = self._use_of(caller.name), caller.limits
        most, per_minute = limits.requests_in_flight, limits.requests_per_minute
        if most is not None and use.requests >= most:
            raise OverLimit(f"{use.requests} requests of this client are in flight, of {most}", 1, tokens=False)
        if per_minute is not None:
            if wait_s := use.of_requests.wait_s(1, per_minute, now_s):
                raise OverLimit(f"this client has used its {per_minute} requests a minute", wait_s, tokens=False)
            use.of_requests.take(1)
        use.requests += 1
        return Permit(caller, use, self._counters)

    def headers(self, caller: Caller, now_s: float) -> Headers:
        """As `Permit.headers`, of a client whose request was not admitted."""
        return limit_headers(caller, self._use_of(caller.name), now_s)

    def _use_of(self, name: str) -> _Use:
        use = self._uses.get(name)
        if use is None:
            use = self._uses[name] = _Use()
            if len(self._uses) > MOST_KNOWN:
                self._forget_idle()
        self._uses.move_to_end(name)
        return use

    def _forget_idle(self) -> None:
        idle = next((name for name, use in self._uses.items() if not use.requests), None)
        if idle is not None:
            del self._uses[idle]
