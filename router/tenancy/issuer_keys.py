"""An issuer's public keys (a JWKS, RFC 7517, or one key in PEM format), read periodically from a file or an address."""

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import jwt

from kvatlas.errors import DATA_ERRORS, InvalidValue
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas_router.tenancy.refusals import KeysUnknown

AGE_S = 300.0
"""Interval at which the keys at an address are read again. A withdrawn key stays valid for up to this long."""
FILE_AGE_S = 5.0
"""Interval at which the keys in a file are read again."""
ASK_AGAIN_S = 10.0
"""Minimum interval between reads when a token names an unknown key, or when the keys could not be read."""
READ_S = 5.0
MOST_BYTES = 1 << 20

_log = logging.getLogger("kvatlas_router.tenancy")


class IssuerKeys:
    """`of` is cheap while the key is known. Can be shared between tasks of one event loop."""

    def __init__(
        self, name: str, file: Path | None, url: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`name`: the issuer's name, for the log. Either `file` or `url` must be given."""
        self.version = 0
        """Changes whenever the keys do."""
        self._name = name
        self._file = file
        self._url = url
        self._age_s = AGE_S if file is None else FILE_AGE_S
        self._clock = clock
        self._keys: Mapping[str, Any] = {}
        self._source = b""
        self._read_at: float | None = None
        self._read: asyncio.Task[None] | None = None
        self._refusals = RateLimitedLog(_log)

    async def of(self, key_id: str | None) -> Any:
        """The key with this id, or the only key; None if there is none. Raises KeysUnknown."""
        self.refresh()
        found = self._find(key_id)
        if self._read_at is None or (found is None and self._clock() - self._read_at >= ASK_AGAIN_S):
            await asyncio.shield(self._start())
            found = self._find(key_id)
        if not self._source:
            raise KeysUnknown(f"the keys of issuer {self._name} can't be read now")
        return found

    def refresh(self) -> None:
        """Start reading the keys again if they are old. The known keys stay in use in the meantime."""
        if self._source and self._read_at is not None and self._clock() - self._read_at >= self._age_s:
            self._start()

    def _find(self, key_id: str | None) -> Any:
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(key_id or "", self._keys.get("") if len(self._keys) == 1 else None)

    def _start(self) -> asyncio.Task[None]:
        if self._read is None or self._read.done():
            self._read = asyncio.ensure_future(self._read_again())
        return self._read

    async def _read_again(self) -> None:
        try:
            source = await asyncio.to_thread(self._file.read_bytes) if self._file is not None else await self._fetch()
            if source != self._source:
                self._keys = parse_keys(source)
                self._source = source
                self.version += 1
        except (OSError, TimeoutError, httpx.HTTPError, httpx.InvalidURL, InvalidValue) as error:
            self._refusals.report(
                self._name, f"keys of issuer {self._name} could not be read ({error}); using the previous ones"
            )
        self._read_at = self._clock()

    async def _fetch(self) -> bytes:
        assert self._url is not None
        system = ssl.create_default_context()  # httpx would use its own CA certificates
        async with (
            asyncio.timeout(READ_S),
            httpx.AsyncClient(verify=system, timeout=READ_S, trust_env=False) as client,
            client.stream("GET", self._url) as answer,
        ):
            if answer.status_code != 200:
                raise InvalidValue(f"status {answer.status_code}")
            body = b""
            async for more in answer.aiter_bytes():
                body += more
                if len(body) > MOST_BYTES:
                    raise InvalidValue(f"more than {MOST_BYTES} bytes")
            return body


def parse_keys(source: bytes) -> Mapping[str, Any]:
    """Signing keys by key id: those of a JWKS, or a single PEM key under ''. An empty JWKS results in none, which means
    that all keys have been withdrawn. Raises InvalidValue for anything else without a key."""
    if source.lstrip().startswith(b"-----BEGIN "):
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        try:
            return {"": load_pem_public_key(source)}
        except (ValueError, UnsupportedAlgorithm) as error:
            raise InvalidValue(f"no public key in PEM: {error!s:.80}") from None
    try:
        listed = json.loads(source)
        if isinstance(listed, dict) and listed.get("keys") == []:
            return {}
        found = jwt.PyJWKSet.from_dict(listed)
    except (*DATA_ERRORS, jwt.PyJWTError) as error:
        raise InvalidValue(f"no JWKS: {error!s:.80}") from None
    keys = {
        one.key_id or "": one.key for one in found.keys if one.public_key_use in (None, "sig") and one.key_type != "oct"
    }
    if not keys:
        raise InvalidValue("a JWKS without a public key")
    return keys
