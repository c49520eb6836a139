"""The clients file (`--clients-file`): which clients may use a router, for which tenants, and how much.

[clients.acme]                          # a name, for logs and limits
keys = ["sha256:9f86d081..."]           # `kvatlas auth key` makes a key and this line
certificates = ["spiffe://acme/app"]    # names of a client's certificate: a URI, a DNS name, or its common name
tenants = ["acme"]                      # the first one, unless the header names another one of them
models = ["llama-*"]                    # default: all
priority = 0                            # in the queue; lower is earlier
weight = 2.0                            # its share of the queue, relative to other tenants; default: 1
requests_per_minute = 600               # and tokens_per_minute, requests_in_flight, tokens_in_flight, body_bytes
decisions = true                        # its answers have the decision header

[clients.gateway]
addresses = ["10.1.0.0/16"]             # or certificates, or keys
front = true                            # its header `tenant_header` names the tenant, one of `tenants`
tenants = ["*"]

[issuers.corp]                          # of JWTs
issuer = "https://login.corp"
audience = "kvatlas"
claim = "tenant"
keys_url = "https://login.corp/jwks"    # or keys_file
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from kvatlas.addresses import AddressList
from kvatlas.errors import InvalidValue
from kvatlas.fleet.tenants import PART_MARK
from kvatlas.identity import MAX_NAME_BYTES
from kvatlas.reservations.waiting_request import LEAST_WEIGHT, MOST_WEIGHT
from kvatlas.validation import MAX_TENANTS, Positive, Text, describe_expected, describe_mistake
from kvatlas_router.tenancy.caller import Caller, Limits

_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_HEADER = re.compile(r"[a-z0-9-]{1,64}")
_UNREADABLE = "\ufffd"
"""Stands for bytes of a header that are not valid UTF-8."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _check_hash(value: str) -> str:
    if not _HASH.fullmatch(value):
        raise ValueError("expected sha256: and 64 hex digits, as `kvatlas auth key` prints them")
    return value


def _check_tenant(value: str) -> str:
    if not is_tenant_name(value):
        raise ValueError(f"expected 1 to {MAX_NAME_BYTES} bytes of printable text without {PART_MARK!r}")
    return value


def _check_addresses(value: tuple[str, ...]) -> tuple[str, ...]:
    AddressList.parse(value)
    return value


def is_tenant_name(text: str) -> bool:
    """True if the text is a valid tenant name."""
    if not text.isprintable() or PART_MARK in text or _UNREADABLE in text:  # a surrogate is not printable
        return False
    return 0 < len(text.encode()) <= MAX_NAME_BYTES


Tenant = Annotated[str, AfterValidator(_check_tenant)]


