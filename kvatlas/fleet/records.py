"""Fleet records: the description, state and load of a worker. They cross process boundaries, so pydantic checks them."""

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

import msgpack
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
)

from kvatlas.addresses import check_origin
from kvatlas.errors import InvalidValue
from kvatlas.fleet.capacity import UNKNOWN, Capacity
from kvatlas.fleet.tenants import include
from kvatlas.identity import DEFAULT_TENANT, OWN_CHAIN, check_worker_id, pool_id
from kvatlas.incarnation import check_incarnation
from kvatlas.msgpack_input import unpack
from kvatlas.validation import (
    MAX_ITEMS,
    MAX_TENANTS,
    AckedSeq,
    BlockBytes,
    BlockTokens,
    BootstrapPort,
    Count,
    Granularity,
    Incarnation,
    KvBlocks,
    Lookahead,
    Name,
    Rank,
    Text,
    Url,
    describe_mistake,
)

WorkerId = Annotated[str, AfterValidator(check_worker_id)]
MAX_DIAGNOSIS_TEXT = 512
MAX_SERVED_NAMES = 8
Fraction = Annotated[float, Field(ge=0, le=1)]


class WireRecord(BaseModel):
    """A frozen value that travels as a msgpack map. Unknown fields, from newer versions, are ignored."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="ignore", protected_namespaces=())
    max_bytes: ClassVar[int] = 256 * 1024
    """More than the largest valid record."""

    def pack(self) -> bytes:
        return msgpack.packb(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """The record in a payload. Raises InvalidValue, naming the first wrong field."""
        try:
            fields = unpack(payload, max_bytes=cls.max_bytes)
        except InvalidValue as error:
            raise InvalidValue(f"not a {cls.__name__}: {error}") from error
        try:
            return cls.model_validate(fields, extra="ignore")
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"])
            where = f" field {path}" if path else ""
            raise InvalidValue(describe_mistake(f"{cls.__name__}{where}", first)) from error


class EngineKind(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"
    TENSORRT_LLM = "tensorrt_llm"
    LMCACHE = "lmcache"
    OPEN = "open"
    MOCK = "mock"
    STORE = "store"
    """Not an engine: a shared store with blocks that several engines read."""


class Role(StrEnum):
    """The phases that a worker computes: only prefill, only decode, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class KvConnector(StrEnum):
    """How an engine fetches KV that another engine holds.

    `P2P`: vLLM's OffloadingConnector with a `p2p` tier; the request names the source. `KVCR`: a host tier of vLLM or SGLang
    that takes `kv.fetch` hints; the request names the source and the source's own block hashes. `LMCACHE`: LMCache's P2P
    backend; the engine finds the source on its own, and reads whatever it finds there.
    """

    P2P = "p2p"
    KVCR = "kvcr"
    LMCACHE = "lmcache"


class EngineState(StrEnum):
    """The state of the engine itself, according to its health and metrics; not the sidecar's state."""

    UP = "up"
    DOWN = "down"
    ASLEEP = "asleep"
    DRAINING = "draining"


