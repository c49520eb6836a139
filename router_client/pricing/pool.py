"""A pool's workers in the form that pricing needs, computed once for each read of the fleet records, not for each
request."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit

from kvatlas.addresses import is_loopback, is_never_an_engine, is_private, parse_ip
from kvatlas.blocks.reuse import ReuseRule, ReuseRules
from kvatlas.cost import CostProfile, EngineProfile
from kvatlas.cost.protocol import Load
from kvatlas.fleet.records import (
    EngineEndpoint,
    EngineKind,
    EngineState,
    FleetRecord,
    ForwardPassMetrics,
    KvConnector,
    Liveness,
    Role,
)
from kvatlas.fleet.tenants import include
from kvatlas.reservations.likeness import likeness_of
from kvatlas.reservations.room_and_slo import limit_of
from router_client.pricing.candidates import (
    MOST_SHAPES,
    BlockShape,
    Candidate,
    Group,
    KindRows,
    groups_of,
    shape_of,
)

UNKNOWN_DISPLACED = 0.3
"""`FetchKnowledge.displaced_share` if the size of a cache is unknown."""
MOST_SKIPPED = 64
MOST_TENANTS = 256
"""Maximum number of tenants for which a pool remembers which of its workers they may use."""


class WorkerRules(Protocol):
    """Rules for what each worker's engine reuses: either `ReuseRules`, or `BoundShares`, which learn from answers."""

    def of(self, endpoint: EngineEndpoint) -> ReuseRule: ...


class FetchKnowledge(Protocol):
    """Knows how well fetches of KV between engines work."""

    def share(self, pool_id: str) -> float:
        """Share of the requested tokens that recent fetches delivered, 0 to 1."""

    def displaced_share(self, pool_id: str, capacity_tokens: int | None) -> float:
        """What another copy costs later requests, as a fraction (0 to 1) of the time to compute it. `capacity_tokens`:
        what the pool's caches can hold; None: unknown."""

    def record_prompt(self, pool_id: str, chain: bytes, block_tokens: int) -> None:
        """Record a prompt that may be fetched; `chain`: its packed sequence hashes."""


class NothingFetched:
    """What is known before any fetch."""

    def share(self, _pool_id: str) -> float:
        return 1.0

    def displaced_share(self, _pool_id: str, _capacity_tokens: int | None) -> float:
        return UNKNOWN_DISPLACED

    def record_prompt(self, _pool_id: str, _chain: bytes, _block_tokens: int) -> None:
        return


def why_unable(record: FleetRecord) -> str | None:
    """Why a worker can't serve requests now, in a few words; None if it can."""
    if record.liveness is not Liveness.ALIVE:
        return "no heartbeat"
    return None if record.state is EngineState.UP else f"its engine is {record.state.value}"


def is_readable(record: FleetRecord) -> bool:
    """True if other workers may read this worker's cache now. A draining engine still answers reads."""
    return record.liveness is Liveness.ALIVE and record.state in (EngineState.UP, EngineState.DRAINING)


def is_fetchable(record: FleetRecord) -> bool:
    """True if other engines may fetch from this one: its host is on a private network, or its publisher's identity names it,
    so that no outsider can choose the hosts that engines connect to."""
    endpoint = record.endpoint
    if not endpoint.can_be_fetched_from:
        return False
    ip = parse_ip(urlsplit(endpoint.url).hostname or "")
    return record.vouched or (ip is not None and not is_never_an_engine(ip) and (ip.is_loopback or is_private(ip)))


class ReportedLoads(dict[str, Load | None]):
    """Each worker's load according to its record (None: not reported). It is computed on first access, since a choice in the
    store does not need it."""

    def __init__(self, records: Mapping[str, FleetRecord]) -> None:
        self._records = records

    def __missing__(self, worker_id: str) -> Load | None:
        record = self._records[worker_id]
        load = None if record.load is None else Load.of(record.load, record.endpoint.block_size or 1)
        self[worker_id] = load
        return load


