"""A credentials file (a JWT and its seed) against a server with an operator and accounts, as `nsc` sets them up."""

import json
import os
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nkeys
import pytest

from kvatlas.bus.access import NatsAccess
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import ALL_ALIVE, alive_subject
from kvatlas.embedded.nats import NatsProcess
from kvatlas.errors import AccessDenied
from tests.eventually import until
from tests.kvatlas_cli.auth.guarded_servers import connected

pytestmark = pytest.mark.anyio

UNLIMITED = {"subs": -1, "data": -1, "payload": -1}
SYSTEM = {"limits": {**UNLIMITED, "conn": -1, "leaf": -1, "imports": -1, "exports": -1}}
ACCOUNT = {"limits": {**SYSTEM["limits"], "mem_storage": -1, "disk_storage": -1}}
USER = {**UNLIMITED, "pub": {"allow": [alive_subject("w")]}, "sub": {"allow": [ALL_ALIVE, "_INBOX.w.>"]}}


class Signer:
    """An NKey that signs JWTs."""

    def __init__(self, prefix: int) -> None:
        self.seed: bytes = nkeys.encode_seed(os.urandom(32), prefix)
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.name: str = self._pair.public_key.decode()

    def sign(self, subject: str, kind: str, claims: dict[str, Any]) -> str:
        """A signed JWT about the subject."""
        now_s = int(time.time())
        body = {"iss": self.name, "sub": subject, "name": kind, "iat": now_s, "jti": os.urandom(8).hex()}
        body["nats"] = {**claims, "type": kind, "version": 2}
        text = ".".join(_encode(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
        return f"{text}.{_encode(self._pair.sign(text.encode()))}"


def _encode(part: bytes) -> str:
    return urlsafe_b64encode(part).rstrip(b"=").decode()


def write_credentials(file: Path, account: Signer) -> Path:
    """Write credentials in the format of `nsc generate creds`."""
    user = Signer(nkeys.PREFIX_BYTE_USER)
    token = account.sign(user.name, "user", USER)
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    return file


@pytest.fixture(scope="module")
def account() -> Signer:
    return Signer(nkeys.PREFIX_BYTE_ACCOUNT)


@pytest.fixture(scope="module")
def server(account: Signer) -> Iterator[NatsProcess]:
    operator, system = Signer(nkeys.PREFIX_BYTE_OPERATOR), Signer(nkeys.PREFIX_BYTE_ACCOUNT)
    known = {one.name: operator.sign(one.name, "account", it) for one, it in ((account, ACCOUNT), (system, SYSTEM))}
    lines = [
        f"operator: {operator.sign(operator.name, 'operator', {})}",
        f"system_account: {system.name}",
        "resolver: MEMORY",
        f"resolver_preload: {json.dumps(known)}",
    ]
    with NatsProcess(config="\n".join(lines)) as started:
        yield started


async def test_a_credentials_file_gives_its_users_rights_and_no_others(
    server: NatsProcess, account: Signer, tmp_path: Path
) -> None:
    creds = write_credentials(tmp_path / "w.creds", account)
    async with connected(NatsAccess(server.url, creds_file=creds, inbox="_INBOX.w")) as (client, refused):
        heard = await client.subscribe(ALL_ALIVE)
        await client.publish(alive_subject("w"), b"own")
        assert (await heard.next_msg(timeout=60)).data == b"own"
        await client.publish(alive_subject("other"), b"somebody else's")
        await until(lambda: any(alive_subject("other") in line for line in refused), what="it is refused")


@pytest.mark.parametrize("kind", ["of an account that the server does not know", "no file of credentials"])
async def test_other_credentials_are_one_line(server: NatsProcess, kind: str, tmp_path: Path) -> None:
    creds = write_credentials(tmp_path / "x.creds", Signer(nkeys.PREFIX_BYTE_ACCOUNT))
    secret = creds.read_text().split("SEED-----\n")[1].split("\n")[0]
    if kind.startswith("no"):
        creds.write_text(secret)
    with pytest.raises(AccessDenied) as told:
        await connect_nats(NatsAccess(server.url, creds_file=creds), name="test", wait=False)
    assert secret not in str(told.value) and "\n" not in str(told.value)
