"""A pool's endpoints, from names and from an InferencePool in Kubernetes."""

from pathlib import Path

import pytest

from kvatlas.errors import InvalidValue
from kvatlas_router.gateway.pool_pods import KubernetesPool, PodList
from tests.eventually import until
from tests.router.gateway.kubernetes import namespace_of, pod_object, pool_object

pytestmark = pytest.mark.anyio


async def test_a_name_stands_for_its_addresses_and_one_that_is_unknown_for_none() -> None:
    pods = PodList(["localhost:8000", "nosuch.invalid:8000", "[::1]:9000"])
    await pods.start()
    try:

        async def found() -> bool:
            return {"127.0.0.1:8000", "[::1]:9000"} <= set(pods.endpoints or ())

        await until(found, what="addresses are looked up")
        assert not any("nosuch" in endpoint for endpoint in pods.endpoints or ())
    finally:
        await pods.stop()
    assert PodList([]).endpoints is None


@pytest.mark.parametrize("entry", ["engine", "engine:", ":80", "engine:http", "engine:0", "engine:65536"])
def test_a_pod_needs_a_port(entry: str) -> None:
    with pytest.raises(InvalidValue, match="expected HOST:PORT"):
        PodList([entry])


async def test_a_pool_is_each_target_port_of_its_ready_pods(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    annotations = {"inference.networking.k8s.io/active-ports": "8001, 9999"}
    namespace = namespace_of(
        tmp_path,
        [pool_object("other", "other", 1), pool_object("kvatlas", "engine", 8000, 8001)],
        [
            pod_object("10.0.0.1", "engine"),
            pod_object("10.0.0.2", "engine", annotations=annotations),
            pod_object("fd00::1", "engine"),
            pod_object("10.0.0.3", "engine", ready=False),
            pod_object("10.0.0.4", "engine", deletionTimestamp="2026-01-01T00:00:00Z"),
            pod_object("10.0.0.5", "other"),
            pod_object("", "engine"),
        ],
    )
    async with namespace.open() as api:
        pool = KubernetesPool(api, "kvatlas")
        assert not pool.is_known
        await pool.read()
        expected = ["10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8000", "[fd00::1]:8001"]
        assert pool.is_known and pool.endpoints == expected and not caplog.messages
        read = pool.endpoints
        await pool.read()
        assert pool.endpoints is read, "nothing changed: nothing is computed again"
        namespace.objects["v1"]["pods"].pop(0)
        await pool.read()
        assert pool.endpoints == expected[2:]
        namespace.status = 503
        for _ in range(2):
            await pool.read()
        assert pool.endpoints == expected[2:]
        (line,) = caplog.messages
        assert "pool kvatlas could not be read" in line and "keeping the last value" in line


@pytest.mark.parametrize(
    ("pool", "why"),
    [
        ("nosuch", "404"),
        ("no-ports", "targetPorts"),
        ("no-labels", "matchLabels"),
    ],
)
async def test_a_pool_that_can_not_be_read_has_no_endpoints_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pool: str, why: str
) -> None:
    no_labels = pool_object("no-labels", "engine", 8000)
    no_labels["spec"]["selector"]["matchLabels"] = {}
    namespace = namespace_of(
        tmp_path, [pool_object("no-ports", "engine"), no_labels], [pod_object("10.0.0.1", "engine")]
    )
    async with namespace.open() as api:
        found = KubernetesPool(api, pool)
        await found.read()
        assert not found.is_known and found.endpoints == ()
        assert why in caplog.text
