"""Settings of commands that are not services of a fleet: `up`, and queries."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator

from kvatlas.errors import SettingsError
from kvatlas.fleet.fleet_identity import FleetId
from kvatlas.identity import DEFAULT_TENANT, OWN_CHAIN, Scope, check_chain
from kvatlas.redaction import redact_url
from kvatlas.settings.engine import EngineAccessSettings
from kvatlas.settings.field_types import CommaList, Name, NatsUrl, PartitionCount, Port, RedisUrl
from kvatlas.settings.http import HttpSettings
from kvatlas.settings.process import (
    DEFAULT_NATS_URL,
    DEFAULT_REDIS_URL,
    OWN,
    HelpGroups,
    NatsSettings,
    ProcessSettings,
    ServerSettings,
    Settings,
    flag_of,
    missing_line,
    read_secret,
    variable_of,
)
from kvatlas.settings.publisher import fleet_id_field
from kvatlas.validation import DEFAULT_DECODE_TOKENS, OutputTokens, Positive, Text


class UpSettings(EngineAccessSettings, ServerSettings, HttpSettings):
    """Settings of `kvatlas up`: everything on one machine."""

    nats_url: NatsUrl | None = Field(
        default=None, description="NATS server to use; default: an embedded one is started."
    )
    redis_url: RedisUrl | None = Field(
        default=None, description="Redis or Valkey to use; default: an embedded Valkey is started."
    )
    state_dir: Path | None = Field(default=None, description="Folder for all data; default: a temporary one.")
    router: bool = Field(default=False, description="Also start a router for the given engines.")
    router_port: Port = Field(default=8080, description="Port of that router; 0: any free port.")
    nats_port: Port | None = Field(
        default=None,
        description="Port of the embedded NATS; 0: any free port. Default: 4222 with --router, otherwise 0.",
    )
    redis_port: Port | None = Field(
        default=None,
        description="Port of the embedded Valkey; 0: any free port. Default: 6379 with --router, otherwise 0.",
    )
    status_port: Port | None = Field(default=None, description="Port of the indexer's status page; default: no page.")
    side_index: bool | None = Field(
        default=None,
        description="Store each block's parent too, for `kvatlas children`; default: as the store was laid out, off in an "
        "empty one.",
    )

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """See `ProcessSettings.load`. Refuses a port for a server that will not be started."""
        settings = super().load(**flags)
        for url, port in (("nats_url", "nats_port"), ("redis_url", "redis_port")):
            joined = getattr(settings, url)
            if joined is not None and port in settings.model_fields_set:
                raise SettingsError(
                    f"{_spelled(port)} is {getattr(settings, port)}, but {_spelled(url)} is {redact_url(joined)}: "
                    "that server is used and none is started; expected only one of the two"
                )
        if "router_port" in settings.model_fields_set and not settings.router:
            raise SettingsError(
                f"{_spelled('router_port')} is {settings.router_port}, but no router is started; add --router"
            )
        return settings

    def embedded_port(self, kind: Literal["nats", "redis"]) -> int:
        """The port of the embedded server; 0: any free port. With a router, it is the port that other commands use by
        default."""
        given: int | None = getattr(self, f"{kind}_port")
        if given is not None:
            return given
        default = urlsplit(DEFAULT_NATS_URL if kind == "nats" else DEFAULT_REDIS_URL).port
        return (default or 0) if self.router else 0


class CollectSettings(EngineAccessSettings, NatsSettings):
    """Settings of `kvatlas collect`: a publisher for each engine pod, outside the pods."""

    help_groups: ClassVar[HelpGroups] = {OWN: "selector engine_port fleet_id state_dir partitions"}

    selector: str = Field(
        description="Labels of the engines' pods in this pod's namespace, as kubectl's --selector takes them.",
        min_length=1,
    )
    engine_port: Annotated[Port, Field(ge=1)] = Field(default=8000, description="HTTP port of each engine.")
    fleet_id: FleetId | None = fleet_id_field()
    state_dir: Path | None = Field(default=None, description="Folder for the saved ledgers; default: a temporary one.")
    partitions: PartitionCount = Field(default=64, description="Partitions of the event stream, as for the indexers.")


class RecordSettings(ProcessSettings):
    """What to record, and how much of it."""

    routers: CommaList = Field(description="URLs of routers that were started with --record, separated by commas.")
    minutes: float = Field(default=60.0, gt=0, le=1e6, description="Stop after this many minutes.")
    mib: Positive = Field(default=64, description="Stop when this many MiB are written, before they are compressed.")
    model_id: Name | None = Field(default=None, description="Record requests for this model only; default: all.")
    token_file: Path | None = Field(default=None, description="File with the token that the routers require.")

    @field_validator("routers")
    @classmethod
    def _check_routers(cls, routers: tuple[str, ...]) -> tuple[str, ...]:
        if not routers or not all(url.startswith(("http://", "https://")) for url in routers):
            raise ValueError("expected URLs that begin with http:// or https://, separated by commas")
        return routers

    @property
    def token(self) -> str | None:
        """The token. Raises SettingsError if its file can't be read."""
        return None if self.token_file is None else read_secret(self.token_file, "--token-file").strip()


