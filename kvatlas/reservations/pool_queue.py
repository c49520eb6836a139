"""The order in which the waiting requests of a pool get a worker. Pure; its twin is `functions/_queue.lua`.

1. **Priority**: lower first.
2. **Tenants**: the one that has received the least service goes first. A tenant's counter grows with the service that its
   requests take, divided by its weight (`kvatlas.reservations.waiting_request.units`). A tenant that joins a lane starts no
   lower than the lowest counter there, so it gains nothing by having been idle or having waited elsewhere. When a request
   ends, its answer's actual length replaces the estimate.
3. **Within a tenant**: requests of programs that already run come before the first requests of new programs; then those
   whose deadline is nearest; then those that arrived first.

A request may be tried when it is among the first few of its lane: the lane's window. The window doubles whenever one of these
requests finds room, and shrinks to a single request when one of them finds none. Many places that become free are therefore
given out at the same time.

A **lane** consists of the requests that may go to the same workers (`kvatlas.reservations.queue_lines`). A request must not
take a worker of another lane whose first request is ahead of it; it may go to any other worker.

A router's requests keep their places only while the router keeps asking whose turn it is (`LEASE_US`).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvatlas.reservations.due_heap import Deadlines
from kvatlas.reservations.queue_lines import MOST_AHEAD, MOST_WINDOW, STRAYS, Account, Line, QueueLines
from kvatlas.reservations.queue_lines import Place as LinePlace
from kvatlas.reservations.waiting_request import (
    OUTPUT_UNITS,
    Place,
    QueueIsFull,
    Turns,
    WaitingRequest,
    WaitReason,
    digest,
    units,
)

LEASE_US = 1_000_000
PROGRAM_US = 300_000_000
"""How long a program counts as running after its last request was booked."""
FORGET_US = 60_000_000
"""Counters are forgotten when no request has waited for this long."""
MOST_COUNTERS, MOST_CHARGES = 2_048, 65_536
"""Number of counters above which those of tenants that are not waiting are forgotten, and number of charges above which
estimates are not corrected."""
MOST_COUNTER = 9_000_000_000_000_000
"""A whole number with 16 digits with which the store's Lua still calculates exactly."""


class _Key(NamedTuple):
    """The place of a request among those of all lanes. `order`: rank, counter and place; never before that of its predecessor
    in the lane. `number`: the request's number in its lane."""

    order: tuple[int, int, LinePlace]
    number: int
    lane: str
    id: bytes


@dataclass(frozen=True, slots=True)
class _Entry:
    router: str
    line: Line
    place: LinePlace
    tokens: int
    units: int
    weight_milli: int
    tenant: str


@dataclass(slots=True)
class _Tenant:
    weight_milli: int
    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _State:
    """The state that is dropped when nothing is waiting any more."""

    entries: dict[bytes, _Entry] = field(default_factory=dict)
    lines: QueueLines = field(default_factory=QueueLines)
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    own: dict[str, set[bytes]] = field(default_factory=dict)
    ends: Deadlines[bytes] = field(default_factory=Deadlines)
    tokens: int = 0
    weights: int = 0


@dataclass(frozen=True, slots=True)
class _Charge:
    """What was charged for a booking."""

    account: Account
    weight_milli: int
    output_tokens: int
    units: int


