"""The lines in which a pool's requests wait, by lane and in their order. Part of `pool_queue`; its twin is
`functions/_queue.lua`.

A line holds the requests of one tenant with one priority in one lane. A lane is for requests that may go to the same workers.

The numbers of lanes and of lines are bounded, and no tenant can use them up: it may begin another line as long as it has fewer
lines than are left (dynamic thresholds: Choudhury and Hahne, 1998). Above that:

- Requests for other sets of workers wait in one lane, that of the strays. It holds up no other lane, and many of its requests
  are tried at the same time, because one that finds no room says nothing about the next one.
- Requests with other priorities wait in the tenant's line of that lane whose priority is the next lower one.
- Above MOST_LINES, new tenants share lines.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvatlas.reservations.waiting_request import ALL_WORKERS

MOST_WINDOW, MOST_LANES, MOST_LINES, MOST_AHEAD = 16, 32, 512, 64
"""Limits: the requests of all lanes that may be tried at the same time; lanes; lines, above which new tenants share one; lines
that are counted for a place."""
STRAYS = "f" * 16
"""The lane of requests for sets of workers that get no lane of their own, because too few lanes are left."""
SHARED = "0" * 16
"""The tenant of lines above MOST_LINES."""

Line = tuple[str, int, str]
"""Lane, rank, tenant."""
Account = tuple[int, str]
"""Rank, tenant: the account to which the service of a line is charged."""
Place = tuple[int, int, int, bytes]
"""A request's order within its line: 0 for the first of its program (otherwise 1), deadline, arrival, id."""


@dataclass(slots=True)
class Lane:
    """`workers` None: all workers, or sets that differ. `order`: the rank, counter and tenant of each of its lines."""

    workers: frozenset[str] | None
    window: int = 1
    order: list[tuple[int, int, str]] = field(default_factory=list)


class QueueLines:
    """The lanes and lines of one pool in which requests are waiting."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.places: dict[Line, list[Place]] = {}
        self._accounts: list[tuple[int, int, str]] = []
        """The rank, counter and tenant of each account with waiting requests."""
        self._own: dict[str, list[tuple[str, int]]] = {}
        """For each tenant, the lane and rank of each of its lines."""

    def lane_for(self, lane: str, tenant: str) -> str:
        """The lane in which a request may wait."""
        left = MOST_LANES - len(self.lanes)
        if lane == ALL_WORKERS or lane in self.lanes or len(self._own.get(tenant, ())) < left:
            return lane
        return STRAYS

    def line_for(self, lane: str, rank: int, tenant: str) -> Line | None:
        """The line in which a request may wait; None if no further line is allowed."""
        for name, most in ((tenant, MOST_LINES), (SHARED, 2 * MOST_LINES)):
            line, left = (lane, rank, name), most - len(self.places)
            if line in self.places or len(self._own.get(name, ())) < left:
                return line
            if (nearest := self._nearest(line)) is not None:
                return nearest
            if left > 0:
                return line
        return None

    def add(self, line: Line, place: Place, counter: int, workers: frozenset[str] | None) -> None:
        """Add a request. `counter`: that of its account. `workers`: those of its lane, if the lane is new."""
        name, rank, tenant = line
        if (lane := self.lanes.get(name)) is None:
            stray = name == STRAYS
            lane = self.lanes[name] = Lane(None if stray else workers, MOST_WINDOW if stray else 1)
        if line not in self.places:
            if not self.waits((rank, tenant)):
                insort(self._accounts, (rank, counter, tenant))
            self.places[line] = []
            insort(lane.order, (rank, counter, tenant))
            insort(self._own.setdefault(tenant, []), (name, rank))
        insort(self.places[line], place)

    def remove(self, line: Line, place: Place, counter: int) -> None:
        name, rank, tenant = line
        places, lane, own = self.places[line], self.lanes[name], self._own[tenant]
        del places[bisect_left(places, place)]
        if places:
            return
        del self.places[line]
        lane.order.remove((rank, counter, tenant))
        own.remove((name, rank))
        if not self.waits((rank, tenant)):
            self._accounts.remove((rank, counter, tenant))
        if not own:
            del self._own[tenant]
        if not lane.order:
            del self.lanes[name]

    def waits(self, account: Account) -> bool:
        """True if requests of this account are waiting."""
        rank, tenant = account
        return any(own == rank for _, own in self._own.get(tenant, ()))

    def move(self, account: Account, before: int, after: int) -> None:
        """Change the counter of an account, and thereby the place of its lines."""
        rank, tenant = account
        orders = [self.lanes[name].order for name, own in self._own.get(tenant, ()) if own == rank]
        for order in (*orders, *([self._accounts] if orders else [])):
            del order[bisect_left(order, (rank, before, tenant))]
            insort(order, (rank, after, tenant))

    def least_counter(self, line: Line) -> int | None:
        """The lowest counter of other tenants that are waiting with the same rank: those in the same lane, otherwise those in
        any lane; None if there are none."""
        lane, rank, tenant = line
        there = self.lanes[lane].order if lane in self.lanes else []
        for order in (there, self._accounts):
            at = bisect_left(order, (rank, 0, ""))
            for own_rank, counter, other in order[at : at + 2]:
                if own_rank == rank and other != tenant:
                    return counter
        return None

    def width(self, lane: str) -> int:
        """The maximum number of requests of a lane that may be tried at the same time."""
        return MOST_WINDOW if lane == STRAYS else max(1, MOST_WINDOW // len(self.lanes))

    def lines_of(self, lane: str, most: int) -> Iterator[tuple[Line, int]]:
        """The first lines of a lane, in their order, with their counters."""
        for rank, counter, tenant in self.lanes[lane].order[:most]:
            yield (lane, rank, tenant), counter

    def _nearest(self, line: Line) -> Line | None:
        lane, rank, tenant = line
        own = self._own.get(tenant, [])
        at = bisect_left(own, (lane, rank))
        for number in (at, at - 1):
            if 0 <= number < len(own) and own[number][0] == lane:
                return lane, own[number][1], tenant
        return None
