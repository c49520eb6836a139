"""Settings: one class a process, each field a flag and an environment variable; flags win.

    field `nats_url`  =  flag `--nats-url`  =  variable `KVATLAS_NATS_URL`

A mistake is one line (`SettingsError`) that names the flag or variable, its value and what was expected. The command
line makes its flags from these classes (`kvatlas_cli.flags`), so the three spellings can't drift apart.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.fleet.records import EngineKind, Role
from kvatlas.identity import DEFAULT_TENANT, Scope, check_worker_id
from kvatlas.redaction import redact_password
from kvatlas.request import DEFAULT_DECODE_TOKENS
from kvatlas.validation import Count, OutputTokens, Positive, describe_expected

ENV_PREFIX = "KVATLAS_"
DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"

NATS_SCHEMES = ("nats", "tls", "ws", "wss")
REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+cluster")
MAX_PARTITIONS = 4_096
"""Each one has a lease and a reader of its own."""
MAX_SECONDS = 10 * 365 * 86_400

ZMQ_SCHEMES = ("tcp", "ipc", "inproc")
HTTP_SCHEMES = ("http", "https")


def _url(*schemes: str, port: bool = False) -> AfterValidator:
    expected = f"expected a URL that begins with {' or '.join(f'{scheme}://' for scheme in schemes)}"

    def check(value: str) -> str:
        try:
            parts = urlsplit(value)
            number = parts.port if parts.scheme != "unix" and "*" not in value else None
        except ValueError as error:
            raise ValueError(f"{expected}, with a port from 0 to 65535") from error
        if parts.scheme not in schemes or not (parts.netloc or parts.path.strip("/")):
            raise ValueError(expected)
        if port and parts.scheme == "tcp" and number is None and not value.rpartition(":")[2].isdigit():
            raise ValueError(f"{expected}, and a port")
        return value

    return AfterValidator(check)


def _redis_database(value: str) -> str:
    """Redis' own client takes database 0 for a path that is no number."""
    parts = urlsplit(value)
    if parts.scheme != "unix" and not re.fullmatch(r"/?[0-9]{0,9}", parts.path):
        raise ValueError("expected a database number, or nothing, behind the port")
    return value


def _worker_id(value: str) -> str:
    try:
        return check_worker_id(value)
    except InvalidValue as error:
        raise ValueError("expected 1 to 64 of A-Z a-z 0-9 _ -") from error


def _comma_list(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _labels(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if any(not separator or not name.strip() for name, separator, _ in pairs):
        raise ValueError("expected name=value pairs, separated by commas")
    return {name.strip(): text.strip() for name, _, text in pairs}


NatsUrl = Annotated[str, _url(*NATS_SCHEMES)]
RedisUrl = Annotated[str, _url(*REDIS_SCHEMES), AfterValidator(_redis_database)]
ZmqEndpoint = Annotated[str, _url(*ZMQ_SCHEMES, port=True)]
HttpUrl = Annotated[str, _url(*HTTP_SCHEMES)]
WorkerId = Annotated[str, AfterValidator(_worker_id)]
CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_comma_list)]
Labels = Annotated[dict[str, str], NoDecode, BeforeValidator(_labels)]
Port = Annotated[int, Field(ge=0, le=65535)]
Slices = Annotated[int, Field(ge=1, le=MAX_PARTITIONS)]
Seconds = Annotated[int, Field(ge=1, le=MAX_SECONDS)]
Name = Annotated[str, Field(min_length=1, max_length=512)]