class PoolQueue:
    """The queue of one pool. Times are in microseconds of one clock."""

    def __init__(self) -> None:
        self._state = _State()
        self._counters: dict[Account, int] = {}
        self._served: dict[int, int] = {}
        self._charges: dict[bytes, _Charge] = {}
        self._idle_us = 0
        self._leases: dict[str, int] = {}
        self._programs: Deadlines[tuple[str, str]] = Deadlines()

    def __len__(self) -> int:
        return len(self._state.entries)

    def purge(self, now: int) -> None:
        """Drop requests that have waited too long, and those of routers that no longer ask."""
        for router in [router for router, until in self._leases.items() if until <= now]:
            del self._leases[router]
            for id in list(self._state.own.get(router, ())):
                self.remove(id, now)
        for id in self._state.ends.take_due(now):
            self.remove(id, now)
        self._programs.take_due(now)

    def renew_lease(self, router_id: str, now: int) -> None:
        """Keep a router's requests for another LEASE_US."""
        self._leases[router_id] = now + LEASE_US

    def enter(self, request: WaitingRequest, router_id: str, now: int) -> None:
        """Add a request, unless it is waiting already. Raises QueueIsFull."""
        self.renew_lease(router_id, now)
        state = self._state
        if request.id in state.entries:
            return
        if not state.entries and now - self._idle_us > FORGET_US:
            self._counters.clear()
            self._served.clear()
            self._charges.clear()
        tenant = digest(request.tenant)
        lane = state.lines.lane_for(request.lane, tenant)
        line = state.lines.line_for(lane, request.rank, tenant)
        if line is None or not self._may_wait(request, tenant):
            raise QueueIsFull(len(state.entries), state.tokens)
        first = int((tenant, request.program) not in self._programs)
        place = (first, now + request.left_us, now - request.age_us, request.id)
        entry = _Entry(
            router_id, line, place, request.input_tokens, request.expected_units, request.weight_milli, tenant
        )
        account = line[1:]
        if line not in state.lines.places:
            start = state.lines.least_counter(line)
            start = self._served.get(account[0], 0) if start is None else start
            self._set_counter(account, max(self._counters.get(account, 0), start))
        state.entries[request.id] = entry
        state.lines.add(line, place, self._counters[account], request.workers)
        account_of = state.tenants.setdefault(tenant, _Tenant(0))
        state.weights += request.weight_milli - account_of.weight_milli
        account_of.weight_milli = request.weight_milli
        account_of.requests += 1
        account_of.tokens += entry.tokens
        state.own.setdefault(router_id, set()).add(request.id)
        state.ends.add(place[1], request.id)
        state.tokens += entry.tokens

    def remove(self, id: bytes, now: int) -> bool:
        """Remove a request. Returns False if it is not waiting."""
        state = self._state
        entry = state.entries.pop(id, None)
        if entry is None:
            return False
        tenant, own = state.tenants[entry.tenant], state.own[entry.router]
        state.lines.remove(entry.line, entry.place, self._counters[entry.line[1:]])
        tenant.requests -= 1
        tenant.tokens -= entry.tokens
        if not tenant.requests:
            state.weights -= tenant.weight_milli
            del state.tenants[entry.tenant]
        own.remove(id)
        if not own:
            del state.own[entry.router]
        state.ends.discard(id)
        state.tokens -= entry.tokens
        if not state.entries:
            self._state, self._idle_us = _State(), now
        return True

    def place_of(self, id: bytes, reason: WaitReason) -> Place:
        state = self._state
        entry = state.entries[id]
        lane, rank, tenant = entry.line
        before = bisect_left(state.lines.places[entry.line], entry.place)
        own = (self._counters[rank, tenant], tenant)
        ahead = 0
        for line, counter in state.lines.lines_of(lane, MOST_AHEAD):
            waiting = len(state.lines.places[line])
            if line[1] > rank:
                break
            if line == entry.line:
                ahead += before
            elif line[1] < rank:
                ahead += waiting
            else:
                ahead += min(waiting, before + ((counter, line[2]) < own))
        return Place(reason, ahead, len(state.entries), state.tokens)

    def blocked_for(self, id: bytes) -> frozenset[str] | None:
        """The workers that a request must leave to others if it is tried now; None if it is not the request's turn."""
        return self._turns(self._windows(wide=False), id).get(id)

    def narrow(self, id: bytes) -> None:
        """Record that a request found no room."""
        if (name := self._state.entries[id].line[0]) != STRAYS:
            self._state.lines.lanes[name].window = 1

    def record_booked(
        self, request: WaitingRequest, booking_id: bytes, uncached_tokens: int, cached_tokens: int, now: int
    ) -> None:
        """Record that a request was booked. If it or any other request is waiting, its tenant is charged."""
        tenant = digest(request.tenant)
        if request.program:
            self._programs.add(now + PROGRAM_US, (tenant, request.program))
        if not self._state.entries:
            return
        account = (request.rank, tenant)
        if (entry := self._state.entries.get(request.id)) is not None:
            lane, account = self._state.lines.lanes[entry.line[0]], entry.line[1:]
            lane.window = min(MOST_WINDOW, 2 * lane.window)
            self.remove(request.id, now)
        before = self._counters.get(account, 0)
        service = units(uncached_tokens, cached_tokens, request.output_tokens)
        self._set_counter(account, before + service * 1_000 // request.weight_milli)
        self._served[account[0]] = max(self._served.get(account[0], 0), before)
        if len(self._charges) >= MOST_CHARGES:
            self._charges.clear()
        self._charges[booking_id] = _Charge(account, request.weight_milli, request.output_tokens, service)

    def record_end(self, booking_id: bytes, output_tokens: int | None = None, *, called_off: bool = False) -> None:
        """Record that a booking has ended. `output_tokens`: the number of tokens that its answer took, in place of the
        estimate; None: unknown. If it was called off, nothing is charged."""
        charge = self._charges.pop(booking_id, None)
        if charge is None or charge.account not in self._counters:
            return
        if called_off:
            more = -charge.units
        elif output_tokens is not None:
            more = OUTPUT_UNITS * (output_tokens - charge.output_tokens)
        else:
            return
        self._set_counter(charge.account, self._counters[charge.account] + more * 1_000 // charge.weight_milli)

    def turns(self, router_id: str, left: Iterable[bytes], rows: Sequence[WaitingRequest], now: int) -> Turns:
        """Remove the requests that `left`, add others, and return which of the router's requests may be tried."""
        self.renew_lease(router_id, now)
        for id in left:
            self.remove(id, now)
        refused = set()
        for row in rows:
            try:
                self.enter(row, router_id, now)
            except QueueIsFull:
                refused.add(row.id)
        state = self._state
        windows = self._windows(wide=True)
        near = any(state.entries[one.id].router == router_id for first in windows.values() for one in first)
        for name, first in windows.items():
            del first[state.lines.lanes[name].window :]
        turns = {id: blocked for id, blocked in self._turns(windows).items() if state.entries[id].router == router_id}
        own = len(state.own.get(router_id, ()))
        if not own:
            self._leases.pop(router_id, None)
        return Turns(own, len(state.entries), state.tokens, frozenset(refused), turns, near)

    # ------------------------------------------------------------ pieces

    def _may_wait(self, request: WaitingRequest, tenant: str) -> bool:
        """True within the limits, or within the tenant's share of them, so that a tenant that fills the queue does not keep
        others out."""
        state, limits, tokens = self._state, request.limits, request.input_tokens
        waiting = len(state.entries)
        if waiting < limits.requests and (not waiting or state.tokens + tokens <= limits.tokens):
            return True
        own = state.tenants.get(tenant) or _Tenant(0)
        share = request.weight_milli / (state.weights - own.weight_milli + request.weight_milli)
        return own.requests + 1 <= limits.requests * share and own.tokens + tokens <= limits.tokens * share

    def _windows(self, *, wide: bool) -> dict[str, list[_Key]]:
        """The first requests of each lane, in their order. `wide`: as many as the lane's window can ever hold."""
        lines = self._state.lines
        widths = {name: lines.width(name) for name in lines.lanes}
        return {
            name: self._first(name, widths[name] if wide else min(lane.window, widths[name]))
            for name, lane in lines.lanes.items()
        }

    def _first(self, lane: str, most: int) -> list[_Key]:
        """The first requests of a lane. Lines of one lane with equal counters are in the order of their tenants' digests;
        requests of different lanes are in the order of their places."""
        state = self._state
        heads: list[tuple[tuple[int, int, str, LinePlace], Line, int]] = []

        def add(line: Line, number: int, counter: int) -> None:
            places = state.lines.places[line]
            if number < len(places):
                heads.append(((line[1], counter, line[2], places[number]), line, number))

        for line, counter in state.lines.lines_of(lane, most):
            add(line, 0, counter)
        first: list[_Key] = []
        while heads and len(first) < most:
            head = min(heads)
            heads.remove(head)
            (rank, counter, _, place), line, number = head
            entry, order = state.entries[place[3]], (rank, counter, place)
            first.append(_Key(max(order, first[-1].order) if first else order, len(first), lane, place[3]))
            add(line, number + 1, min(MOST_COUNTER, counter + entry.units * 1_000 // entry.weight_milli))
        return first

    def _turns(self, windows: dict[str, list[_Key]], until: bytes | None = None) -> dict[bytes, frozenset[str]]:
        """The requests that may be tried now, each with the workers that it must leave to other lanes; only up to one request,
        if it is given."""
        lanes = self._state.lines.lanes
        taken: Counter[str] = Counter()
        """For each worker, how many of these lanes may go to it."""
        passed: set[str] = set()
        """The lanes whose first request came before."""
        holder: str | None = None
        """The one among these lanes that may go to all workers."""
        turns: dict[bytes, frozenset[str]] = {}
        for _, _, name, id in sorted(one for first in windows.values() for one in first):
            mine, own = lanes[name].workers or frozenset(), int(name in passed)
            if holder in (None, name) and (not mine or any(taken[worker] == own for worker in mine)):
                turns[id] = frozenset(one for one, times in taken.items() if times > (own if one in mine else 0))
            if id == until:
                break
            if not own and name != STRAYS:
                passed.add(name)
                taken.update(mine)
                holder = name if not mine and holder is None else holder
        return turns

    def _set_counter(self, account: Account, counter: int) -> None:
        if account not in self._counters and len(self._counters) + len(self._served) >= MOST_COUNTERS:
            lines = self._state.lines
            self._counters = {one: count for one, count in self._counters.items() if lines.waits(one)}
            self._served.clear()
        before, after = self._counters.get(account, 0), min(max(0, counter), MOST_COUNTER)
        self._counters[account] = after
        self._state.lines.move(account, before, after)