class EngineEndpoint(WireRecord):
    """A worker's description for routers.

    The sidecar reaches the engine at `base_url`, routers at `advertised_url` (None: the same address). `transfer_groups` are
    the groups whose members' caches this worker can read; with none, the default, it can't use blocks held elsewhere. `stores`:
    the shared stores that its engine reads and writes. For a shared store itself (kind `store`), `read_setup_us` and
    `read_us_per_mib` are its read rate; None: its tier's usual rate. `bootstrap_port`: of an SGLang prefill server's bootstrap
    server (None: SGLang's own default). `granularity`: every g-th block of a chain is published. `eagle`: a hit drops a block.
    `groups`: number of the model's KV cache groups; `alignment_tokens`: hits are multiples of this (0: of blocks).
    `lookahead_tokens`: number of tokens after a block that its hash covers (`kvatlas.blocks.hashing`). `marks`: marks, not
    residency, show where a prompt can be resumed. `upper_bound`: why published residency is only an upper bound of what the
    engine reuses; empty if it is exact. `block_bytes`: bytes of KV cache per block, 0 if unknown; `tier_block_bytes`: the same
    for tiers (labels) whose number differs. `events=False`: the engine publishes no KV events, so what it holds can only be
    predicted from the requests it gets. `chain`: the chain of its blocks' keys (`kvatlas.identity.Scope.chain`).
    `salt_is_tenant`: its blocks belong to the tenants named by requests' cache salts, besides `tenant_id`; None: unknown (an
    older publisher). `kv_connector`: how its engine fetches KV from others (None: it can't, or that is unknown). Others with
    this connector fetch from it at `kv_port` of its host (None: they can't), from its `kv_tiers` (labels of tiers; unknown ones
    are ignored).
    """

    id: WorkerId
    kind: EngineKind
    base_url: Url = ""
    advertised_url: Url | None = None
    role: Role = Role.BOTH
    labels: dict[Text, Text] = Field(default_factory=dict, max_length=MAX_ITEMS)
    model_id: Name
    tokenizer_id: Name
    tenant_id: Name = DEFAULT_TENANT
    locality_domain: Text = ""
    transfer_groups: tuple[Text, ...] = Field(default=(), max_length=MAX_ITEMS)
    dp_rank: Rank | None = None
    bootstrap_port: BootstrapPort | None = None
    block_size: BlockTokens | None = None
    block_bytes: BlockBytes = 0
    tier_block_bytes: dict[Text, Annotated[BlockBytes, Field(ge=1)]] = Field(default_factory=dict, max_length=MAX_ITEMS)
    granularity: Granularity = 1
    eagle: bool = False
    groups: Count = 1
    alignment_tokens: Count = 0
    lookahead_tokens: Lookahead = 0
    marks: bool = False
    upper_bound: Text = ""
    events: bool = True
    chain: Text = OWN_CHAIN
    salt_is_tenant: bool | None = None
    stores: tuple[WorkerId, ...] = Field(default=(), max_length=MAX_ITEMS)
    read_setup_us: Count | None = None
    read_us_per_mib: Count | None = None
    kv_connector: KvConnector | None = None
    kv_port: BootstrapPort | None = None
    kv_tiers: tuple[Text, ...] = Field(default=(), max_length=MAX_ITEMS)

    def bytes_in(self, tier: str) -> int:
        """Bytes of KV cache per block in the tier with this label; 0: unknown."""
        return self.tier_block_bytes.get(tier, self.block_bytes)

    @property
    def is_store(self) -> bool:
        """True for a shared store, which gets no requests."""
        return self.kind is EngineKind.STORE

    @property
    def url(self) -> str:
        """The address at which routers reach the engine: scheme, host and port. Empty if it has none, or if it advertised
        something else."""
        try:
            return check_origin(self.advertised_url or self.base_url)
        except InvalidValue:
            return ""

    @property
    def pool_id(self) -> str:
        return pool_id(self.model_id, self.tokenizer_id)

    @property
    def can_be_fetched_from(self) -> bool:
        """True if engines with the same connector may read its KV."""
        if self.kv_connector is None or not self.kv_tiers or not self.url:
            return False
        return self.kv_connector is KvConnector.LMCACHE or self.kv_port is not None

    def worker_state(self, capacity: Capacity = UNKNOWN) -> "WorkerState":
        """The worker without any load; `capacity`: for example, that of a profile (`kvatlas.fleet.capacity`)."""
        return WorkerState(
            id=self.id,
            locality_domain=self.locality_domain,
            hbm_capacity_bytes=capacity.hbm_bytes,
            cpu_capacity_bytes=capacity.cpu_bytes,
        )


class _Load(WireRecord):
    """A load. It can't be created with an unknown field, because a misspelled field would count as idle."""

    model_config = ConfigDict(extra="forbid")


class ForwardPassMetrics(_Load):
    """An engine's forward-pass metrics; cache usage and prefix hit rate are fractions from 0 to 1. Accepts either these field
    names or those of the router protocol."""

    active_request_slots: Count = Field(
        default=0, validation_alias=AliasChoices("active_request_slots", "request_active_slots")
    )
    total_request_slots: Count = Field(
        default=0, validation_alias=AliasChoices("total_request_slots", "request_total_slots")
    )
    active_kv_blocks: KvBlocks = Field(default=0, validation_alias=AliasChoices("active_kv_blocks", "kv_active_blocks"))
    total_kv_blocks: KvBlocks = Field(default=0, validation_alias=AliasChoices("total_kv_blocks", "kv_total_blocks"))
    requests_waiting: Count = Field(
        default=0, validation_alias=AliasChoices("requests_waiting", "num_requests_waiting")
    )
    cache_usage: Fraction = Field(default=0.0, validation_alias=AliasChoices("cache_usage", "gpu_cache_usage_perc"))
    prefix_hit_rate: Fraction = Field(
        default=0.0, validation_alias=AliasChoices("prefix_hit_rate", "gpu_prefix_cache_hit_rate")
    )


class WorkerState(_Load):
    """A worker's load. `sampled_us`: when the engine reported it (microseconds since 1970). `computed`: the sum of its counters
    of tokens, iterations and finished requests, which change while it computes; 0: not reported."""

    id: WorkerId
    locality_domain: Text = ""
    hbm_capacity_bytes: Count = 0
    hbm_used_bytes: Count = 0
    cpu_capacity_bytes: Count = 0
    cpu_used_bytes: Count = 0
    running_decodes: Count = 0
    queued_prefill_tokens: Count = 0
    forward_pass: ForwardPassMetrics = ForwardPassMetrics()
    sampled_us: Count = 0
    computed: Count = 0

    def with_load(self, queued_prefill_tokens: int, running_decodes: int) -> Self:
        """The same worker with this load. Raises InvalidValue."""
        try:
            return self.model_validate(
                {**dict(self), "queued_prefill_tokens": queued_prefill_tokens, "running_decodes": running_decodes}
            )
        except ValidationError as error:
            raise InvalidValue(
                describe_mistake(f"load field {error.errors()[0]['loc'][0]}", error.errors()[0])
            ) from error


