"""A pool as ranking needs it: worked out once for each reading of its records, not for each request."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from kvatlas.cost import CostProfile, EngineProfile
from kvatlas.cost.plan import Load, mean_load
from kvatlas.fleet import EngineEndpoint, EngineState, FleetRecord, Liveness, Role
from kvatlas.reuse import ReuseRule, ReuseRules

Group = tuple[int, int]
"""Workers that cut blocks alike: (block size, granularity)."""


def may_get(record: FleetRecord) -> bool:
    """May this worker get a prompt now?"""
    return record.routable and record.endpoint.role is not Role.DECODE


def may_give(record: FleetRecord) -> bool:
    """May other workers read this one's cache now? A draining engine still answers reads."""
    return record.liveness is Liveness.ALIVE and record.state in (EngineState.UP, EngineState.DRAINING)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may get a prompt. `block_size` 0: it has announced nothing yet. `load`: told, or the pool's mean.
    `total_blocks`: of its cache, 0 where it does not tell."""

    endpoint: EngineEndpoint
    block_size: int
    rule: ReuseRule
    load: Load
    load_known: bool
    total_blocks: int = 0

    @property
    def id(self) -> str:
        return self.endpoint.id


@dataclass(frozen=True, slots=True)
class Pool:
    """One reading of a pool.

    `candidates` and `left_out` (ids) are sorted by id; `groups` has every worker that announces blocks; `givers` are
    those whose copies others may read, if they share a transfer group. `profile`: what prices them now.
    """

    records: Mapping[str, FleetRecord]
    candidates: tuple[Candidate, ...]
    left_out: tuple[str, ...]
    groups: Mapping[Group, frozenset[str]]
    givers: tuple[EngineEndpoint, ...]
    profile: CostProfile = field(default_factory=EngineProfile)

    @classmethod
    def of(
        cls, records: Mapping[str, FleetRecord], rules: ReuseRules | None = None, profile: CostProfile | None = None
    ) -> "Pool":
        applying = rules or ReuseRules()
        groups: dict[Group, set[str]] = {}
        givers: list[EngineEndpoint] = []
        able: list[tuple[EngineEndpoint, Load | None, int]] = []
        left_out: list[str] = []
        for id, record in sorted(records.items()):
            endpoint = record.endpoint
            if endpoint.block_size is not None:
                groups.setdefault((endpoint.block_size, endpoint.granularity), set()).add(id)
                if endpoint.transfer_groups and may_give(record):
                    givers.append(endpoint)
            if may_get(record):
                load = Load.of(record.load, endpoint.block_size or 1) if record.load else None
                able.append((endpoint, load, record.load.forward_pass.total_kv_blocks if record.load else 0))
            else:
                left_out.append(id)
        mean = mean_load([load for _, load, _ in able if load is not None])
        candidates = tuple(
            Candidate(endpoint, endpoint.block_size or 0, applying.of(endpoint), load or mean, load is not None, blocks)
            for endpoint, load, blocks in able
        )
        cut_alike = {group: frozenset(ids) for group, ids in groups.items()}
        prices = profile or EngineProfile()
        return cls(records, candidates, tuple(left_out), cut_alike, tuple(givers), prices)

    def without(self, avoid: Collection[str]) -> "Pool":
        """The same without these candidates."""
        return replace(
            self,
            candidates=tuple(candidate for candidate in self.candidates if candidate.id not in avoid),
            left_out=tuple(sorted({*self.left_out, *(c.id for c in self.candidates if c.id in avoid)})),
        )