class QuerySettings(Settings):
    """Settings of a query. Unlike a service, it waits for a server only if asked to."""

    wait: bool = Field(
        default=False, description="Retry an unreachable server with back-off; with --no-wait report it at once."
    )


class LayoutSettings(QuerySettings):
    """`kvatlas layout`."""

    answer: int | None = Field(
        default=None, ge=0, description="Switch to the layout with this number as soon as it holds all workers."
    )
    delete: int | None = Field(default=None, ge=0, description="Delete the layout with this number and its blocks.")
    deadline_s: float = Field(default=300.0, gt=0, description="Seconds to wait until the layout holds all workers.")


class ScopeSettings(QuerySettings):
    """Settings of a query within one identity scope."""

    model_id: Name | None = Field(default=None, description="Model that the request is for, unless its hints name one.")
    tokenizer_id: Name | None = Field(default=None, description="Tokenizer of the model; default: the model id.")
    adapter_id: Name | None = Field(default=None, description="LoRA adapter; default: none.")
    tenant_id: Name = Field(default=DEFAULT_TENANT, description="Tenant of the request.")

    @property
    def scope(self) -> Scope:
        """The scope. Raises SettingsError if no model is given."""
        if self.model_id is None:
            raise SettingsError(missing_line("model_id", "expected the model that the request is for"))
        return Scope(self.model_id, self.tokenizer_id or self.model_id, self.adapter_id, self.tenant_id)


class DoctorSettings(ScopeSettings, EngineAccessSettings):
    """Settings of `kvatlas doctor`. Without a scope of its own, it examines the one in --request."""

    identities: Path | None = Field(
        default=None, description="The indexers' file of identities: shows which workers they refuse."
    )
    listen_s: float = Field(
        default=2.5, gt=0, description="Seconds to listen for heartbeats; each worker sends one a second."
    )
    status_urls: CommaList = Field(
        default=(),
        description="Status pages of publishers, indexers and routers to check too, separated by commas. They show "
        "publishers on another NATS, and certificates that expire.",
    )
    expected: Path | None = Field(
        default=None,
        description="File with the ids of all workers that should exist, one per line, or with the output of "
        "`kubectl get pods -o name`; - for stdin. Default: the workers of the last hour.",
    )
    expected_selector: Text | None = Field(
        default=None,
        description="Labels of the engines' pods in this pod's namespace, as in kubectl's --selector; each pod "
        "should be a worker. Needs a service account that may list pods, such as the collector's.",
    )
    strict: bool = Field(default=False, description="Exit with 1 for warnings too.")


class TopSettings(QuerySettings):
    """Settings of the live view of the fleet."""

    interval_s: float = Field(default=2.0, ge=0.2, le=3600, description="Seconds between two updates.")


class BlockSettings(ScopeSettings):
    """Settings of a query about one block."""

    chain: Annotated[str, AfterValidator(check_chain)] = Field(
        default=OWN_CHAIN,
        description="Chain of the hash: own, or external:NAME for an engine's own block hashes.",
    )

    @property
    def scope(self) -> Scope:
        """The scope. Raises SettingsError if no model is given."""
        return replace(super().scope, chain=self.chain)


class PromptSettings(ScopeSettings):
    """Settings of a query about one prompt."""

    output_tokens: OutputTokens = Field(default=DEFAULT_DECODE_TOKENS, description="Expected length of the output.")
    cost_profile: Literal["engine", "quillcache"] = Field(default="engine", description="Cost profile to price with.")
    rates_file: Path | None = Field(
        default=None,
        description="File with rates for cost profile engine, written by `kvatlas calibrate`; default: none.",
    )


def _spelled(field: str) -> str:
    return f"{flag_of(field)} (or {variable_of(field)})"