LEFT_OUT = "left_out"
"""The name of the diagnosis for a publisher that leaves out nearly everything that its engine publishes."""


class Diagnosis(WireRecord):
    """A setting that contradicts what a publisher observes: a stable name, the observation, and how to fix it."""

    name: Annotated[str, Field(max_length=32)]
    seen: Annotated[str, Field(max_length=MAX_DIAGNOSIS_TEXT)]
    cure: Annotated[str, Field(max_length=MAX_DIAGNOSIS_TEXT)]


class Heartbeat(WireRecord):
    """Sent each second on `kvatlas.alive.<worker>`.

    `acked_seq` is the seq of the incarnation's last message that the stream has acknowledged, -1 before the first; it shows
    whether the last messages of an idle worker were lost. `load` is None if the engine does not report it.

    These are for `kvatlas doctor`: `diagnoses`; `version`: the publisher's version; `served_names`: the engine's names for its
    model, if none of them is the endpoint's; `awaited_s`: how many seconds the publisher has waited for an engine that has
    never been up; `yielded`: another publisher of this worker has a newer incarnation, so this one publishes nothing. Earlier
    publishers don't send the last four. `fleet_id`: the fleet that the publisher was configured for; indexers of other fleets
    ignore its worker.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    acked_seq: AckedSeq
    state: EngineState
    endpoint: EngineEndpoint
    load: WorkerState | None = None
    sent_us: Count = 0
    diagnoses: Annotated[tuple[Diagnosis, ...], Field(max_length=16)] = ()
    version: Text = ""
    served_names: Annotated[tuple[Text, ...], Field(max_length=MAX_SERVED_NAMES)] = ()
    awaited_s: Count | None = None
    yielded: bool = False
    fleet_id: Text | None = None


def read_heartbeat(payload: bytes, worker_id: str, now_us: int) -> Heartbeat:
    """Unpack a heartbeat that arrived on this worker's subject. Raises InvalidValue if it names a different worker or an
    impossible incarnation."""
    beat = Heartbeat.unpack(payload)
    named = {beat.worker_id, beat.endpoint.id} | ({beat.load.id} if beat.load is not None else set())
    if named != {worker_id}:
        raise InvalidValue(f"it names worker {', '.join(sorted(named - {worker_id}))}; expected {worker_id}")
    check_incarnation(beat.incarnation, now_us)
    return beat


class Liveness(StrEnum):
    """The partition owner's verdict on a worker: it is lost after 5 s without a heartbeat, and retired after 60 s."""

    ALIVE = "alive"
    LOST = "lost"


class Repair(WireRecord):
    """A snapshot that the partition's owner requested from a worker: when and why, in a few words."""

    at_us: Count
    reason: Text


class FleetRecord(WireRecord):
    """One worker in its pool, as the partition's owner last wrote it and routers read it.

    `heard_us`: when its last heartbeat arrived. `load_age_us`: how old the load sample was at that time, by the worker's own
    clock; None: not reported. `trace`: the W3C traceparent of the last applied batch that came from an engine's batch, if both
    the publisher and the indexer trace (`kvatlas.telemetry`). `vouched`: the indexer has checked the address against what the
    worker's publisher may advertise. `tenants`: those whose prompts the worker may get, according to its publisher's identity;
    `*` in a name stands for any text; empty: all. Only for display: `applied_us`: when its messages were last applied, 0 if
    unknown; `doubt`: why the index may be wrong about it now, in a few words, empty if it is not in doubt; `repair`: the last
    repair.
    """

    endpoint: EngineEndpoint
    state: EngineState
    liveness: Liveness
    load: WorkerState | None = None
    incarnation: Incarnation = 0
    heard_us: Count = 0
    load_age_us: Count | None = None
    trace: Text | None = None
    vouched: bool = False
    tenants: tuple[Text, ...] = Field(default=(), max_length=MAX_TENANTS)
    applied_us: Count = 0
    doubt: Text = ""
    repair: Repair | None = None

    @property
    def routable(self) -> bool:
        """True if routers may send requests to the worker."""
        return not self.endpoint.is_store and self.liveness is Liveness.ALIVE and self.state is EngineState.UP

    def may_see(self, tenant_id: str) -> bool:
        """True if the worker may get this tenant's prompts."""
        return not self.tenants or include(self.tenants, tenant_id)


def to_jsonable(record: WireRecord) -> dict[str, Any]:
    """A record as JSON types, for the output of `--json`."""
    return record.model_dump(mode="json")
