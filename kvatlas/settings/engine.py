"""Settings of every process that calls engines over HTTP."""

from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field

from kvatlas.engine_access import EngineAccess
from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.settings.process import HelpGroups, ProcessSettings, read_secret


class EngineAccessSettings(ProcessSettings):
    """API keys of engines, and the CA certificates to verify them."""

    help_groups: ClassVar[HelpGroups] = {"Engines": "engine_key_file engine_ca_file"}

    engine_key_file: Path | None = Field(
        default=None,
        description="File with the API key for kvatlas' own calls to engines (token ids, models, health, metrics): "
        "one key, or lines of WORKER KEY.",
    )
    engine_ca_file: Path | None = Field(
        default=None,
        description="File with the CA certificates to verify engines; default: the system's, or SSL_CERT_FILE.",
    )

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """See `ProcessSettings.load`. Both files must be readable."""
        settings = super().load(**flags)
        _ = settings.engine_access  # raises
        return settings

    @property
    def engine_access(self) -> EngineAccess:
        """API keys and CA certificates. Raises SettingsError if a file is unusable."""
        text = read_secret(self.engine_key_file, "--engine-key-file") if self.engine_key_file is not None else ""
        try:
            access = EngineAccess.parse(text, self.engine_ca_file)
        except InvalidValue as error:
            raise SettingsError(f"--engine-key-file is {str(self.engine_key_file)!r}: {error}") from None
        if self.engine_ca_file is not None:
            try:
                access.tls_context()
            except OSError as error:  # ssl.SSLError is one too
                file = f"--engine-ca-file: {str(self.engine_ca_file)!r}"
                raise SettingsError(f"{file} has no certificate: {error.strerror or error}") from None
        return access
