"""Fleet records: what a worker is, how it is, and how busy it is. Border types, checked by pydantic."""

from enum import StrEnum
from typing import Annotated, Any, Self

import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kvatlas.errors import InvalidValue
from kvatlas.identity import DEFAULT_TENANT, check_worker_id, pool_id
from kvatlas.validation import Count, Positive, describe_mistake

WorkerId = Annotated[str, AfterValidator(check_worker_id)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class WireRecord(BaseModel):
    """A frozen border value that travels as a msgpack map; unknown fields of a newer version are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    def pack(self) -> bytes:
        return msgpack.packb(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Raises InvalidValue, naming the first wrong field."""
        try:
            return cls.model_validate(msgpack.unpackb(payload))
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"])
            where = f" field {path}" if path else ""
            raise InvalidValue(describe_mistake(f"{cls.__name__}{where}", first)) from error
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise InvalidValue(f"not a {cls.__name__}: {str(error) or type(error).__name__}") from error


class EngineKind(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"
    TENSORRT_LLM = "tensorrt_llm"
    LMCACHE = "lmcache"
    MOCK = "mock"


class Role(StrEnum):
    """What a worker computes: prefill alone, decode alone, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class EngineState(StrEnum):
    """The engine's own state, from its health and metrics; not the sidecar's pulse."""

    UP = "up"
    DOWN = "down"
    ASLEEP = "asleep"
    DRAINING = "draining"


class EngineEndpoint(WireRecord):
    """A worker as a router needs to know it.

    `base_url` is where the sidecar reaches the engine, `advertised_url` where routers do (absent: the same).
    `transfer_groups` are the groups whose members' caches this worker can read from; none by default, and then nothing
    held elsewhere is worth anything to it. `granularity`: every g-th block of a chain is announced. `events` False: the
    engine tells no KV events, so what it holds can only be predicted from what was sent there.
    """

    id: WorkerId
    kind: EngineKind
    base_url: str = ""
    advertised_url: str | None = None
    role: Role = Role.BOTH
    labels: dict[str, str] = Field(default_factory=dict)
    model_id: str
    tokenizer_id: str
    tenant_id: str = DEFAULT_TENANT
    locality_domain: str = ""
    transfer_groups: tuple[str, ...] = ()
    dp_rank: int | None = None
    block_size: Positive | None = None
    block_bytes: Count = 0
    granularity: Positive = 1
    eagle: bool = False
    events: bool = True

    @property
    def url(self) -> str:
        """Where routers reach the engine."""
        return self.advertised_url or self.base_url

    @property
    def pool_id(self) -> str:
        return pool_id(self.model_id, self.tokenizer_id)


class ForwardPassMetrics(WireRecord):
    """An engine's forward-pass metrics; cache usage and prefix hit rate are fractions 0..1."""

    active_request_slots: Count = 0
    total_request_slots: Count = 0
    active_kv_blocks: Count = 0
    total_kv_blocks: Count = 0
    requests_waiting: Count = 0
    cache_usage: Fraction = 0.0
    prefix_hit_rate: Fraction = 0.0


class WorkerState(WireRecord):
    """How busy a worker is. `sampled_us`: when the engine said so (microseconds since 1970)."""

    id: WorkerId
    locality_domain: str = ""
    hbm_capacity_bytes: Count = 0
    hbm_used_bytes: Count = 0
    cpu_capacity_bytes: Count = 0
    cpu_used_bytes: Count = 0
    running_decodes: Count = 0
    queued_prefill_tokens: Count = 0
    forward_pass: ForwardPassMetrics = ForwardPassMetrics()
    sampled_us: Count = 0


class Heartbeat(WireRecord):
    """Sent each second on `kvatlas.alive.<worker>`.

    `acked_seq` is the last seq of the incarnation that the stream acknowledged, -1 before the first: so a lost tail of an
    idle worker is seen. `load` is absent where the engine does not tell it.
    """

    worker_id: WorkerId
    incarnation: Annotated[int, Field(ge=0, lt=1 << 64)]
    acked_seq: Annotated[int, Field(ge=-1)]
    state: EngineState
    endpoint: EngineEndpoint
    load: WorkerState | None = None
    sent_us: Count = 0


class Liveness(StrEnum):
    """What the partition's owner judges of a worker: lost after 5 s without a heartbeat, retired after 60 s."""

    ALIVE = "alive"
    LOST = "lost"


class FleetRecord(WireRecord):
    """One worker in its pool, as the owner last wrote it: what routers read.

    `load_age_us`: how old the load sample was when it was heard, by the worker's own clock; absent: not told.
    `trace`: the W3C traceparent of the last applied batch that one of its engine's led to, where both trace
    (`kvatlas.telemetry`).
    """

    endpoint: EngineEndpoint
    state: EngineState
    liveness: Liveness
    load: WorkerState | None = None
    incarnation: int = 0
    heard_us: Count = 0
    load_age_us: Count | None = None
    trace: str | None = None

    @property
    def routable(self) -> bool:
        """May a router send requests there?"""
        return self.liveness is Liveness.ALIVE and self.state is EngineState.UP


def to_jsonable(record: WireRecord) -> dict[str, Any]:
    """A record as JSON types, for `--json` output."""
    return record.model_dump(mode="json")