@dataclass(frozen=True, slots=True)
class Pool:
    """One read of a pool.

    `candidates` may get whole requests: workers that prefill and decode; only if there are none, prefill workers that can
    do both. `prefillers` compute prompts alone, `decoders` answers or both. `unable` can't serve anything now; `left_out`
    are all workers that are not candidates; both give the reason for each worker, by id. All are sorted by id.
    `block_shapes` contains every worker that announces blocks; `sources` are the workers from which others may fetch.
    `stores` are the shared stores, read by the workers that name them; they get no requests, so they are neither candidates
    nor left out. `profile`: current prices. `loads`: the loads reported in this read. `groups` contains all candidates, and
    up to MOST_SKIPPED workers that a caller does not want (`skipped`); it is empty if there are more. `kind_rows`: the rows
    of `groups`. `chains`: the chains by which workers' blocks are keyed, with their block sizes. `usual_block_size`: that
    of most candidates; None if no candidate has announced blocks. `tenants`: each list of tenants whose prompts some worker
    may get; `by_tenant`: the pool as tenants see it (`of_tenant`). `fetches`: what is known about fetches from `sources`;
    `connectors`: the connectors of `sources`. `capacity_tokens`: total cache size of all workers that compute prompts,
    whoever may use them; None if one is unknown. `least_cache_tokens`: size of the smallest known cache, whoever may use
    it; 0 if none is known.
    """

    records: Mapping[str, FleetRecord]
    loads: ReportedLoads
    candidates: tuple[Candidate, ...]
    left_out: Mapping[str, str]
    block_shapes: Mapping[BlockShape, frozenset[str]]
    sources: tuple[EngineEndpoint, ...]
    stores: tuple[EngineEndpoint, ...] = ()
    prefillers: tuple[Candidate, ...] = ()
    decoders: tuple[Candidate, ...] = ()
    unable: Mapping[str, str] = field(default_factory=dict)
    profile: CostProfile = field(default_factory=EngineProfile)
    candidate_of: Mapping[str, Candidate] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    skipped: frozenset[str] = frozenset()
    kind_rows: KindRows = field(default_factory=KindRows)
    usual_block_size: int | None = None
    chains: Mapping[str, frozenset[int]] = field(default_factory=dict)
    tenants: frozenset[tuple[str, ...]] = frozenset()
    by_tenant: dict[str, "Pool"] = field(default_factory=dict, compare=False, repr=False)
    fetches: FetchKnowledge = field(default_factory=NothingFetched, compare=False, repr=False)
    connectors: frozenset[KvConnector] = frozenset()
    capacity_tokens: int | None = None
    least_cache_tokens: int = 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many workers may get whole requests, prompts only, and answers."""
        return len(self.candidates), len(self.prefillers), len(self.decoders)

    @property
    def looked_up_shapes(self) -> Mapping[BlockShape, frozenset[str]]:
        """The shapes in which prompts are looked up: up to MOST_SHAPES, namely the most common ones among workers that may
        get requests. A shared store's shape counts once for each of its readers. Workers with other shapes are treated as
        if they held nothing."""
        if len(self.block_shapes) <= MOST_SHAPES:
            return self.block_shapes
        serving = [self.records[id].endpoint for id in self.serving]
        holders = Counter(id for worker in serving for id in (worker.id, *worker.stores))
        count = {shape: sum(holders[id] for id in ids) for shape, ids in self.block_shapes.items()}
        common = sorted(count, key=lambda shape: (-count[shape], shape))[:MOST_SHAPES]
        return {shape: self.block_shapes[shape] for shape in common}

    @property
    def serving(self) -> Set[str]:
        """The ids of all workers that may get requests, or parts of them."""
        return {one.id for some in (self.candidates, self.prefillers, self.decoders) for one in some}

    def fits_everywhere(self, tokens: int) -> bool:
        """True if no worker has a cache that is known to be too small for a prompt of this many tokens."""
        return not 0 < self.least_cache_tokens < tokens

    def serving_prompts_of(self, tokens: int) -> Set[str]:
        """The workers in `serving` whose caches can hold a prompt of this many tokens, or are of unknown size."""
        if self.fits_everywhere(tokens):
            return self.serving
        some = (self.candidates, self.prefillers, self.decoders)
        return {one.id for each in some for one in each if not 0 < one.limit.kv_tokens < tokens}

    @classmethod
    def of(
        cls,
        records: Mapping[str, FleetRecord],
        rules: WorkerRules | None = None,
        profile: CostProfile | None = None,
        fetches: FetchKnowledge | None = None,
    ) -> "Pool":
        candidates = partial(_build_candidates, rules or ReuseRules(), profile or EngineProfile(), {})
        block_shapes: dict[BlockShape, set[str]] = {}
        sources: list[EngineEndpoint] = []
        chains: dict[str, set[int]] = {}
        stores: list[EngineEndpoint] = []
        by_role: dict[Role, list[FleetRecord]] = {role: [] for role in Role}
        unable: dict[str, str] = {}
        for id, record in sorted(records.items()):
            endpoint = record.endpoint
            if endpoint.block_size is not None and (shape := shape_of(endpoint)) is not None:
                block_shapes.setdefault(shape, set()).add(id)
                if not endpoint.is_store:
                    chains.setdefault(endpoint.chain, set()).add(endpoint.block_size)
                if is_readable(record) and (endpoint.is_store or is_fetchable(record)):
                    (stores if endpoint.is_store else sources).append(endpoint)
            if endpoint.is_store:
                continue
            if (why := why_unable(record)) is None:
                by_role[endpoint.role].append(record)
            else:
                unable[id] = why
        whole = by_role[Role.BOTH] or [r for r in by_role[Role.PREFILL] if serves_whole(r.endpoint)]
        wanted = {record.endpoint.id for record in whole}
        of_one_role = {
            record.endpoint.id: f"it only computes {what}"
            for role, what in ((Role.PREFILL, "prompts"), (Role.DECODE, "answers"))
            for record in by_role[role]
            if record.endpoint.id not in wanted
        }
        whole_candidates = candidates(whole)
        groups = groups_of(whole_candidates)
        prefillers = candidates(by_role[Role.PREFILL])
        decoders = sorted([*by_role[Role.DECODE], *by_role[Role.BOTH]], key=lambda record: record.endpoint.id)
        decoder_candidates = whole_candidates if decoders == whole else candidates(decoders)
        computing = [one for one in decoder_candidates if serves_whole(one.endpoint)]
        return cls(
            records,
            ReportedLoads(records),
            whole_candidates,
            dict(sorted({**unable, **of_one_role}.items())),
            {shape: frozenset(ids) for shape, ids in block_shapes.items()},
            tuple(sources),
            tuple(stores),
            prefillers,
            decoder_candidates,
            unable,
            profile or EngineProfile(),
            {candidate.id: candidate for candidate in whole_candidates},
            groups,
            kind_rows=KindRows.of(groups),
            usual_block_size=_usual_block_size(whole_candidates),
            chains={chain: frozenset(sizes) for chain, sizes in chains.items()},
            tenants=frozenset(record.tenants for record in records.values() if record.tenants),
            fetches=fetches or NothingFetched(),
            connectors=frozenset(one.kv_connector for one in sources if one.kv_connector is not None),
            capacity_tokens=_capacity_tokens((*whole_candidates, *prefillers, *computing)),
            least_cache_tokens=_least_cache_tokens((*whole_candidates, *prefillers, *decoder_candidates)),
        )

    def read_again(self, records: Mapping[str, FleetRecord]) -> "Pool | None":
        """The pool for a later read in which only loads and times have changed, built at a microsecond per worker; None
        if anything else has changed."""
        before = self.records
        if len(before) != len(records):
            return None
        for id, record in records.items():
            known = before.get(id)
            if known is not record and (known is None or not _differs_in_load_only(known, record)):
                return None
        return replace(self, records=records, loads=ReportedLoads(records), by_tenant={})

    @property
    def left_out_of_pairs(self) -> Mapping[str, str]:
        """Why no worker can answer a request, alone or with a prefill worker: the reason for each one, by id."""
        prefill_only = {c.id: "it only computes prompts" for c in self.prefillers}
        unreached = {c.id: "it computes no prompts, and no prefill worker reaches it" for c in self.decoders}
        return dict(sorted({**self.unable, **prefill_only, **unreached}.items()))

    def narrow(self, why_not: Callable[[EngineEndpoint], str | None]) -> "Pool":
        """The pool without the workers for which `why_not` gives a reason; nothing is fetched from those either."""
        reasons = {
            id: why
            for id, record in self.records.items()
            if id not in self.unable and not record.endpoint.is_store and (why := why_not(record.endpoint)) is not None
        }
        sources = tuple(endpoint for endpoint in self.sources if why_not(endpoint) is None)
        if not reasons and len(sources) == len(self.sources):
            return self

        def keep(some: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
            return tuple(candidate for candidate in some if candidate.id not in reasons)

        candidates = keep(self.candidates)
        skipped = self.skipped | {id for id in reasons if id in self.candidate_of}
        return replace(
            self,
            candidates=candidates,
            left_out=dict(sorted({**self.left_out, **reasons}.items())),
            sources=sources,
            prefillers=keep(self.prefillers),
            decoders=keep(self.decoders),
            unable=dict(sorted({**self.unable, **reasons}.items())),
            candidate_of={id: candidate for id, candidate in self.candidate_of.items() if id not in reasons},
            groups=self.groups if candidates and len(skipped) <= MOST_SKIPPED else (),
            skipped=skipped,
            usual_block_size=_usual_block_size(candidates),
        )

    def of_tenant(self, tenant_id: str) -> "Pool":
        """The pool without the workers that may not get this tenant's prompts. It is computed once per tenant."""
        if all(include(tenants, tenant_id) for tenants in self.tenants):
            return self
        if (known := self.by_tenant.get(tenant_id)) is not None:
            return known

        def why_not(worker: EngineEndpoint) -> str | None:
            return (
                None if self.records[worker.id].may_see(tenant_id) else "its identity may not see this tenant's prompts"
            )

        # look-alikes have the same tenants: whole groups are left out, and no member of the others needs to be skipped
        groups = tuple(group for group in self.groups if self.records[group.example.id].may_see(tenant_id))
        kind_rows = KindRows.of(groups)
        found = replace(self.narrow(why_not), groups=groups, skipped=self.skipped, kind_rows=kind_rows)
        if len(self.by_tenant) >= MOST_TENANTS:
            self.by_tenant.clear()
        self.by_tenant[tenant_id] = found
        return found

    def without(self, avoid: Collection[str]) -> "Pool":
        """The pool without these workers."""
        return self.narrow(lambda endpoint: "the caller avoids it" if endpoint.id in avoid else None)


