"""A pool as ranking needs it: worked out once for each reading of its records, not for each request."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvatlas.blocks.reuse import ReuseRule, ReuseRules
from kvatlas.cost import CostProfile, EngineProfile
from kvatlas.cost.protocol import Load, mean_load
from kvatlas.fleet.records import (
    EngineEndpoint,
    EngineKind,
    EngineState,
    FleetRecord,
    ForwardPassMetrics,
    Liveness,
    Role,
)
from kvatlas.reservations.limits import UNKNOWN_LIMIT, Limit

Group = tuple[int, int]
"""Workers that cut blocks alike: (block size, granularity)."""


def why_unable(record: FleetRecord) -> str | None:
    """Why a worker gets no requests now, in a few words; None where it may."""
    if record.liveness is not Liveness.ALIVE:
        return "it is not heard of"
    return None if record.state is EngineState.UP else f"its engine is {record.state.value}"


def may_give(record: FleetRecord) -> bool:
    """May other workers read this one's cache now? A draining engine still answers reads."""
    return record.liveness is Liveness.ALIVE and record.state in (EngineState.UP, EngineState.DRAINING)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may get a prompt. `kind`: the same number for workers on which a request meets the same, but for what
    they hold and their load. `block_size` 0: it has announced nothing yet. `load`: told, or the pool's mean.
    `total_blocks`: of its cache, 0 where it does not tell. `limit`: the room that it has."""

    id: str
    kind: int
    endpoint: EngineEndpoint
    block_size: int
    rule: ReuseRule
    load: Load
    load_known: bool
    total_blocks: int = 0
    limit: Limit = UNKNOWN_LIMIT


@dataclass(frozen=True, slots=True)
class Pool:
    """One reading of a pool.

    `candidates` may get whole requests: those that compute prompts and answers; only where there are none, those that
    compute prompts alone and can do both. `prefillers` compute prompts alone, `decoders` answers or both. `unable` get
    nothing now, `left_out` are all that are no candidates; both with the reason, by id. All are sorted by id. `groups`
    has every worker that announces blocks; `givers` are those whose copies others may read, if they share a transfer
    group. `profile`: what prices them now.
    """

    records: Mapping[str, FleetRecord]
    candidates: tuple[Candidate, ...]
    left_out: Mapping[str, str]
    groups: Mapping[Group, frozenset[str]]
    givers: tuple[EngineEndpoint, ...]
    prefillers: tuple[Candidate, ...] = ()
    decoders: tuple[Candidate, ...] = ()
    unable: Mapping[str, str] = field(default_factory=dict)
    profile: CostProfile = field(default_factory=EngineProfile)

    @classmethod
    def of(
        cls, records: Mapping[str, FleetRecord], rules: ReuseRules | None = None, profile: CostProfile | None = None
    ) -> "Pool":
        candidates = partial(_candidates, rules or ReuseRules(), profile or EngineProfile(), {})
        groups: dict[Group, set[str]] = {}
        givers: list[EngineEndpoint] = []
        by_role: dict[Role, list[FleetRecord]] = {role: [] for role in Role}
        unable: dict[str, str] = {}
        for id, record in sorted(records.items()):
            endpoint = record.endpoint
            if endpoint.block_size is not None:
                groups.setdefault((endpoint.block_size, endpoint.granularity), set()).add(id)
                if endpoint.transfer_groups and may_give(record):
                    givers.append(endpoint)
            if (why := why_unable(record)) is None:
                by_role[endpoint.role].append(record)
            else:
                unable[id] = why
        able = by_role[Role.BOTH] or [r for r in by_role[Role.PREFILL] if serves_whole(r.endpoint)]
        wanted = {record.endpoint.id for record in able}
        others = {
            record.endpoint.id: f"it only computes {what}"
            for role, what in ((Role.PREFILL, "prompts"), (Role.DECODE, "answers"))
            for record in by_role[role]
            if record.endpoint.id not in wanted
        }
        whole = candidates(able)
        decoders = sorted([*by_role[Role.DECODE], *by_role[Role.BOTH]], key=lambda record: record.endpoint.id)
        return cls(
            records,
            whole,
            dict(sorted({**unable, **others}.items())),
            {k: frozenset(ids) for k, ids in groups.items()},
            tuple(givers),
            candidates(by_role[Role.PREFILL]),
            whole if decoders == able else candidates(decoders),
            unable,
            profile or EngineProfile(),
        )

    @property
    def unable_to_answer(self) -> Mapping[str, str]:
        """Why no worker can answer a request, with or without a partner."""
        alone = {c.id: "it only computes prompts" for c in self.prefillers}
        answers = {c.id: "it computes no prompts, and no prefill worker reaches it" for c in self.decoders}
        return dict(sorted({**self.unable, **alone, **answers}.items()))

    def narrowed(self, why_not: Callable[[EngineEndpoint], str | None]) -> "Pool":
        """The same without the workers that there is a reason against."""
        reasons = {
            id: why
            for id, record in self.records.items()
            if id not in self.unable and (why := why_not(record.endpoint)) is not None
        }
        if not reasons:
            return self

        def left(some: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
            return tuple(candidate for candidate in some if candidate.id not in reasons)

        return replace(
            self,
            candidates=left(self.candidates),
            left_out=dict(sorted({**self.left_out, **reasons}.items())),
            prefillers=left(self.prefillers),
            decoders=left(self.decoders),
            unable=dict(sorted({**self.unable, **reasons}.items())),
        )

    def without(self, avoid: Collection[str]) -> "Pool":
        """The same without these workers."""
        return self.narrowed(lambda endpoint: "it is to be avoided" if endpoint.id in avoid else None)


def serves_whole(worker: EngineEndpoint) -> bool:
    """Can a worker compute both prompt and answer, whatever its role?

    An SGLang server started for one of them (`--disaggregation-mode`) waits for a partner; others can do both.
    """
    return worker.role is Role.BOTH or worker.kind is not EngineKind.SGLANG


def _candidates(
    rules: ReuseRules, profile: CostProfile, kinds: dict[Hashable, int], records: Sequence[FleetRecord]
) -> tuple[Candidate, ...]:
    """`kinds`: the numbers of kinds met so far."""
    loads = [Load.of(r.load, r.endpoint.block_size or 1) if r.load else None for r in records]
    mean = mean_load([load for load in loads if load is not None])
    made = []
    for record, load in zip(records, loads, strict=True):
        endpoint = record.endpoint
        told = record.load.forward_pass if record.load else ForwardPassMetrics()
        size, blocks = endpoint.block_size or 0, told.total_kv_blocks
        limit = Limit(told.total_request_slots, blocks * size)
        rule, id, cache = rules.of(endpoint), endpoint.id, 0 if endpoint.events else blocks
        alike = (size, rule, endpoint.block_bytes, endpoint.events, cache, profile.alike(id))
        kind = kinds.setdefault(alike, len(kinds))
        made.append(Candidate(id, kind, endpoint, size, rule, load or mean, load is not None, blocks, limit))
    return tuple(made)