class ProcessSettings(BaseSettings):
    """What every process takes. Build with `load`, not with the constructor."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, protected_namespaces=()
    )

    wait: bool = Field(
        default=True, description="Try an unreachable server again with back-off; without it exit 1 at once."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="From which level up to log on stderr."
    )

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """Settings from flags (None: not given), else the environment, else the defaults. Raises SettingsError."""
        given = {name: value for name, value in flags.items() if value is not None}
        try:
            return cls(**given)
        except ValidationError as error:
            raise SettingsError(_line(error, given)) from None


class Settings(ProcessSettings):
    """What every command takes that uses servers which run already."""

    nats_url: NatsUrl = Field(default=DEFAULT_NATS_URL, description="NATS server: nats://, tls://, ws:// or wss://.")
    redis_url: RedisUrl = Field(
        default=DEFAULT_REDIS_URL, description="Redis or Valkey: redis://, rediss://, unix:// or redis+cluster://."
    )


class DoctorSettings(Settings):
    """One examination."""

    wait: bool = Field(
        default=False, description="Try an unreachable server again with back-off; without it that is a finding."
    )
    listen_s: float = Field(default=2.5, gt=0, description="Seconds to listen to workers' heartbeats, one a second.")


class UpSettings(ProcessSettings):
    """Everything on one machine."""

    nats_url: NatsUrl | None = Field(default=None, description="Use this NATS server; default: an embedded one.")
    redis_url: RedisUrl | None = Field(default=None, description="Use this store; default: an embedded Valkey.")
    state_dir: Path | None = Field(default=None, description="Folder to keep everything in; default: a temporary one.")
    nats_port: Port = Field(default=0, description="Port of the embedded NATS; 0: any free one.")
    redis_port: Port = Field(default=0, description="Port of the embedded Valkey; 0: any free one.")
    status_port: Port | None = Field(default=None, description="Port of the indexer's status page; default: none.")


class IndexerSettings(Settings):
    """One indexer replica."""

    member_id: WorkerId | None = Field(default=None, description="Name of this replica; default: host name and pid.")
    partitions: Slices | None = Field(
        default=None, description="Slices of the stream; default: as the store is laid out, or 64 in an empty one."
    )
    shards: Slices | None = Field(
        default=None, description="Slots of the store; default: as the store is laid out, or 1 in an empty one."
    )
    retire_after_s: Seconds = Field(
        default=60, description="Seconds without a heartbeat after which a worker's blocks are dropped."
    )
    side_index: bool = Field(default=False, description="Keep parents too, so that children of a prefix can be asked.")
    status_host: Name = Field(default="127.0.0.1", description="Address of the status page.")
    status_port: Port | None = Field(
        default=None, description="Port of the status page; 0: any free one; default: none."
    )
    scrub_period_s: float = Field(
        default=600.0, gt=0, description="Seconds in which every holder's blocks are recounted against their digest."
    )
    stream_replicas: Positive = Field(default=1, description="Replicas of the event stream, where it is made.")
    stream_max_bytes: Positive = Field(default=1 << 30, description="Bytes the event stream may take.")
    stream_max_age_s: Seconds = Field(default=1800, description="Seconds the event stream keeps a message.")
    stream_storage: Literal["file", "memory"] = Field(default="file", description="Where the stream is kept.")

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """As every settings'; where both are given, the shards divide the partitions."""
        settings = super().load(**flags)
        if settings.shards and settings.partitions and settings.partitions % settings.shards:
            line = f"--shards is {settings.shards}; expected a divisor of {settings.partitions} partitions"
            raise SettingsError(line)
        return settings


