"""Clients files: what they prove, and the one-line error for each mistake."""

from pathlib import Path

import pytest

from kvatlas.errors import SettingsError
from kvatlas_router.tenancy.caller import Caller
from kvatlas_router.tenancy.proof import Proof, hash_of
from kvatlas_router.tenancy.refusals import ForeignTenant, Unproven

pytestmark = pytest.mark.anyio
KEY = b"kva-key"
HASH = hash_of(KEY)


def proof_of(folder: Path, text: str) -> Proof:
    (folder / "clients.toml").write_text(text)
    return Proof(folder / "clients.toml")


async def prove(
    proof: Proof, *headers: tuple[bytes, bytes], address: str = "10.0.0.9", certificate: str | None = None
) -> Caller:
    return await proof.prove(headers, address, frozenset() if certificate is None else frozenset((certificate,)))


async def test_a_key_is_shown_as_clients_of_each_api_do(tmp_path: Path) -> None:
    proof = proof_of(tmp_path, f"[clients.a]\nkeys = ['{HASH}']\ntenants = ['acme', 'acme-test']\npriority = -2\n")
    for header in ((b"authorization", b"bearer  " + KEY), (b"x-api-key", KEY), (b"api-key", KEY)):
        found = await prove(proof, header)
        assert (found.name, found.tenant_id, found.priority, found.is_front) == ("a", "acme", -2, False)
    assert (await prove(proof, (b"x-api-key", KEY), (b"x-kvatlas-tenant", b"acme-test"))).tenant_id == "acme-test"
    for wrong in (b"", KEY + b"x", HASH.encode()):
        with pytest.raises(Unproven):
            await prove(proof, (b"x-api-key", wrong))


async def test_a_certificate_proves_by_each_of_its_names(tmp_path: Path) -> None:
    proof = proof_of(tmp_path, "[clients.a]\ncertificates = ['spiffe://acme/app', 'app.acme']\ntenants = ['acme']\n")
    assert (await prove(proof, certificate="spiffe://acme/app")).tenant_id == "acme"
    assert (await prove(proof, certificate="app.acme")).tenant_id == "acme"
    with pytest.raises(Unproven):
        await prove(proof, certificate="spiffe://acme/app2")


async def test_a_fronts_header_counts_from_its_address_alone(tmp_path: Path) -> None:
    text = (
        "tenant_header = 'X-Tenant'\n[clients.gw]\naddresses = ['10.1.0.0/16']\nfront = true\ntenants = ['a*', 'b']\n"
    )
    proof = proof_of(tmp_path, text)
    found = await prove(proof, (b"x-tenant", b"acme"), address="10.1.2.3")
    assert (found.name, found.tenant_id, found.is_front) == ("gw/acme", "acme", True)
    assert (await prove(proof, (b"x-tenant", b"b"), address="::ffff:10.1.2.3")).tenant_id == "b"
    with pytest.raises(Unproven):
        await prove(proof, (b"x-tenant", b"acme"), address="10.2.0.1")
    with pytest.raises(Unproven):
        await prove(proof, address="10.1.2.3")
    for named in (b"c", b"", b"a/salt", b"a" * 600, b"a\xff"):
        with pytest.raises(ForeignTenant):
            await prove(proof, (b"x-tenant", named), address="10.1.2.3")
    with pytest.raises(ForeignTenant):
        await prove(proof, (b"x-tenant", b"b"), (b"x-tenant", b"acme"), address="10.1.2.3")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "it names no client"),
        ("[clients.a]\ntenants = ['a']\n", "clients.a can't prove itself"),
        ("[clients.a]\nkeys = ['secret-key']\ntenants = ['a']\n", "clients.a.keys.0: expected sha256:"),
        (f"[clients.a]\nkeys = ['{HASH}']\n", "clients.a.tenants is missing"),
        (f"[clients.a]\nkeys = ['{HASH}']\ntenants = ['*']\n", "has * in its tenants"),
        (f"[clients.a]\nkeys = ['{HASH}']\ntenants = ['a/b']\n", "clients.a.tenants.0 is 'a/b'"),
        (f"[clients.a]\nkeys = ['{HASH}']\ntenants = ['a']\nrpm = 1\n", "clients.a.rpm is 1; there is no such field"),
        ("[clients.a]\naddresses = ['10.0.0.0/8']\ntenants = ['a']\n", "has addresses, which prove no tenant"),
        ("[issuers.a]\nissuer = 'x'\naudience = 'y'\n", "exactly one of keys_file and keys_url"),
        (
            "[issuers.a]\nissuer = 'x'\naudience = 'y'\nkeys_url = 'http://10.0.0.1/'\n",
            "http is allowed only for loopback",
        ),
        (
            f"[clients.a]\nkeys = ['{HASH}']\ntenants = ['a']\n[clients.b]\nkeys = ['{HASH}']\ntenants = ['b']\n",
            "clients.b and clients.a have a key or certificate in common",
        ),
        ("[clients]\na = 1\n", "clients is not a table of tables"),
        ("clients = [", "clients.toml': "),
    ],
)
def test_a_mistake_gets_one_line_without_a_key(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(SettingsError) as error:
        proof_of(tmp_path, text)
    assert line in str(error.value) and "secret-key" not in str(error.value) and "\n" not in str(error.value)