class Allowance(BaseModel):
    """What a client may do, whatever its credentials."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: tuple[Text, ...] = ()
    priority: Annotated[int, Field(strict=True, ge=-(1 << 31), lt=1 << 31)] | None = None
    weight: Annotated[float, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    decisions: bool = False
    requests_in_flight: Positive | None = None
    tokens_in_flight: Positive | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    body_bytes: Positive | None = None

    def caller(self, name: str, tenant_id: str, *, is_front: bool = False) -> Caller:
        """The caller that has proven to be this client."""
        limits = Limits(
            self.requests_in_flight,
            self.tokens_in_flight,
            self.requests_per_minute,
            self.tokens_per_minute,
            self.body_bytes,
        )
        return Caller(name, tenant_id, self.models, self.priority, limits, is_front, self.decisions, self.weight)


class Client(Allowance):
    """One client: a holder of keys or certificates, or a trusted front."""

    keys: tuple[Annotated[str, AfterValidator(_check_hash)], ...] = ()
    certificates: tuple[Text, ...] = ()
    addresses: Annotated[tuple[str, ...], AfterValidator(_check_addresses)] = ()
    front: bool = False
    tenants: tuple[Tenant, ...] = Field(min_length=1, max_length=MAX_TENANTS)


class Issuer(Allowance):
    """One issuer of JWTs. `tenants`: the tenants that its claim may name."""

    issuer: str = Field(min_length=1)
    audience: str = Field(min_length=1)
    claim: str = Field(default="tenant", min_length=1)
    keys_file: Path | None = None
    keys_url: str | None = None
    tenants: tuple[Tenant, ...] = Field(default=("*",), min_length=1, max_length=MAX_TENANTS)


class Clients:
    """The content of one file. Raises InvalidValue for entries that contradict each other."""

    def __init__(self, clients: Mapping[str, Client], issuers: Mapping[str, Issuer], tenant_header: str) -> None:
        self.clients = dict(clients)
        self.issuers = dict(issuers)
        self.tenant_header = tenant_header.encode()
        self.by_hash: dict[str, str] = {}
        self.by_certificate: dict[str, str] = {}
        for name, client in self.clients.items():
            _check_client(name, client)
            for proofs, known in ((client.keys, self.by_hash), (client.certificates, self.by_certificate)):
                for proof in proofs:
                    if (other := known.setdefault(proof, name)) != name:
                        raise InvalidValue(f"clients.{name} and clients.{other} have a key or certificate in common")
        self.fronts = [
            (AddressList.parse(client.addresses), name) for name, client in self.clients.items() if client.addresses
        ]
        for name, issuer in self.issuers.items():
            _check_issuer(name, issuer)

    @property
    def size(self) -> int:
        return len(self.clients) + len(self.issuers)

    @property
    def tenants(self) -> Sequence[str]:
        """The tenants and patterns in the file, sorted."""
        entries: list[Client | Issuer] = [*self.clients.values(), *self.issuers.values()]
        return sorted({tenant for entry in entries for tenant in entry.tenants})

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a file. Raises InvalidValue (whose message names the entry and its field) or OSError."""
        try:
            found = tomllib.loads(file.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidValue(str(error)) from error
        return cls.parse(found)

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Self:
        """Parse the file's content. Raises InvalidValue."""
        if unknown := sorted(found.keys() - {"clients", "issuers", "tenant_header"}):
            raise InvalidValue(f"{unknown[0]!r:.80} is not known; expected clients, issuers and tenant_header")
        header = found.get("tenant_header", "x-kvatlas-tenant")
        if not isinstance(header, str) or not _HEADER.fullmatch(header.lower()):
            raise InvalidValue(f"tenant_header is {header!r:.80}; expected the name of a header")
        clients = _entries(found, "clients", Client)
        issuers = _entries(found, "issuers", Issuer)
        if not clients and not issuers:
            raise InvalidValue("it names no client; add [clients.NAME] or [issuers.NAME]")
        return cls(clients, issuers, header.lower())


T = TypeVar("T", Client, Issuer)


def _entries(found: Mapping[str, Any], table: str, kind: type[T]) -> dict[str, T]:
    listed = found.get(table, {})
    if not isinstance(listed, dict) or not all(isinstance(entry, dict) for entry in listed.values()):
        raise InvalidValue(f"{table} is not a table of tables; use [{table}.NAME]")
    entries: dict[str, T] = {}
    for name, fields in listed.items():
        if not _NAME.fullmatch(name):
            raise InvalidValue(
                f"{table} has {name!r:.80}; expected a name of 1 to 64 characters from A-Z a-z 0-9 _ . -"
            )
        try:
            entries[name] = kind.model_validate(fields)
        except ValidationError as error:
            first: ErrorDetails = error.errors()[0]
            where = ".".join(str(part) for part in (table, name, *first["loc"]))
            if first["loc"][:1] == ("keys",):  # the value may be a real key: don't show it
                raise InvalidValue(f"{where}: {describe_expected(first)}") from None
            raise InvalidValue(describe_mistake(where, first)) from None
    return entries


def _check_client(name: str, client: Client) -> None:
    if not (client.keys or client.certificates or client.addresses):
        raise InvalidValue(f"clients.{name} can't prove itself; add keys, certificates or addresses")
    if client.addresses and not client.front:
        raise InvalidValue(f"clients.{name} has addresses, which prove no tenant; set front = true")
    if any("*" in tenant for tenant in client.tenants) and not client.front:
        raise InvalidValue(f"clients.{name} has * in its tenants; expected names, or front = true")


def _check_issuer(name: str, issuer: Issuer) -> None:
    if (issuer.keys_file is None) == (issuer.keys_url is None):
        raise InvalidValue(f"issuers.{name} needs exactly one of keys_file and keys_url")
    if issuer.keys_url is not None and not is_key_address(issuer.keys_url):
        raise InvalidValue(f"issuers.{name}.keys_url is not an https address; http is allowed only for loopback")


def is_key_address(url: str) -> bool:
    """True if keys may be read from this address."""
    return re.fullmatch(r"https://[^\s@]+|http://(?:127\.0\.0\.1|localhost|\[::1\])(?::\d+)?(?:/\S*)?", url) is not None