class PublishSettings(Settings):
    """One publisher process: for one engine, or for all ranks of one."""

    engine: EngineKind = Field(description="Kind of engine: vllm, sglang, ...")
    events: bool = Field(
        default=True,
        description="The engine publishes KV events. Without them routers predict what it holds from what they send there.",
    )
    endpoint: ZmqEndpoint | None = Field(
        default=None, description="The engine's event socket, e.g. tcp://127.0.0.1:5557; needed with events."
    )
    replay_endpoint: ZmqEndpoint | None = Field(default=None, description="The engine's replay socket.")
    worker_id: WorkerId = Field(description="Name of this worker in the fleet; with --dp-rank the instance's.")
    model_id: Name = Field(description="Model that the engine serves.")
    tokenizer_id: Name | None = Field(default=None, description="Its tokenizer; default: the model id.")
    tenant_id: Name = Field(default=DEFAULT_TENANT, description="Tenant whose blocks these are.")
    block_size: Positive | None = Field(default=None, description="Tokens a block; default: as the events say.")
    block_bytes: Count = Field(default=0, description="Bytes of KV cache a block; 0: not known.")
    dp_rank: Count | None = Field(default=None, description="Data-parallel rank: ports count up, worker is W-dpN.")
    dp_size: int | None = Field(
        default=None, ge=1, le=1024, description="Serve ranks 0 to N-1 in this process, each as with --dp-rank."
    )
    state_dir: Path | None = Field(default=None, description="Folder for the saved ledger and dead letters.")
    outbox_bytes: Positive = Field(
        default=64 << 20, description="Bytes of messages kept while NATS is away; beyond, a snapshot follows."
    )
    topic: str = Field(default="", description="Topic of the event socket.")
    bind: bool = Field(default=False, description="Bind the endpoints (the engine connects) instead of connecting.")
    granularity: Positive = Field(default=1, description="Announce every g-th block only.")
    partitions: Slices = Field(default=64, description="Slices of the stream, as the store is laid out.")
    set_semantics: bool = Field(default=False, description="The engine announces hits again: don't count references.")
    salt_is_tenant: bool = Field(default=False, description="Take an event's cache salt as its tenant.")
    distrust_poison: bool = Field(
        default=False,
        description="Give up what was held when an event can't be read that may have been a removal.",
    )
    eagle: bool = Field(
        default=False, description="The engine speculates with EAGLE: it reuses one block less of a hit."
    )
    engine_url: HttpUrl | None = Field(default=None, description="The engine's HTTP address: health and metrics.")
    advertise_url: HttpUrl | None = Field(default=None, description="Where routers reach the engine.")
    role: Role = Field(default=Role.BOTH, description="What the worker computes: prefill, decode or both.")
    locality_domain: str = Field(default="", description="Where it runs: rack, zone, node.")
    labels: Labels = Field(default_factory=dict, description="name=value pairs, separated by commas.")
    transfer_groups: CommaList = Field(default=(), description="Groups whose caches it can read, by commas.")

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """As every settings'; what an engine with events needs, and one without, differs."""
        settings = super().load(**flags)
        if settings.events and settings.endpoint is None:
            raise SettingsError(_missing("endpoint", "the engine's event socket, or --no-events"))
        if not settings.events and settings.engine_url is None:
            raise SettingsError(_missing("engine_url", "the engine's HTTP address: all that is known with --no-events"))
        if settings.dp_rank is not None and settings.dp_size is not None:
            raise SettingsError("--dp-rank and --dp-size are both given; expected one rank, or how many there are")
        return settings

    @property
    def ranks(self) -> Sequence[Self]:
        """The settings of each rank that the process serves; these alone, where it serves one."""
        if self.dp_size is None:
            return [self]
        return [self.model_copy(update={"dp_rank": rank, "dp_size": None}) for rank in range(self.dp_size)]


class PromptSettings(Settings):
    """A question about one prompt."""

    model_id: Name = Field(description="Model that the request is for.")
    tokenizer_id: Name | None = Field(default=None, description="Its tokenizer; default: the model id.")
    adapter_id: Name | None = Field(default=None, description="LoRA adapter; default: none.")
    tenant_id: Name = Field(default=DEFAULT_TENANT, description="Tenant of the request.")
    output_tokens: OutputTokens = Field(default=DEFAULT_DECODE_TOKENS, description="Tokens it is expected to generate.")
    cost_profile: Literal["engine", "quillcache"] = Field(default="engine", description="What prices the workers.")

    @property
    def scope(self) -> Scope:
        return Scope(self.model_id, self.tokenizer_id or self.model_id, self.adapter_id, self.tenant_id)


