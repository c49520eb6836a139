"""Seeing: what is known of a prompt and its pool before load, within the time of a decision."""

from dataclasses import dataclass

from router_client.counters import RouterCounters
from router_client.decision.fail_open import FAILING, Basis, Breaker, Deadline
from router_client.decision.fleet_cache import CachedFleet
from router_client.pricing.overlap import Lookup, OverlapIndex, look_up, without_index
from router_client.pricing.pool import Pool
from router_client.prompt import Prompt

INDEX_SHARE = 0.6
"""How much of the time of a decision the index may take, so that some is left to book."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a prompt before load: `why` the index is not in it."""

    pool: Pool
    found: Lookup
    basis: Basis
    why: str


class Sight:
    """Asks fleet and index. `load_only` may be switched at any time: then the index is not asked."""

    def __init__(self, index: OverlapIndex, fleet: CachedFleet, counters: RouterCounters, *, load_only: bool) -> None:
        self.load_only = load_only
        self._index = index
        self._fleet = fleet
        self._counters = counters
        self._breaker = Breaker()

    async def pool(self, pool_id: str, deadline: Deadline, *, asks: bool) -> Pool:
        """The pool, in time. `asks` False: as it was last read, if it ever was. Raises Unreachable where it never was."""
        known = self._fleet.last(pool_id)
        if known is None:  # there is nothing to decide with before it is read
            return await self._fleet.pool(pool_id)
        if not asks:
            return known
        try:
            return await deadline.keep(self._fleet.pool(pool_id), INDEX_SHARE)
        except FAILING:
            return self._fleet.last(pool_id) or known

    async def see(self, prompt: Prompt, pool: Pool, deadline: Deadline) -> Seen:
        """What the index holds, or why it was not asked or did not answer."""
        if self.load_only:
            why = "the router is switched to load alone"
        elif not self._breaker.allows():
            why = "index: no answer lately"
        else:
            try:
                found = await deadline.keep(self.look_up(prompt, pool), INDEX_SHARE)
            except FAILING as error:
                self._counters.index_failures += 1
                self._breaker.failed()
                why = f"index: {deadline.why(error)}"
            else:
                self._breaker.succeeded()
                return Seen(pool, found, Basis.COST, "")
        return Seen(pool, without_index(prompt, pool.groups), Basis.LOAD, why)

    async def look_up(self, prompt: Prompt, pool: Pool) -> Lookup:
        """What the index holds. Raises what the store raises."""
        found = await look_up(self._index, prompt, pool.groups)
        self._counters.lookups += found.round_trips
        return found
