"""What every process takes, and how flags and environment variables become settings."""

from typing import Any, Literal, Self

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvatlas.errors import SettingsError
from kvatlas.redaction import redact_password
from kvatlas.settings.field_types import NatsUrl, RedisUrl
from kvatlas.validation import describe_expected

ENV_PREFIX = "KVATLAS_"
DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"


class ProcessSettings(BaseSettings):
    """What every process takes. Build with `load`, not with the constructor."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, protected_namespaces=()
    )

    wait: bool = Field(
        default=True, description="Retry an unreachable server with back-off; with --no-wait exit 1 at once."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level of the log lines on stderr."
    )

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """Settings from flags (None: not given), else the environment, else the defaults.

        Raises SettingsError, one line that names the flag or variable, its value and what was expected.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        try:
            return cls(**given)
        except ValidationError as error:
            raise SettingsError(_describe_first(error, given)) from None


class Settings(ProcessSettings):
    """What every command takes that uses running servers."""

    nats_url: NatsUrl = Field(default=DEFAULT_NATS_URL, description="NATS server: nats://, tls://, ws:// or wss://.")
    redis_url: RedisUrl = Field(
        default=DEFAULT_REDIS_URL,
        description="Redis or Valkey: redis://, rediss://, unix://, redis+cluster:// or rediss+cluster://.",
    )


def flag_of(field: str) -> str:
    """A field's flag."""
    return "--" + field.replace("_", "-")


def variable_of(field: str) -> str:
    """A field's environment variable."""
    return ENV_PREFIX + field.upper()


def missing_line(field: str, expected: str) -> str:
    """The line of a SettingsError for a field that is needed but not given."""
    return f"{flag_of(field)} (or {variable_of(field)}) is missing; {expected}"


def _describe_first(error: ValidationError, flags: dict[str, Any]) -> str:
    """The first mistake as one line."""
    first = error.errors()[0]
    field = str(first["loc"][0]).lower()
    if first["type"] == "missing":
        return missing_line(field, "it has no default")
    name = flag_of(field) if field in flags else variable_of(field)
    value = first["input"]
    shown = redact_password(value) if isinstance(value, str) else value
    return f"{name} is {shown!r:.200}; {describe_expected(first)}"