def serves_whole(worker: EngineEndpoint) -> bool:
    """True if a worker can compute both prompt and answer, whatever its role.

    An SGLang server that was started for only one of them (`--disaggregation-mode`) waits for a partner; all others can
    do both.
    """
    return worker.role is Role.BOTH or worker.kind is not EngineKind.SGLANG


def _build_candidates(
    rules: WorkerRules, profile: CostProfile, kinds: dict[Hashable, int], records: Sequence[FleetRecord]
) -> tuple[Candidate, ...]:
    """Build candidates. `kinds`: the kinds so far, with their numbers; new kinds are added."""
    candidates = []
    for record in records:
        endpoint = record.endpoint
        size, (_, blocks) = endpoint.block_size or 0, _capacity(record)
        limit = limit_of(record)
        rule, id, cache_blocks = rules.of(endpoint), endpoint.id, 0 if endpoint.events else blocks
        engine = (
            endpoint.kind,
            endpoint.marks,
            endpoint.upper_bound,
            endpoint.lookahead_tokens,
            meeting_form(endpoint),
        )
        block_bytes = endpoint.block_bytes, *sorted(endpoint.tier_block_bytes.items())
        alike = (size, rule, engine, block_bytes, endpoint.events, cache_blocks, profile.alike(id))
        kind = kinds.setdefault(alike, len(kinds))
        candidates.append(Candidate(id, kind, endpoint, size, rule, blocks, limit, likeness_of(record)))
    return tuple(candidates)