class ProxySettings(Settings):
    """The OpenAI-compatible proxy."""

    host: Name = Field(default="127.0.0.1", description="Address to listen on.")
    port: Port = Field(default=8080, description="Port to listen on; 0: any free one.")
    tokenizer: Name = Field(
        default="engine",
        description="How requests become token ids: `engine` asks an engine's /tokenize, `none` doesn't (routing by load), "
        "else a folder with a model's tokenizer.json and chat template.",
    )
    tokenizer_deadline_ms: float = Field(
        default=200.0, gt=0, description="Milliseconds for a request's token ids; then it is routed by load."
    )
    tenant_id: Name = Field(default=DEFAULT_TENANT, description="Tenant of the requests.")
    salt_is_tenant: bool = Field(default=False, description="Take a request's cache salt as its tenant.")
    output_tokens: OutputTokens = Field(
        default=DEFAULT_DECODE_TOKENS, description="Tokens that requests are expected to generate, at most."
    )
    cost_profile: Literal["engine", "quillcache"] = Field(default="engine", description="What prices the workers.")
    decision_deadline_ms: float = Field(
        default=10.0,
        gt=0,
        description="Milliseconds that a decision may wait for the store; then it is made without it.",
    )
    load_only: bool = Field(default=False, description="Don't ask the index: route by load alone.")
    learn: bool = Field(default=True, description="Learn from answers how fast workers are (cost profile engine).")
    follow: Literal["cost", "round_robin"] = Field(
        default="cost",
        description="Which policy decides; with another one than cost, that is only recorded (shadow mode).",
    )
    slo: Literal["told", "penalty", "filter"] = Field(
        default="told",
        description="What becomes of a worker that would miss the SLO: answers say so, it costs more, or it is left out.",
    )
    slo_ttft_ms: float = Field(default=800.0, gt=0, description="SLO: milliseconds to the first token.")
    slo_tpot_ms: float = Field(default=80.0, gt=0, description="SLO: milliseconds for each further token.")
    shed: bool = Field(
        default=False, description="Answer 503 where every engine is so far from the SLO that the advice is to shed."
    )
    select_labels: Labels = Field(
        default_factory=dict, description="Only workers with these labels: name=value pairs, separated by commas."
    )
    allow_workers: CommaList = Field(default=(), description="Only these workers, by commas; default: all.")
    deny_workers: CommaList = Field(default=(), description="Not these workers, by commas.")
    session_ms: float = Field(
        default=0.0, ge=0, description="Milliseconds of cost that keep a session at its worker; 0: sessions have none."
    )
    temperature: float = Field(
        default=0.0, ge=0, description="0: the cheapest worker; above: dearer ones too, the more the less they differ."
    )
    max_attempts: Positive = Field(default=4, description="Workers tried for one request before it is given up.")
    ask_usage: bool = Field(
        default=True, description="Ask for the usage of streams too, and leave it out where the client did not ask."
    )
    engine_timeout_s: float = Field(
        default=600.0, gt=0, description="Seconds without a byte after which an engine counts as gone."
    )
    held_s: float = Field(
        default=600.0, gt=0, description="Seconds after which a /v1/route without its /v1/done is given back."
    )


def flag_of(field: str) -> str:
    """A field's flag."""
    return "--" + field.replace("_", "-")


def variable_of(field: str) -> str:
    """A field's environment variable."""
    return ENV_PREFIX + field.upper()


def _missing(field: str, expected: str) -> str:
    return f"{flag_of(field)} (or {variable_of(field)}) is missing; expected {expected}"


def _line(error: ValidationError, flags: dict[str, Any]) -> str:
    """The first mistake as one line."""
    first = error.errors()[0]
    field = str(first["loc"][0]).lower()
    if first["type"] == "missing":
        return f"{flag_of(field)} (or {variable_of(field)}) is missing; it has no default"
    name = flag_of(field) if field in flags else variable_of(field)
    value = first["input"]
    shown = redact_password(value) if isinstance(value, str) else value
    return f"{name} is {shown!r:.200}; {describe_expected(first)}"
