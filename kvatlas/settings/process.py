"""Settings of every process, and how they are read from flags and environment variables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvatlas.bus.access import NatsAccess
from kvatlas.errors import SettingsError
from kvatlas.redaction import redact_url
from kvatlas.settings.field_types import Inbox, NatsUrl, RedisUrl
from kvatlas.store.access import RedisAccess
from kvatlas.validation import describe_expected

ENV_PREFIX = "KVATLAS_"
COMMON = "Common"
"""Group of the flags that users set first; the help begins with it."""
OWN = "Options"
"""Group of the flags that belong to no other group."""
HelpGroups = Mapping[str, str]
"""Group -> its fields, separated by spaces."""
DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"


class ProcessSettings(BaseSettings):
    """Settings of every process. Create them with `load`, not with the constructor."""

    model_config = SettingsConfigDict(
        defer_build=True, env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, protected_namespaces=()
    )
    help_groups: ClassVar[HelpGroups] = {"Log and start": "wait log_level log_format"}
    """The groups of flags in the help. Those of the base classes follow; a field belongs to the first group that lists it."""

    wait: bool = Field(
        default=True, description="Retry an unreachable server with back-off; with --no-wait exit 1 at once."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level of the log lines on stderr."
    )
    log_format: Literal["console", "json"] = Field(
        default="console", description="Human-readable log lines, or one JSON object per line."
    )

    @classmethod
    def group_of_field(cls) -> Mapping[str, str]:
        """Each field's group in the help, in the order of the help."""
        found: dict[str, str] = {}
        for kind in cls.__mro__:
            for group, names in kind.__dict__.get("help_groups", {}).items():
                found |= {name: group for name in names.split() if name not in found}
        groups = [COMMON, OWN, *found.values()]
        listed = list(found)
        required = [name for name, info in cls.model_fields.items() if info.is_required()]
        others = [name for name in cls.model_fields if name not in listed]
        names = [*listed, *sorted(others, key=lambda name: name not in required)]
        given = {name: found.get(name, OWN) for name in names if name in cls.model_fields}
        return dict(sorted(given.items(), key=lambda one: groups.index(one[1])))

    @field_validator("*", mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        if isinstance(value, str | Path) and "\0" in str(
            value
        ):  # no file, address or name contains one, and opening such a file raises
            raise ValueError("expected text without a NUL character")
        return value

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """Settings from flags (None: not given), otherwise from the environment, otherwise from the defaults.

        Raises SettingsError with one line: the flag or variable, its value, and what was expected.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        try:
            return cls(**given)
        except ValidationError as error:
            raise SettingsError(_describe_first(error, given)) from None


def nats_url_field() -> Any:
    """The field for the NATS server of a process that uses one which is already running."""
    return Field(
        default=DEFAULT_NATS_URL,
        description="NATS servers of one cluster, separated by commas: nats://, tls://, ws:// or wss://.",
    )


class NatsSettings(ProcessSettings):
    """How to connect to NATS. A URL with a password belongs in a file or a variable: flags show in the process list."""

    help_groups: ClassVar[HelpGroups] = {
        "NATS": "nats_url nats_url_file nats_creds_file nats_nkey_file nats_ca_file nats_cert_file nats_key_file "
        "nats_inbox",
    }

    nats_url: NatsUrl | None = Field(default=None, description="NATS servers, separated by commas.")
    nats_url_file: Path | None = Field(default=None, description="File that holds the URL of NATS.")
    nats_creds_file: Path | None = Field(default=None, description="Credentials for NATS: a JWT and its seed.")
    nats_nkey_file: Path | None = Field(default=None, description="Credentials for NATS: the seed of an NKey.")
    nats_ca_file: Path | None = Field(default=None, description="File with the CA certificates to verify NATS.")
    nats_cert_file: Path | None = Field(default=None, description="Client certificate for NATS.")
    nats_key_file: Path | None = Field(default=None, description="Key of the client certificate for NATS.")
    nats_inbox: Inbox | None = Field(
        default=None, description="Prefix of this user's inboxes in NATS; default: _INBOX.USER for a user in the URL."
    )

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """See `ProcessSettings.load`. A URL and its file can't both be given (but a flag takes precedence over a variable), and
        a file must be readable."""
        given = {name for name, value in flags.items() if value is not None}
        settings = super().load(**flags)
        read: dict[str, str] = {}
        servers = [kind for kind in ("nats", "redis") if f"{kind}_url" in cls.model_fields]
        for name in (f"{kind}_url" for kind in servers):
            file, same_source = getattr(settings, f"{name}_file"), (name in given) == (f"{name}_file" in given)
            if file is None or (name in given and not same_source):
                continue
            if name in settings.model_fields_set and same_source:
                raise SettingsError(f"{flag_of(name)} and {flag_of(name)}-file are both given; set only one of them")
            read[name] = read_secret(file, f"{flag_of(name)}-file")
        for kind in servers:
            if (getattr(settings, f"{kind}_cert_file") is None) != (getattr(settings, f"{kind}_key_file") is None):
                raise SettingsError(f"--{kind}-cert-file and --{kind}-key-file belong together; set both")
        if not read:
            return settings
        return super().load(**{**flags, **read})

    @property
    def nats(self) -> NatsAccess:
        """How to connect to NATS."""
        return NatsAccess(
            self.nats_url or DEFAULT_NATS_URL,
            self.nats_creds_file,
            self.nats_nkey_file,
            self.nats_ca_file,
            self.nats_cert_file,
            self.nats_key_file,
            self.nats_inbox,
        )


class ServerSettings(NatsSettings):
    """Connection settings of NATS and the store."""

    help_groups: ClassVar[HelpGroups] = {
        "Redis": "redis_url redis_url_file redis_ca_file redis_cert_file redis_key_file",
    }

    redis_url: RedisUrl | None = Field(default=None, description="Redis or Valkey.")
    redis_url_file: Path | None = Field(default=None, description="File that holds the URL of Redis.")
    redis_ca_file: Path | None = Field(default=None, description="File with the CA certificates to verify Redis.")
    redis_cert_file: Path | None = Field(default=None, description="Client certificate for Redis.")
    redis_key_file: Path | None = Field(default=None, description="Key of the client certificate for Redis.")

    @property
    def redis(self) -> RedisAccess:
        """How to connect to the store."""
        return RedisAccess(
            self.redis_url or DEFAULT_REDIS_URL, self.redis_ca_file, self.redis_cert_file, self.redis_key_file
        )


class Settings(ServerSettings):
    """Settings of every command that uses running servers."""

    nats_url: NatsUrl = nats_url_field()
    redis_url: RedisUrl = Field(
        default=DEFAULT_REDIS_URL,
        description="Redis or Valkey: redis://, unix://, redis+cluster:// or redis+sentinel://; with TLS rediss...",
    )


def read_secret(file: Path, flag: str) -> str:
    """The text of a file without the white space around it. Raises SettingsError if the file can't be read or is empty."""
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise SettingsError(f"{flag}: can't read {str(file)!r}: {cause}") from None
    if not text:
        raise SettingsError(f"{flag}: {str(file)!r} is empty")
    return text


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def variable_of(field: str) -> str:
    """The environment variable of a field."""
    return ENV_PREFIX + field.upper()


def missing_line(field: str, expected: str) -> str:
    """The line of a SettingsError for a required field that is missing."""
    return f"{flag_of(field)} (or {variable_of(field)}) is missing; {expected}"


def _describe_first(error: ValidationError, flags: dict[str, Any]) -> str:
    """The first mistake, as one line."""
    first = error.errors()[0]
    field = str(first["loc"][0]).lower()
    if first["type"] == "missing":
        return missing_line(field, "it has no default")
    name = flag_of(field) if field in flags else variable_of(field)
    value = first["input"]
    secret = isinstance(value, str) and (field.endswith("_url") or "@" in value or "://" in value)
    shown = redact_url(value) if secret else value
    return f"{name} is {shown!r:.200}; {describe_expected(first)}"
