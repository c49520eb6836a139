"""Authentication for our own calls to engines (token ids, models, health, metrics, events), and the certificates to trust."""

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvatlas.errors import InvalidValue
from kvatlas.identity import check_worker_id
from kvatlas.store.access import tls_context

KEY_CURE = "give the engine's API key with --engine-key-file"
"""What to do about a 401 or 403."""
REFUSED = (401, 403)
_RANK = re.compile(r"-dp\d+$")
_KEY = re.compile(r"[!-~]{1,4096}")


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """`keys`: API keys by worker; `key`: the key for all other engines. `ca_file` is trusted instead of the system's CA
    certificates (SSL_CERT_FILE and SSL_CERT_DIR may name those)."""

    key: str | None = field(default=None, repr=False)
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_file: Path | None = None

    @classmethod
    def parse(cls, text: str, ca_file: Path | None = None) -> "EngineAccess":
        """Parse the text of a key file: each line is either one key for all engines, or a worker and its key. Raises
        InvalidValue, which shows no key."""
        key: str | None = None
        keys: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2 or not _KEY.fullmatch(words[-1]):
                raise InvalidValue(f"line {number}: expected a key, or a worker and its key")
            if len(words) == 2:
                keys[check_worker_id(words[0].replace(".", "_"))] = words[1]
            elif key is None:
                key = words[0]
            else:
                raise InvalidValue(
                    f"line {number}: expected at most one key without a worker; give the others as WORKER KEY"
                )
        return cls(key, keys, ca_file)

    def key_of(self, worker_id: str) -> str | None:
        """The key of the worker, of its instance if it is a rank, or of all engines."""
        if not self.keys:
            return self.key
        instance = _RANK.sub("", worker_id)
        return self.keys.get(worker_id) or self.keys.get(instance) or self.key

    def headers_of(self, worker_id: str) -> dict[str, str]:
        """The header that carries the key; empty if there is no key."""
        key = self.key_of(worker_id)
        return {} if key is None else {"authorization": f"Bearer {key}"}

    def tls_context(self) -> ssl.SSLContext:
        """The TLS context for calls to engines. Raises OSError for a file that can't be read, or ssl.SSLError for a file
        without a certificate."""
        return tls_context("engines", self.ca_file)


NO_KEY = EngineAccess()
"""Access to engines that need no key."""
