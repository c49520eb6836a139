"""Client certificates and trusted fronts, against processes over TLS."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trustme

from kvatlas.store.connection import Store
from tests.attacks.guarded_router import COMPLETIONS, Process, bearer, completion, guarded_router, tenants_fleet

pytestmark = pytest.mark.anyio

CLIENTS = """
[clients.app]
certificates = ["app.acme"]
tenants = ["acme"]
[clients.gateway]
certificates = ["gateway.corp"]
front = true
tenants = ["acme", "other"]
"""


@asynccontextmanager
async def router_over_tls(valkey_url: str, folder: Path, ca: trustme.CA) -> AsyncIterator[Process]:
    own = trustme.CA()
    issued = own.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    ca.cert_pem.write_to_path(folder / "clients.pem")
    own.cert_pem.write_to_path(folder / "ca.pem")
    flags = ("--http-cert-file", "cert.pem", "--http-key-file", "key.pem", "--http-client-ca-file", "clients.pem")
    paths = [flag if flag.startswith("--") else str(folder / flag) for flag in flags]
    async with guarded_router(valkey_url, folder, CLIENTS, *paths) as router:
        yield router


def client_of(router: Process, folder: Path, ca: trustme.CA | None, name: str = "") -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if ca is not None:
        ca.issue_cert(name).configure_cert(context)
    return httpx.AsyncClient(base_url=router.url, verify=context, timeout=60)


async def test_a_certificate_of_the_clients_authority_proves_its_tenant(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    ca = trustme.CA()
    async with tenants_fleet(store), router_over_tls(valkey_url, tmp_path, ca) as router:
        async with client_of(router, tmp_path, ca, "app.acme") as client:
            assert (await client.post(COMPLETIONS, json=completion())).status_code == 200
            foreign = await client.post(COMPLETIONS, json=completion(), headers={"x-kvatlas-tenant": "other"})
            assert foreign.status_code == 403
        async with client_of(router, tmp_path, ca, "gateway.corp") as client:
            for tenant, status in (("acme", 200), ("other", 200), ("third", 403), ("acme/salt", 403)):
                answer = await client.post(COMPLETIONS, json=completion(), headers={"x-kvatlas-tenant": tenant})
                assert answer.status_code == status, tenant
            twice = [("x-kvatlas-tenant", "other"), ("x-kvatlas-tenant", "acme")]
            assert (await client.post(COMPLETIONS, json=completion(), headers=twice)).status_code == 403
            assert (await client.post(COMPLETIONS, json=completion())).status_code == 401
        async with client_of(router, tmp_path, ca, "app.evil") as client:
            assert (await client.post(COMPLETIONS, json=completion())).status_code == 401
        async with client_of(router, tmp_path, None) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.post(COMPLETIONS, json=completion(), headers=bearer("app.acme"))).status_code == 401
        async with client_of(router, tmp_path, trustme.CA(), "app.acme") as client:
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await client.post(COMPLETIONS, json=completion())
