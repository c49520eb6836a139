"""The order in which a pool's waiting requests get a worker. Pure; its twin is `functions/_queue.lua`.

1. **Priority**: lower first.
2. **Tenants**: the one that got least. A tenant's counter grows with the service that its requests take, divided by its weight
   (`kvatlas.reservations.waiting_request.units`). One that begins to wait starts where the others are: idling saves nothing
   up.
3. **Within a tenant**: requests of programs that already run come before the first ones of new programs; then those whose
   deadline is nearest; then those that arrived first.

A request may be tried when it is among the first few, its lane's window. The window doubles whenever one of them finds room,
and shrinks to the first one when there is none, so many freed places are given out at once.

**Lanes** are requests that may go to the same workers. The first one of a lane leaves the workers of each lane whose first
request comes before it to that lane, and may go to all others.

A router's requests wait as long as it asks for its turns (`LEASE_US`).
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvatlas.reservations.waiting_request import (
    ALL_WORKERS,
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
"""A program runs as long as its last request was booked at most this long ago."""
FORGET_US = 60_000_000
"""Counters are forgotten when no request has waited for this long."""
MOST_WINDOW, MOST_LANES, MOST_LINES, MOST_AHEAD = 16, 8, 512, 64
"""Requests of all lanes that may be tried at once, lanes, lines after which new tenants share one, and lines that are counted
for a place."""
SHARED = "0" * 16
"""The tenant of lines above MOST_LINES."""

_Line = tuple[str, int, str]
"""Lane, priority, tenant."""
_Key = tuple[int, int, tuple[int, int, int, bytes]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """`place`: not the first of its program, deadline, arrival, id: its order within its line."""

    router: str
    line: _Line
    place: tuple[int, int, int, bytes]
    tokens: int
    units: int
    weight_milli: int
    tenant: str


@dataclass(slots=True)
class _Lane:
    workers: frozenset[str] | None
    window: int = 1
    entries: int = 0


@dataclass(slots=True)
class _Tenant:
    weight_milli: int
    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _State:
    """What is dropped when nothing waits any more."""

    entries: dict[bytes, _Entry] = field(default_factory=dict)
    lines: dict[_Line, list[tuple[int, int, int, bytes]]] = field(default_factory=dict)
    lanes: dict[str, _Lane] = field(default_factory=dict)
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    own: Counter[str] = field(default_factory=Counter)
    tokens: int = 0


class PoolQueue:
    """The queue of one pool. Times are microseconds of one clock."""

    def __init__(self) -> None:
        self._state = _State()
        self._counters: dict[tuple[int, str], int] = {}
        self._served: dict[int, int] = {}
        self._idle_us = 0
        self._leases: dict[str, int] = {}
        self._programs: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return len(self._state.entries)

    def purge(self, now: int) -> None:
        """Drop requests that waited too long, and those of routers that no longer ask."""
        for id, entry in list(self._state.entries.items()):
            if entry.place[1] <= now or self._leases.get(entry.router, 0) <= now:
                self.remove(id, now)
        self._leases = {router: until for router, until in self._leases.items() if until > now}
        self._programs = {program: until for program, until in self._programs.items() if until > now}

    def renew_lease(self, router_id: str, now: int) -> None:
        """Keep a router's requests for another LEASE_US."""
        self._leases[router_id] = now + LEASE_US

    def enter(self, request: WaitingRequest, router_id: str, now: int) -> None:
        """Add a request, unless it waits already. Raises QueueIsFull."""
        self.renew_lease(router_id, now)
        state = self._state
        if request.id in state.entries:
            return
        if not state.entries and now - self._idle_us > FORGET_US:
            self._counters.clear()
            self._served.clear()
        tenant = digest(request.tenant)
        lane = request.lane
        if lane not in state.lanes and len(state.lanes) >= MOST_LANES:
            lane = ALL_WORKERS
        line = (lane, request.rank, tenant)
        if line not in state.lines and len(state.lines) >= MOST_LINES:
            line = (lane, request.rank, SHARED)
        if not self._may_wait(request, tenant) or (line not in state.lines and len(state.lines) >= 2 * MOST_LINES):
            raise QueueIsFull(len(state.entries), state.tokens)
        first = int((tenant, request.program) not in self._programs)
        place = (first, now + request.left_us, now - request.age_us, request.id)
        entry = _Entry(
            router_id, line, place, request.input_tokens, request.expected_units, request.weight_milli, tenant
        )
        if not any(other[1:] == line[1:] for other in state.lines):
            account = line[1:]
            self._counters[account] = max(self._counters.get(account, 0), self._served.get(line[1], 0))
        state.entries[request.id] = entry
        insort(state.lines.setdefault(line, []), place)
        workers = request.workers if lane == request.lane else None
        state.lanes.setdefault(lane, _Lane(workers)).entries += 1
        account_of = state.tenants.setdefault(tenant, _Tenant(request.weight_milli))
        account_of.weight_milli = request.weight_milli
        account_of.requests += 1
        account_of.tokens += entry.tokens
        state.own[router_id] += 1
        state.tokens += entry.tokens

    def remove(self, id: bytes, now: int) -> bool:
        """Remove a request. False if it does not wait."""
        state = self._state
        entry = state.entries.pop(id, None)
        if entry is None:
            return False
        line, lane, tenant = state.lines[entry.line], state.lanes[entry.line[0]], state.tenants[entry.tenant]
        del line[bisect_left(line, entry.place)]
        if not line:
            del state.lines[entry.line]
        lane.entries -= 1
        if not lane.entries:
            del state.lanes[entry.line[0]]
        tenant.requests -= 1
        tenant.tokens -= entry.tokens
        if not tenant.requests:
            del state.tenants[entry.tenant]
        state.own[entry.router] -= 1
        state.tokens -= entry.tokens
        if not state.entries:
            self._state, self._idle_us = _State(), now
        return True

    def place_of(self, id: bytes, reason: WaitReason) -> Place:
        """The place of a request that waits."""
        state = self._state
        entry = state.entries[id]
        lane, rank, tenant = entry.line
        before = bisect_left(state.lines[entry.line], entry.place)
        own = (self._counters[rank, tenant], tenant)
        ahead = 0
        for line in self._lines_of(lane)[:MOST_AHEAD]:
            waiting = len(state.lines[line])
            if line[1] > rank:
                break
            if line == entry.line:
                ahead += before
            elif line[1] < rank:
                ahead += waiting
            else:
                ahead += min(waiting, before + ((self._counters[line[1:]], line[2]) < own))
        return Place(reason, ahead, len(state.entries), state.tokens)

    def blocked_for(self, id: bytes) -> frozenset[str] | None:
        """The workers that a request must leave to others if it is tried now; None if it is not its turn."""
        return self._turns_of(self._state.entries[id].line[0]).get(id)

    def narrow(self, id: bytes) -> None:
        """Record that a request found no room."""
        self._state.lanes[self._state.entries[id].line[0]].window = 1

    def record_booked(self, request: WaitingRequest, uncached_tokens: int, cached_tokens: int, now: int) -> None:
        """Record that a request was booked. If it or others waited, its tenant is charged."""
        if request.program:
            self._programs[digest(request.tenant), request.program] = now + PROGRAM_US
        if not self._state.entries:
            return
        tenant = digest(request.tenant)
        if (entry := self._state.entries.get(request.id)) is not None:
            lane, tenant = self._state.lanes[entry.line[0]], entry.line[2]
            lane.window = min(MOST_WINDOW, 2 * lane.window)
            self.remove(request.id, now)
        self._charge(
            (request.rank, tenant), request.weight_milli, units(uncached_tokens, cached_tokens, request.output_tokens)
        )

    def turns(self, router_id: str, left: Iterable[bytes], rows: Sequence[WaitingRequest], now: int) -> Turns:
        """Remove the requests that `left`, add others, and tell which of the router's requests may be tried."""
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
        turns = {
            id: blocked
            for lane in state.lanes
            for id, blocked in self._turns_of(lane).items()
            if state.entries[id].router == router_id
        }
        own = state.own[router_id]
        if not own:
            self._leases.pop(router_id, None)
        return Turns(own, len(state.entries), state.tokens, frozenset(refused), turns)

    # ------------------------------------------------------------ pieces

    def _may_wait(self, request: WaitingRequest, tenant: str) -> bool:
        """Within the limits, or within its tenant's share of them: a tenant that fills the queue keeps no other one out."""
        state, limits, tokens = self._state, request.limits, request.input_tokens
        waiting = len(state.entries)
        if waiting < limits.requests and (not waiting or state.tokens + tokens <= limits.tokens):
            return True
        own = state.tenants.get(tenant) or _Tenant(0)
        weights = sum(one.weight_milli for one in state.tenants.values()) - own.weight_milli + request.weight_milli
        share = request.weight_milli / weights
        return own.requests + 1 <= limits.requests * share and own.tokens + tokens <= limits.tokens * share

    def _lines_of(self, lane: str) -> list[_Line]:
        lines = [line for line in self._state.lines if line[0] == lane]
        return sorted(lines, key=lambda line: (line[1], self._counters[line[1:]], line[2]))

    def _window(self, lane: str) -> list[tuple[_Key, bytes]]:
        """The first requests of a lane, in their order."""
        state = self._state
        most = max(1, min(state.lanes[lane].window, MOST_WINDOW // len(state.lanes)))
        heads: list[tuple[_Key, _Line, int]] = []

        def add(line: _Line, number: int, counter: int) -> None:
            if number < len(state.lines[line]):
                heads.append(((line[1], counter, state.lines[line][number]), line, number))

        for line in self._lines_of(lane)[:most]:
            add(line, 0, self._counters[line[1:]])
        first: list[tuple[_Key, bytes]] = []
        while heads and len(first) < most:
            head = min(heads)
            heads.remove(head)
            key, line, number = head
            id = key[2][3]
            entry = state.entries[id]
            first.append((key, id))
            add(line, number + 1, key[1] + entry.units * 1_000 // entry.weight_milli)
        return first

    def _turns_of(self, lane: str) -> dict[bytes, frozenset[str]]:
        """A lane's requests that may be tried now, with the workers that each must leave to other lanes."""
        state = self._state
        heads = [(self._window(other)[0][0], of.workers) for other, of in state.lanes.items() if other != lane]
        mine = state.lanes[lane].workers
        turns = {}
        for key, id in self._window(lane):
            ahead = [workers for head, workers in heads if head < key]
            if None in ahead:
                continue
            blocked = frozenset[str]().union(*(workers for workers in ahead if workers is not None))
            if mine is None or mine - blocked:
                turns[id] = blocked
        return turns

    def _charge(self, account: tuple[int, str], weight_milli: int, service: int) -> None:
        before = self._counters.get(account, 0)
        self._served[account[0]] = max(self._served.get(account[0], 0), before)
        self._counters[account] = before + service * 1_000 // weight_milli
