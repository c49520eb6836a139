"""Finds a request's caller by its key, its client certificate, the address of a trusted front, or its JWT."""

import logging
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.http.access import keys_in
from kvatlas.validation import matches
from kvatlas_router.tenancy.caller import Caller
from kvatlas_router.tenancy.clients_file import Client, Clients, is_tenant_name
from kvatlas_router.tenancy.refusals import ForeignTenant, Unproven

if TYPE_CHECKING:
    from kvatlas_router.tenancy.issuer import IssuedTokens

LOOK_S = 1.0
"""Minimum interval between checks of the file."""
MOST_CALLERS = 100_000
_NOTHING = "no key; send `Authorization: Bearer KEY`"

_log = logging.getLogger("kvatlas_router.tenancy")


class Proof:
    """The clients in one file, which is read again when it changes. If it can't be read then, the previous clients stay in
    use."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises SettingsError for a file that can't be used."""
        self._file = file
        self._clock = clock
        self._looked_at = clock()
        self._stamp = _stamp(file)
        try:
            self.clients = Clients.read(file)
        except (OSError, InvalidValue) as error:
            raise SettingsError(f"--clients-file is {str(file)!r}: {_reason(error)}") from None
        self._tokens = _issued_tokens(self.clients)
        self._callers: dict[tuple[str, str], Caller] = {}
        self._fronts: dict[str, str | None] = {}
        """The front at each address that has been looked up."""

    async def prove(self, headers: Iterable[tuple[bytes, bytes]], address: str, certificate: frozenset[str]) -> Caller:
        """The request's caller. `headers`: names in lower case. `certificate`: the names in the client's certificate, if it has
        a valid one.

        Raises Unproven, ForeignTenant or KeysUnknown.
        """
        self._look()
        headers = tuple(headers)
        shown = keys_in(headers)
        header = self.clients.tenant_header
        named = [value.decode("utf-8", "replace").strip() for name, value in headers if name == header]
        name = self._find(shown, address, certificate)
        if name is not None:
            return self._caller(name, self.clients.clients[name], named)
        token = next((one for one in shown if one.count(b".") == 2), None)
        if self._tokens is None or token is None:
            raise Unproven(_NOTHING if not shown else "the key is not known here")
        caller = await self._tokens.prove(token)
        if named and named != [caller.tenant_id]:
            raise ForeignTenant("the header names another tenant than the token")
        return caller

    def _find(self, shown: list[bytes], address: str, certificate: frozenset[str]) -> str | None:
        clients = self.clients
        for key in shown:
            if (name := clients.by_hash.get(hash_of(key))) is not None:
                return name
        for one in sorted(certificate):
            if (name := clients.by_certificate.get(one)) is not None:
                return name
        return self._find_front(address) if clients.fronts else None

    def _find_front(self, address: str) -> str | None:
        if address not in self._fronts:
            if len(self._fronts) >= MOST_CALLERS:
                self._fronts.clear()
            allowed = (name for addresses, name in self.clients.fronts if addresses.allows(address, 0))
            self._fronts[address] = next(allowed, None)
        return self._fronts[address]

    def _caller(self, name: str, client: Client, named: list[str]) -> Caller:
        if len(named) > 1:
            raise ForeignTenant("the header of the tenant is given more than once; expected one")
        if client.front and not named:
            raise Unproven("the gateway in front named no tenant for this request")
        tenant_id = named[0] if named else client.tenants[0]
        if (known := self._callers.get((name, tenant_id))) is not None:
            return known
        if not is_tenant_name(tenant_id) or not (
            matches(tenant_id, client.tenants) if client.front else tenant_id in client.tenants
        ):
            raise ForeignTenant("this client may not use the tenant that the header names")
        by = f"{name}/{tenant_id}" if client.front else name
        caller = client.caller(by, tenant_id, is_front=client.front)
        if len(self._callers) >= MOST_CALLERS:
            self._callers.clear()
        self._callers[name, tenant_id] = caller
        return caller

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            clients = Clients.read(self._file)
        except (OSError, InvalidValue) as error:
            _log.warning("%s can't be used (%s); keeping the previous clients", self._file, _reason(error))
            return
        self.clients, self._callers, self._fronts, self._tokens = clients, {}, {}, _issued_tokens(clients)
        _log.info("reloaded %s: %d clients, %d issuers", self._file, len(clients.clients), len(clients.issuers))


def _issued_tokens(clients: Clients) -> "IssuedTokens | None":
    if not clients.issuers:
        return None
    from kvatlas_router.tenancy.issuer import IssuedTokens  # PyJWT and its cryptography take 50 ms to import

    return IssuedTokens(clients.issuers)


def hash_of(key: bytes) -> str:
    """A key's hash as written in the file. Keys are long and random, so they need no slow hash."""
    return f"sha256:{sha256(key).hexdigest()}"


def _stamp(file: Path) -> tuple[int, int]:
    """A value that changes whenever the file does."""
    try:
        stat = file.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_ino


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
