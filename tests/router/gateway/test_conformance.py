"""The requirements of the Gateway API Inference Extension's conformance suite (v1.6.0) for the picker that it runs with.

The suite tests gateways, in a cluster, with its own picker (`lwepp`). These are its requests, through a real Envoy, to pods
that echo like its own: each pod has its own address on loopback, and none has a publisher.
"""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvatlas.embedded.free_port import free_port
from kvatlas.store.connection import Store
from tests.router.gateway.echo_engine import EchoEngine, echo_engine
from tests.router.gateway.envoy import EnvoyProcess
from tests.router.gateway.gateway import Gateway, running_gateway, running_picker
from tests.router.gateway.kubernetes import namespace_of, pod_object, pool_object

pytestmark = pytest.mark.anyio

SELECTION, SERVED = "test-epp-endpoint-selection", "x-conformance-test-served-endpoint"
BODY = {"model": "conformance-fake-model", "prompt": "Write as if you were a critic: San Francisco"}
IPS = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
OTHER_IP = "127.0.0.5"
REQUESTS = 16


@dataclass(frozen=True, slots=True)
class Suite:
    """The suite's pool of three pods with three ports each, and another pool's pod."""

    gateway: Gateway
    ports: Sequence[int]
    pods: Mapping[str, EchoEngine]

    def reached(self) -> set[str]:
        """The endpoints that got requests since the last call."""
        found = {endpoint for endpoint, pod in self.pods.items() if pod.requests}
        for pod in self.pods.values():
            pod.requests.clear()
        return found

    def endpoints(self, *ips: str) -> set[str]:
        return {f"{ip}:{port}" for ip in ips for port in self.ports}


@pytest.fixture
async def suite(
    envoy: EnvoyProcess,
    store: Store,
    valkey_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Suite]:
    ports = sorted(free_port() for _ in range(3))
    pods = [*(pod_object(ip, "dp-model-server") for ip in IPS), pod_object(OTHER_IP, "secondary-model-server")]
    namespace = namespace_of(tmp_path, [pool_object("dp-pool", "dp-model-server", *ports)], pods)
    namespace.replace_service(monkeypatch)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running_gateway(envoy, store, {}))
        echoing = {
            f"{ip}:{port}": await stack.enter_async_context(echo_engine(port, ip))
            for ip in (*IPS, OTHER_IP)
            for port in ports
        }
        settings = {"kubernetes_pool": True, "pool_name": "dp-pool", "conformance": True, "tokenizer": "none"}
        await stack.enter_async_context(running_picker(valkey_url, port=envoy.ports.picker, **settings))
        yield Suite(gateway, ports, echoing)


async def test_traffic_reaches_only_the_pods_and_ports_that_the_header_names(suite: Suite) -> None:
    first, second, third = IPS
    low, middle, high = suite.ports
    cases: list[tuple[str, set[str]]] = [
        *((ip, suite.endpoints(ip)) for ip in IPS),
        (f"{first}, {second}", suite.endpoints(first, second)),
        (",".join(IPS), suite.endpoints(*IPS)),
        (f"{first},{third}:{middle}", {*suite.endpoints(first), f"{third}:{middle}"}),
        (
            f"{first},{second}:{low},{second}:{high},{third}",
            suite.endpoints(*IPS) - {f"{second}:{middle}"},
        ),
        # the other pool's pods belong to another picker
        (",".join([*IPS, OTHER_IP]), suite.endpoints(*IPS)),
        ("", suite.endpoints(*IPS)),
    ]
    for selection, allowed in cases:
        for number in range(REQUESTS):
            body: dict[str, Any] = {**BODY, "prompt": [number] * 9}
            headers = {SELECTION: selection} if selection else {}
            answer = await suite.gateway["whole"].post("/primary-gateway-dp-test", json=body, headers=headers)
            assert answer.status_code == 200, selection
        reached = suite.reached()
        assert reached <= allowed, selection
        assert len(allowed) < 4 or len(reached) > 1, "they share the requests"
    for nobody in (OTHER_IP, "10.9.9.9", ","):
        answer = await suite.gateway["whole"].post("/x", json=BODY, headers={SELECTION: nobody})
        assert answer.status_code == 503 and not suite.reached()
    endpoint = f"{second}:{low}"
    answer = await suite.gateway["whole"].post("/x", json=BODY, headers={SELECTION: endpoint})
    # this gateway does not say who served, which is its own failure; the pod can report what was picked
    assert answer.headers[SERVED].startswith("fail: ")
    ((received, _),) = suite.pods[endpoint].requests
    assert received["x-echo-set-header"] == f"{SERVED}:{endpoint}"


async def test_a_gateway_that_says_who_served_is_quoted(
    envoy: EnvoyProcess, store: Store, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = envoy.ports.engines
    pods = [pod_object("127.0.0.1", "primary-model-server")]
    namespace_of(tmp_path, [pool_object("kvatlas", "primary-model-server", *ports)], pods).replace_service(monkeypatch)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running_gateway(envoy, store, {}))
        for port in ports:
            await stack.enter_async_context(echo_engine(port))
        settings = {"kubernetes_pool": True, "conformance": True, "tokenizer": "none"}
        await stack.enter_async_context(running_picker(valkey_url, port=envoy.ports.picker, **settings))
        for port in ports:
            endpoint = f"127.0.0.1:{port}"
            for listener in ("override host", "override host, untold"):
                answer = await gateway[listener].post("/x", json=BODY, headers={SELECTION: endpoint})
                assert answer.status_code == 200
                expected = re.escape(endpoint) if listener == "override host" else "fail: .*"
                assert re.fullmatch(expected, answer.headers[SERVED])
