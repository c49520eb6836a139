"""A request's sender, as named by the gateway itself. Claims by clients do not count."""

from dataclasses import dataclass, field
from typing import Self

from kvatlas.errors import InvalidValue
from kvatlas_router.gateway.ext_proc.messages import metadata_text
from kvatlas_router.gateway.picker import RequestHead
from kvatlas_router.tenancy.caller import ANYBODY, Caller
from kvatlas_router.tenancy.clients_file import is_tenant_name


class SenderUnknown(InvalidValue):
    """The gateway names no tenant, several, or an invalid one."""


@dataclass(frozen=True, slots=True)
class SenderTrust:
    """`headers`: names, in lower case, of the headers that the gateway sets itself, whatever its clients send. The tenant
    is in `tenant_header` or `tenant_metadata` (a namespace of Envoy's dynamic metadata and a key in it); without either,
    there is only one tenant."""

    headers: frozenset[bytes] = frozenset()
    tenant_header: bytes = b""
    tenant_metadata: tuple[str, str] | None = field(default=None)

    @classmethod
    def of(cls, headers: tuple[str, ...], source: str) -> Self:
        """`source`: where to find the tenant: `header:NAME`, `metadata:NAMESPACE/KEY` or ''. Raises InvalidValue."""
        trusted = frozenset(name.lower().encode() for name in headers)
        kind, _, where = source.partition(":")
        namespace, _, key = where.rpartition("/")
        if not source:
            return cls(trusted)
        if kind == "header" and where:
            return cls(trusted, where.lower().encode())
        if kind == "metadata" and namespace and key:
            return cls(trusted, tenant_metadata=(namespace, key))
        raise InvalidValue(f"{source!r:.80}; expected header:NAME or metadata:NAMESPACE/KEY")

    def header(self, head: RequestHead, name: bytes) -> str | None:
        """A header's value, if the gateway sets it."""
        return head.first(name) if name in self.headers else None

    def caller(self, head: RequestHead) -> Caller:
        """The request's sender. Raises SenderUnknown."""
        if self.tenant_metadata is not None:
            tenant_id = metadata_text(head.metadata, *self.tenant_metadata)
        elif self.tenant_header:
            named = [value for name, value in head.headers if name == self.tenant_header]
            tenant_id = named[0].decode("utf-8", "replace") if len(named) == 1 else None
        else:
            return ANYBODY
        if tenant_id is None or not is_tenant_name(tenant_id):
            raise SenderUnknown("the gateway names no tenant for this request (--tenant-from), or more than one")
        return Caller(tenant_id, tenant_id)
