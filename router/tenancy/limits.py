"""Each client's use and limits of requests and tokens, both in flight in this process and per minute in the whole
fleet.

Allowances per minute refill continuously, as OpenAI's do. After a pause, a whole minute's worth may be used at once.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from kvatlas.errors import KvatlasError
from kvatlas.fleet_store.allowances import MINUTE_S
from kvatlas_router.tenancy.allowance import Allowance
from kvatlas_router.tenancy.allowance_exchange import AllowanceExchange
from kvatlas_router.tenancy.caller import Caller
from kvatlas_router.tenancy.counters import TenancyCounters

MOST_KNOWN = 100_000
"""Maximum number of clients whose use is remembered; idle ones are forgotten first."""

Headers = list[tuple[bytes, bytes]]


class OverLimit(KvatlasError):
    """A client has reached a limit. `retry_after_s`: seconds until the same request may pass; None: it never will. `tokens`:
    it is a limit on tokens. `headers`: like `Permit.headers`, but for a request that was not admitted."""

    def __init__(self, line: str, retry_after_s: float | None, *, tokens: bool, headers: Headers | None = None) -> None:
        super().__init__(line)
        self.retry_after_s = None if retry_after_s is None else max(1, math.ceil(retry_after_s))
        self.tokens = tokens
        self.headers = headers or []


@dataclass(slots=True)
class _Use:
    """One client's requests and tokens in flight here, and its allowances. None as an allowance means no limit."""

    requests: int = 0
    tokens: int = 0
    of_requests: Allowance | None = None
    of_tokens: Allowance | None = None

    def set_limits(self, caller: Caller) -> None:
        """Adopt the caller's current limits, since the clients file may have changed them."""
        limits = caller.limits
        self.of_requests = _allowance(self.of_requests, "requests", caller.name, limits.requests_per_minute)
        self.of_tokens = _allowance(self.of_tokens, "tokens", caller.name, limits.tokens_per_minute)


def _allowance(known: Allowance | None, kind: str, client: str, per_minute: int | None) -> Allowance | None:
    if per_minute is None:
        return None
    if known is None:
        return Allowance(f"{kind}:{client}", per_minute)
    known.size = per_minute
    return known


class Permit:
    """One admitted request, until `end`."""

    def __init__(self, caller: Caller, use: _Use, exchange: AllowanceExchange, counters: TenancyCounters) -> None:
        self.caller = caller
        self._counters = counters
        self._exchange = exchange
        self._use = use
        self._tokens = 0
        self._sent = 0
        self._ended = False

    async def take_tokens(self, tokens: int) -> None:
        """Take the tokens of the request's prompt and expected answer. Raises OverLimit."""
        try:
            await self._take_tokens(tokens)
        except OverLimit:
            self._counters.over_tokens += 1
            raise

    async def _take_tokens(self, tokens: int) -> None:
        limits, use = self.caller.limits, self._use
        most, allowance = limits.tokens_in_flight, use.of_tokens
        for limit, what in ((most, "in flight"), (limits.tokens_per_minute, "a minute")):
            if limit is not None and tokens > limit:
                raise OverLimit(
                    f"the request has {tokens} tokens; this client may have {limit} {what}", None, tokens=True
                )
        if most is not None and use.tokens + tokens > most:
            raise OverLimit(f"{use.tokens} tokens of this client are in flight, of {most}", 1, tokens=True)
        use.tokens += tokens
        self._tokens = tokens  # `end` returns them in any case
        if allowance is not None and not await self._exchange.take(allowance, tokens):
            wait_s = allowance.wait_s(tokens, self._exchange.clock())
            raise OverLimit(f"this client has used its {allowance.size} tokens a minute", wait_s, tokens=True)

    def note_sent(self, tokens: int) -> None:
        """Record the tokens of the prompt and of the part of the answer that the client has. They are counted if the
        client disconnects before the end, because then no engine reports a usage."""
        self._sent = tokens

    def correct(self, tokens: int) -> None:
        """Replace the expected tokens with those that the engine reports at the end."""
        self._sent = 0
        if self._use.of_tokens is not None:
            self._exchange.correct(self._use.of_tokens, max(0, tokens) - self._tokens)

    def end(self) -> None:
        """End the request. Calling this twice is harmless."""
        if not self._ended:
            self._ended = True
            if self._sent > self._tokens:
                self.correct(self._sent)
            self._use.requests -= 1
            self._use.tokens -= self._tokens

    def headers(self) -> Headers:
        """What is left of each limit, in the headers of OpenAI's API."""
        return limit_headers(self._use, self._exchange.clock())


def limit_headers(use: _Use, now_s: float) -> Headers:
    """The headers `x-ratelimit-limit-requests` and so on."""
    found: Headers = []
    for what, allowance in ((b"requests", use.of_requests), (b"tokens", use.of_tokens)):
        if allowance is not None:
            left = allowance.remaining(now_s)
            reset_s = (allowance.size - left) * MINUTE_S / allowance.size
            found.append((b"x-ratelimit-limit-" + what, b"%d" % allowance.size))
            found.append((b"x-ratelimit-remaining-" + what, b"%d" % left))
            found.append((b"x-ratelimit-reset-" + what, b"%.3fs" % reset_s))
    return found


class ClientLimits:
    """The use of all clients of one process."""

    def __init__(self, counters: TenancyCounters, exchange: AllowanceExchange) -> None:
        self._counters = counters
        self._exchange = exchange
        self._uses: OrderedDict[str, _Use] = OrderedDict()

    async def admit(self, caller: Caller) -> Permit:
        """Count one more request. Raises OverLimit."""
        use, most = self._use_of(caller), caller.limits.requests_in_flight
        if most is not None and use.requests >= most:
            line = f"{use.requests} requests of this client are in flight, of {most}"
            raise OverLimit(line, 1, tokens=False, headers=self._headers(use))
        use.requests += 1
        permit = Permit(caller, use, self._exchange, self._counters)
        try:
            if use.of_requests is not None and not await self._exchange.take(use.of_requests, 1):
                wait_s = use.of_requests.wait_s(1, self._exchange.clock())
                line = f"this client has used its {use.of_requests.size} requests a minute"
                raise OverLimit(line, wait_s, tokens=False, headers=self._headers(use))
        except BaseException:
            permit.end()
            raise
        return permit

    def _headers(self, use: _Use) -> Headers:
        return limit_headers(use, self._exchange.clock())

    def _use_of(self, caller: Caller) -> _Use:
        use = self._uses.get(caller.name)
        if use is None:
            use = self._uses[caller.name] = _Use()
            if len(self._uses) > MOST_KNOWN:
                self._forget_idle()
        self._uses.move_to_end(caller.name)
        use.set_limits(caller)
        return use

    def _forget_idle(self) -> None:
        idle = next((name for name, use in self._uses.items() if not use.requests), None)
        if idle is not None:
            del self._uses[idle]
