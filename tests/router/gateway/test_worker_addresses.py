"""A worker's endpoint for gateways, and the workers and pods that a subset names."""

import pytest

from kvatlas.errors import InvalidValue
from kvatlas_router.gateway.worker_addresses import Candidates, WorkerAddresses, endpoint_of
from kvatlas_router.upstream.engine_addresses import AddressPolicy
from tests.router.proxy.engines import record

NEAR, FAR = AddressPolicy(near=True), AddressPolicy(near=False)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("http://[fd00::1]:8000", "[fd00::1]:8000"),
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
    ],
)
def test_an_endpoint_is_an_address_and_a_port(url: str, endpoint: str) -> None:
    assert endpoint_of(url, NEAR) == endpoint


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "--advertise-url"),
        ("http://engine.svc:8000", "--advertise-url"),
        ("https://10.0.0.1:8000", "--advertise-url"),
        ("http://127.0.0.1:8000", "--engine-addresses"),
        ("http://169.254.169.254", "--engine-addresses"),
        ("http://8.8.8.8:8000", "--engine-addresses"),
    ],
)
def test_an_address_that_no_gateway_can_use_is_named_with_the_cure(url: str, why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        endpoint_of(url, FAR)


def test_a_subset_names_workers_and_pods_that_nobody_publishes_for() -> None:
    records = {
        "a": record("a", "http://10.0.0.1:8000"),
        "r-dp0": record("r-dp0", "http://10.0.0.2:8000"),
        "r-dp1": record("r-dp1", "http://10.0.0.2:8000"),
        "b": record("b", "http://10.0.0.1:8001"),
        "named": record("named", "http://engine:8000"),
    }
    found = WorkerAddresses.of(records, FAR)
    assert found.among(None).workers == frozenset(["a", "b", "r-dp0", "r-dp1"]) and "named" in found.unusable
    assert found.among(None, ["10.0.0.1:8000", "10.0.0.9:8000"]) == Candidates(frozenset("a"), ["10.0.0.9:8000"])
    assert found.among(None, ["10.0.0.1", "10.0.0.9"]) == Candidates(frozenset("ab"), []), (
        "an address alone stands for all its ports"
    )
    assert found.among(None, ["10.0.0.2:8000"]).workers == frozenset(["r-dp0", "r-dp1"])
    assert (found.worker_at("10.0.0.1:8001"), found.worker_at("10.0.0.2:8000")) == ("b", None)
    usable = WorkerAddresses.of({"a": records["a"]}, FAR)
    assert usable.among(None).workers is None


def test_of_a_known_pool_a_subset_names_only_members() -> None:
    records = {"a": record("a", "http://10.0.0.1:8000"), "b": record("b", "http://10.0.0.2:8000")}
    found = WorkerAddresses.of(records, FAR)
    pool = ["10.0.0.1:8000", "10.0.0.3:8000", "10.0.0.3:8001", "[fd00::1]:8000"]
    assert found.among(pool) == Candidates(frozenset("a"), pool[1:])
    assert found.among(pool, ["10.0.0.1", "10.0.0.2", "10.0.0.3:8001"]) == Candidates(frozenset("a"), pool[2:3])
    assert found.among(pool, ["10.0.0.3", "fd00::1"]) == Candidates(frozenset(), pool[1:])
    assert (
        found.among(pool, ["10.0.0.2:8000"])
        == found.among(pool, [])
        == found.among([], None)
        == Candidates(frozenset(), [])
    )
    assert found.among(None, ["10.0.0.2:8000"]) == Candidates(frozenset("b"), [])
