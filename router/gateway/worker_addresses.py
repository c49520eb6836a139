"""Endpoints as gateways name them (ip:port), and the workers that have them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from kvatlas.addresses import host_and_port, parse_ip
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import FleetRecord
from kvatlas_router.upstream.engine_addresses import AddressPolicy


def endpoint_of(url: str, policy: AddressPolicy) -> str:
    """The ip:port of an engine's URL, an IPv6 address in brackets.

    Raises InvalidValue for a URL with a hostname or with https, since gateways accept neither, and for an address that
    the policy does not allow.
    """
    try:
        host, port = host_and_port(url)
    except InvalidValue:
        host, port = "", 0
    ip = parse_ip(host)
    if ip is None or not url.startswith("http:"):
        raise InvalidValue(
            f"{url or '(no address)'}; gateways send requests to http://IP:PORT only; set --advertise-url"
        )
    if not policy.allows(host, port, ip):
        raise InvalidValue(f"{url}; not an allowed engine address (--engine-addresses)")
    return join_endpoint(str(ip), port)


def join_endpoint(host: str, port: int) -> str:
    """The endpoint for a host, given without brackets, and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(endpoint: str) -> str:
    """The host part of ip:port, or of an ip alone."""
    if endpoint.startswith("["):
        return endpoint[1:].partition("]")[0]
    return endpoint if endpoint.count(":") > 1 else endpoint.partition(":")[0]


class Candidates(NamedTuple):
    """The candidates for a request. `workers`: ids; None: all workers with an address. `unpublished`: endpoints of pods
    without a publisher."""

    workers: frozenset[str] | None
    unpublished: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class WorkerAddresses:
    """The endpoints of a fleet's workers; the ranks of a data-parallel engine share one.

    `unusable`: the reason for each worker without an endpoint, by id.
    """

    endpoints: Mapping[str, str]
    unusable: Mapping[str, str]
    _by_endpoint: Mapping[str, Sequence[str]] = field(repr=False)
    _by_host: Mapping[str, Sequence[str]] = field(repr=False)

    @classmethod
    def of(cls, records: Mapping[str, FleetRecord], policy: AddressPolicy) -> Self:
        """`policy`: which addresses engines may have."""
        endpoints: dict[str, str] = {}
        unusable: dict[str, str] = {}
        by_endpoint: dict[str, list[str]] = {}
        by_host: dict[str, list[str]] = {}
        for worker_id, record in records.items():
            try:
                endpoint = endpoint_of(record.endpoint.url, policy)
            except InvalidValue as error:
                unusable[worker_id] = str(error)
                continue
            endpoints[worker_id] = endpoint
            by_endpoint.setdefault(endpoint, []).append(worker_id)
            by_host.setdefault(host_of(endpoint), []).append(worker_id)
        return cls(endpoints, unusable, by_endpoint, by_host)

    def among(self, pool: Collection[str] | None, subset: Collection[str] | None = None) -> Candidates:
        """The workers at the pool's endpoints, and its endpoints without a worker, both limited to `subset` if given. An ip
        without a port stands for all of its ports.

        `pool=None`: the pool is unknown. The result is then all workers or, if a subset is given, its workers and its other
        endpoints.
        """
        members = pool if subset is None else subset if pool is None else _shared(pool, subset)
        if members is None:
            return Candidates(frozenset(self.endpoints) if self.unusable else None)
        workers: list[str] = []
        unpublished: list[str] = []
        for member in dict.fromkeys(members):
            has_port = member != host_of(member)
            found = self._by_endpoint.get(member) if has_port else self._by_host.get(member)
            if found is not None:
                workers += found
            elif has_port:
                unpublished.append(member)
        return Candidates(frozenset(workers), unpublished)

    def worker_at(self, endpoint: str) -> str | None:
        """The worker at an endpoint; None if there is no worker, or several."""
        found = self._by_endpoint.get(endpoint, ())
        return found[0] if len(found) == 1 else None


def _shared(pool: Collection[str], subset: Collection[str]) -> Sequence[str]:
    named = frozenset(subset)
    return [endpoint for endpoint in pool if endpoint in named or host_of(endpoint) in named]
