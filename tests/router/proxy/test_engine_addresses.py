"""Requests go only to addresses that engines may have, and clients' credentials only where the operator allows."""

from ipaddress import ip_address

import pytest

from kvatlas.addresses import AddressList, check_origin, parse_ip
from kvatlas.errors import InvalidValue
from kvatlas.store.connection import Store
from kvatlas_router.upstream.engine_addresses import AddressPolicy
from tests.router.proxy.engines import MODEL, record, running_fleet, running_proxy
from tests.router.proxy.raw_engine import raw_engine

pytestmark = pytest.mark.anyio

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
SECRETS = {"authorization": "Bearer of-a-user", "cookie": "session=of-a-user", "x-api-key": "of-a-user"}
NEVER = [
    "169.254.169.254",
    "fe80::1",
    "fd00:ec2::254",
    "::ffff:169.254.169.254",
    "0.0.0.0",
    "224.0.0.1",
    "100.100.100.200",
]


@pytest.mark.parametrize("told", [False, True])
async def test_credentials_go_only_where_the_router_was_told_to_send_them(
    store: Store, valkey_url: str, told: bool
) -> None:
    changed = {"credentials_to": "127.0.0.1"} if told else {}
    async with raw_engine(ANSWER) as engine, running_fleet(store, {}) as fleet:
        await fleet.report("w1", engine.url)
        async with running_proxy(valkey_url, **changed) as client:
            await client.post("/v1/completions", json={"model": MODEL, "prompt": [1, 2, 3]}, headers=SECRETS)
    heads = "".join(engine.heads).lower()
    assert heads.startswith("post /v1/completions")
    assert ("of-a-user" in heads) is told


async def test_a_rogue_publisher_gets_no_request_at_an_address_that_is_not_allowed(
    store: Store, valkey_url: str
) -> None:
    async with raw_engine(ANSWER) as engine, running_fleet(store, {}) as fleet:
        await fleet.report("w1", engine.url)
        async with running_proxy(valkey_url, engine_addresses="10.0.0.0/8") as client:
            answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": [1, 2, 3]}, headers=SECRETS)
    assert answer.status_code == 503 and not engine.heads


@pytest.mark.parametrize("ip", NEVER)
@pytest.mark.parametrize("allowed", [(), ("*",), ("0.0.0.0/0", "::/0")])
def test_link_local_and_metadata_addresses_are_never_connected_to(ip: str, allowed: tuple[str, ...]) -> None:
    found = parse_ip(ip)
    assert found is not None
    assert not AddressPolicy(allowed, near=True).allows(ip, 80, found)
    assert not AddressPolicy(allowed, near=True).allows("a-name.example", 80, found)


@pytest.mark.parametrize(
    ("ip", "near", "expected"),
    [
        ("10.1.2.3", False, True),
        ("192.168.0.1", False, True),
        ("100.64.3.4", False, True),
        ("fd12::1", False, True),
        ("8.8.8.8", False, False),
        ("2001:4860:4860::8888", True, False),
        ("127.0.0.1", False, False),
        ("127.0.0.1", True, True),
        ("::1", False, False),
    ],
)
def test_without_a_list_private_addresses_are_allowed(ip: str, near: bool, expected: bool) -> None:
    assert AddressPolicy(near=near).allows(ip, 8000, ip_address(ip)) is expected


def test_an_address_that_indexers_vouch_for_is_allowed() -> None:
    policy = AddressPolicy(near=False)
    policy.update(
        [record("w1", "http://8.8.8.8:8000").model_copy(update={"vouched": True}), record("w2", "http://9.9.9.9")]
    )
    assert policy.allows("8.8.8.8", 8000, ip_address("8.8.8.8"))
    assert not policy.allows("8.8.8.8", 8001, ip_address("8.8.8.8"))
    assert not policy.allows("9.9.9.9", 80, ip_address("9.9.9.9"))


@pytest.mark.parametrize(
    "url",
    [
        *("http://u:p@h:80", "http://h/path", "http://h?x", "http://h#x", "ftp://h", "h:80", "http://", "http://h:0"),
        *("http://h:99999", "http://[::1", "http://h\n", "file:///etc/passwd", "http://@h", "http://h:80/v1/../x"),
    ],
)
def test_an_address_is_scheme_host_and_port_alone(url: str) -> None:
    with pytest.raises(InvalidValue) as raised:
        check_origin(url)
    assert url not in str(raised.value)
    assert record("w1", url).endpoint.url == ""


@pytest.mark.parametrize("url", ["HTTPS://One:8443", "https://One:8443/", " https://One:8443", "https://One:8443?"])
def test_one_address_has_one_form(url: str) -> None:
    assert check_origin(url) == record("w1", url).endpoint.url == "https://One:8443"


def test_lists_have_networks_names_and_ports() -> None:
    found = AddressList.parse(("10.0.0.0/8:8000", "*.svc", "[fd00::1]:9000", "fd01::/16", "one"))
    assert found.allows("10.1.1.1", 8000) and not found.allows("10.1.1.1", 8001)
    assert found.allows("a.SVC.", 1) and not found.allows("svc", 1)
    assert found.allows("fd00::1", 9000) and found.allows("fd01::5", 1) and found.allows("one", 1)