def meeting_form(worker: EngineEndpoint) -> Hashable:
    """The properties that two workers must have in common, besides a transfer group, for one to fetch KV from the other;
    None for a worker that does not fetch."""
    if worker.kv_connector is None:
        return None
    near = is_loopback(urlsplit(worker.url).hostname or "")  # reachable only for engines on that machine
    size, lookahead = worker.block_size or 0, worker.lookahead_tokens
    return worker.kind, worker.kv_connector, size, lookahead, worker.marks, worker.chain, near


def _differs_in_load_only(before: FleetRecord, now: FleetRecord) -> bool:
    """True if everything that `Pool.of` reads is the same."""
    if before.state is not now.state or before.liveness is not now.liveness or before.tenants != now.tenants:
        return False
    if vars(before.endpoint) != vars(now.endpoint):  # same result as ==, twice as fast
        return False
    return _capacity(before) == _capacity(now)


def _capacity(record: FleetRecord) -> tuple[int, int]:
    """The fixed part of a load report: the number of request slots, and the number of blocks in the cache; 0 if
    unknown."""
    metrics = record.load.forward_pass if record.load else ForwardPassMetrics()
    return metrics.total_request_slots, metrics.total_kv_blocks


def _usual_block_size(candidates: Sequence[Candidate]) -> int | None:
    sizes = Counter(candidate.block_size for candidate in candidates if candidate.block_size)
    return min(sizes, key=lambda size: (-sizes[size], size), default=None)


def _capacity_tokens(computing: Sequence[Candidate]) -> int | None:
    sizes = {one.id: one.total_blocks * one.block_size for one in computing}.values()
    return sum(sizes) if all(sizes) else None


def _least_cache_tokens(serving: Sequence[Candidate]) -> int:
    return min((one.limit.kv_tokens for one in serving if one.limit.kv_tokens), default=0)
