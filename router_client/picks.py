"""A router's own recent picks: load that workers can't have reported yet.

Load samples are up to two seconds old; without this, a router sends a burst to whoever was idle at the last sample.
Counted are the picks made after a worker's last sample; their prompts drain at a fixed rate meanwhile. Other routers'
picks are not known here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvatlas.cost.plan import Load
from kvatlas.fleet import FleetRecord

DRAIN_TOKENS_PER_S = 25_000
FORGOTTEN_AFTER_US = 5_000_000


@dataclass(frozen=True, slots=True)
class _Pick:
    at_us: int
    new_tokens: int
    input_tokens: int


class RecentPicks:
    """Times are microseconds since 1970, as in load samples; a router's clock should be that of its fleet (NTP)."""

    def __init__(self, drain_tokens_per_s: int = DRAIN_TOKENS_PER_S) -> None:
        self._drain = drain_tokens_per_s
        self._picks: dict[str, list[_Pick]] = {}

    def add(self, worker_id: str, new_tokens: int, input_tokens: int, now_us: int) -> None:
        """Remember that a prompt with so many tokens to compute was sent to a worker."""
        self._picks.setdefault(worker_id, []).append(_Pick(now_us, new_tokens, input_tokens))

    def booked(self, pool: Mapping[str, FleetRecord], now_us: int) -> dict[str, Load]:
        """The load of picks that no sample has seen, by worker."""
        booked: dict[str, Load] = {}
        for worker_id, record in pool.items():
            if worker_id not in self._picks:
                continue
            sampled_us = record.load.sampled_us if record.load is not None else 0
            since_us = max(sampled_us, now_us - FORGOTTEN_AFTER_US)
            fresh = [pick for pick in self._picks[worker_id] if pick.at_us > since_us]
            if fresh:
                self._picks[worker_id] = fresh
                booked[worker_id] = self._load(fresh, now_us)
            else:
                del self._picks[worker_id]
        return booked

    def _load(self, picks: list[_Pick], now_us: int) -> Load:
        queued, then_us = 0.0, picks[0].at_us
        for pick in picks:
            queued = max(0.0, queued - self._drained(then_us, pick.at_us)) + pick.new_tokens
            then_us = pick.at_us
        queued = max(0.0, queued - self._drained(then_us, now_us))
        return Load(len(picks), round(queued), 0, sum(pick.input_tokens for pick in picks))

    def _drained(self, from_us: int, to_us: int) -> float:
        return max(0, to_us - from_us) * self._drain / 1_000_000
