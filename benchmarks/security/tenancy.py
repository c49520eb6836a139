"""CPU time to prove a request's tenant, by kind of proof: a key, a certificate, a front's address, a known and a new JWT; and
of the whole gate in front of the proxy, with limits."""

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from rich.console import Console
from starlette.types import Message, Receive, Scope, Send

from benchmarks.result import Result, tabulate
from kvatlas_router.tenancy.allowance_exchange import AllowanceExchange
from kvatlas_router.tenancy.counters import TenancyCounters
from kvatlas_router.tenancy.entrance import Entrance
from kvatlas_router.tenancy.proof import Proof, hash_of
from kvatlas_router.tenant_gate import TenantGate

CLIENTS = 1_000
RUNS = 2_000
BUDGET_US = 50.0

Headers = list[tuple[bytes, bytes]]


async def measure() -> list[Result]:
    key = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
    with tempfile.TemporaryDirectory() as folder:
        proof = Proof(_write_clients(Path(folder), key))
        tokens = [_token(key, number) for number in range(RUNS)]
        shown = partial(_prove, proof)
        usual: Headers = [(f"x-header-{number}".encode(), b"a value of some length") for number in range(12)]
        rows: dict[str, list[Callable[[], Awaitable[object]]]] = {
            "a key": [partial(shown, [*usual, _bearer(b"key-999")])] * RUNS,
            "a certificate": [partial(shown, usual, certificate=frozenset(("app-999",)))] * RUNS,
            "a front's header": [
                partial(shown, [*usual, (b"x-kvatlas-tenant", b"acme")], address="10.1.2.3"),
            ]
            * RUNS,
            "a JWT seen before": [partial(shown, [*usual, _bearer(tokens[0])])] * RUNS,
            "a new JWT (RS256)": [partial(shown, [*usual, _bearer(token)]) for token in tokens],
        }
        gate = TenantGate(_answer, Entrance(proof, AllowanceExchange(), TenancyCounters()))
        rows["a key, and the gate with its limits"] = [partial(_pass, gate, [*usual, _bearer(b"key-999")])] * RUNS
        results = []
        for name, calls in rows.items():
            await calls[0]()
            began_s = time.thread_time()
            for call in calls:
                await call()
            mean_us = (time.thread_time() - began_s) / len(calls) * 1e6
            budget = None if "new" in name else BUDGET_US
            results.append(Result(f"proof of a request by {name}, mean", mean_us, "us", budget))
        return results


def _write_clients(folder: Path, key: rsa.RSAPrivateKey) -> Path:
    jwk = {**jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "a"}
    (folder / "jwks").write_text(json.dumps({"keys": [jwk]}))
    clients = [
        f'[clients.c{number}]\nkeys = ["{hash_of(f"key-{number}".encode())}"]\ncertificates = ["app-{number}"]\n'
        f'tenants = ["t{number}"]\nrequests_per_minute = 10000000\ntokens_per_minute = 1000000000\n'
        for number in range(CLIENTS)
    ]
    front = '[clients.front]\naddresses = ["10.1.0.0/16"]\nfront = true\ntenants = ["*"]\n'
    issuer = f'[issuers.a]\nissuer = "i"\naudience = "a"\nkeys_file = "{folder / "jwks"}"\n'
    file = folder / "clients.toml"
    file.write_text("".join([*clients, front, issuer]))
    return file


def _token(key: rsa.RSAPrivateKey, number: int) -> bytes:
    claims = {"iss": "i", "aud": "a", "exp": time.time() + 3_600, "tenant": "acme", "jti": str(number)}
    token: str = jwt.encode(claims, key, algorithm="RS256", headers={"kid": "a"})
    return token.encode()


def _bearer(value: bytes) -> tuple[bytes, bytes]:
    return b"authorization", b"Bearer " + value


async def _prove(
    proof: Proof, headers: Headers, address: str = "127.0.0.1", certificate: frozenset[str] = frozenset()
) -> object:
    return await proof.prove(headers, address, certificate)


async def _pass(gate: TenantGate, headers: Headers) -> None:
    scope: Scope = {"path": "/v1/completions", "method": "POST", "client": ("127.0.0.1", 1), "headers": headers}
    await gate(scope, _receive, _send)


async def _receive() -> Message:
    return {"type": "http.request", "body": b""}


async def _send(_: Message) -> None:
    pass


async def _answer(_: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})


def main() -> None:
    Console(width=130).print(tabulate(asyncio.run(measure()), f"proof of tenants, {CLIENTS:,} clients"))


if __name__ == "__main__":
    main()
