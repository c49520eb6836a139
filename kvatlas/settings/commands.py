"""Settings of commands that are no service of a fleet: `up`, and those that ask a question."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from kvatlas.errors import SettingsError
from kvatlas.identity import DEFAULT_TENANT, Scope
from kvatlas.redaction import redact_url
from kvatlas.request import DEFAULT_DECODE_TOKENS
from kvatlas.settings.field_types import Name, NatsUrl, Port, RedisUrl
from kvatlas.settings.http import HttpSettings
from kvatlas.settings.process import ServerSettings, Settings, flag_of, variable_of
from kvatlas.validation import OutputTokens


class UpSettings(ServerSettings, HttpSettings):
    """Everything on one machine."""

    nats_url: NatsUrl | None = Field(
        default=None, description="NATS server to use; default: an embedded one is started."
    )
    redis_url: RedisUrl | None = Field(
        default=None, description="Redis or Valkey to use; default: an embedded Valkey is started."
    )
    state_dir: Path | None = Field(default=None, description="Folder for all data; default: a temporary one.")
    nats_port: Port = Field(default=0, description="Port of the embedded NATS; 0: any free port.")
    redis_port: Port = Field(default=0, description="Port of the embedded Valkey; 0: any free port.")
    status_port: Port | None = Field(default=None, description="Port of the indexer's status page; default: no page.")

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """See `ProcessSettings.load`. A port is refused for a server that is not started."""
        settings = super().load(**flags)
        for url, port in (("nats_url", "nats_port"), ("redis_url", "redis_port")):
            joined = getattr(settings, url)
            if joined is not None and port in settings.model_fields_set:
                raise SettingsError(
                    f"{_spelled(port)} is {getattr(settings, port)}, but {_spelled(url)} is {redact_url(joined)}: "
                    "that server is joined and none is started; expected only one of the two"
                )
        return settings


class QuerySettings(Settings):
    """A question. It does not wait for ever for an answer unless it is told to."""

    wait: bool = Field(
        default=False, description="Retry an unreachable server with back-off; with --no-wait report it at once."
    )


class DoctorSettings(QuerySettings):
    """One examination."""

    identities: Path | None = Field(
        default=None, description="The indexers' file of identities: tells which workers they refuse."
    )
    listen_s: float = Field(
        default=2.5, gt=0, description="Seconds to listen for heartbeats; each worker sends one a second."
    )


class PromptSettings(QuerySettings):
    """A question about one prompt."""

    model_id: Name = Field(description="Model that the request is for.")
    tokenizer_id: Name | None = Field(default=None, description="Tokenizer of the model; default: the model id.")
    adapter_id: Name | None = Field(default=None, description="LoRA adapter; default: none.")
    tenant_id: Name = Field(default=DEFAULT_TENANT, description="Tenant of the request.")
    output_tokens: OutputTokens = Field(default=DEFAULT_DECODE_TOKENS, description="Expected length of the output.")
    cost_profile: Literal["engine", "quillcache"] = Field(default="engine", description="Cost profile to price with.")

    @property
    def scope(self) -> Scope:
        return Scope(self.model_id, self.tokenizer_id or self.model_id, self.adapter_id, self.tenant_id)


def _spelled(field: str) -> str:
    return f"{flag_of(field)} (or {variable_of(field)})"
