"""JWTs: which are valid, which are not, and whose keys count."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kvatlas_router.tenancy.issuer import LEEWAY_S
from kvatlas_router.tenancy.issuer_keys import FILE_AGE_S
from kvatlas_router.tenancy.proof import Proof
from kvatlas_router.tenancy.refusals import ForeignTenant, KeysUnknown, Unproven
from tests.eventually import until

jwt = pytest.importorskip("jwt", reason="PyJWT is not installed")
pytestmark = pytest.mark.anyio

ISSUER = "https://login.corp"


class Keys:
    """An issuer's keys, served as a JWKS."""

    def __init__(self) -> None:
        self.by_id: dict[str, rsa.RSAPrivateKey] = {}
        self.asked = 0
        self.url = ""

    def add(self, key_id: str) -> None:
        self.by_id[key_id] = rsa.generate_private_key(public_exponent=65_537, key_size=2048)

    def jwks(self) -> dict[str, Any]:
        algorithm = jwt.algorithms.RSAAlgorithm
        keys = [
            {**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": id, "use": "sig"}
            for id, key in self.by_id.items()
        ]
        return {"keys": keys}

    def sign(self, key_id: str = "a", **changed: Any) -> bytes:
        claims = {"iss": ISSUER, "aud": "kvatlas", "exp": time.time() + 600, "tenant": "acme", **changed}
        claims = {name: value for name, value in claims.items() if value is not None}
        # jwt.encode refuses some wrong claims
        token: str = jwt.api_jws.encode(json.dumps(claims).encode(), self.by_id[key_id], "RS256", {"kid": key_id})
        return token.encode()


@asynccontextmanager
async def served_keys() -> AsyncIterator[Keys]:
    keys = Keys()
    keys.add("a")

    async def answer(_: web.Request) -> web.Response:
        keys.asked += 1
        return web.json_response(keys.jwks())

    application = web.Application()
    application.router.add_get("/jwks", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        keys.url = f"http://127.0.0.1:{runner.addresses[0][1]}/jwks"
        yield keys
    finally:
        await runner.cleanup()


def proof_of(folder: Path, keys: str, more: str = "") -> Proof:
    file = folder / "clients.toml"
    file.write_text(f'[issuers.corp]\nissuer = "{ISSUER}"\naudience = "kvatlas"\n{keys}\n{more}\n')
    return Proof(file)


async def prove(proof: Proof, token: bytes, *named: bytes) -> str | None:
    headers = [(b"authorization", b"Bearer " + token), *((b"x-kvatlas-tenant", one) for one in named)]
    return (await proof.prove(headers, "127.0.0.1", frozenset())).tenant_id


async def test_the_claim_of_a_valid_token_names_the_tenant(tmp_path: Path) -> None:
    async with served_keys() as keys:
        proof = proof_of(tmp_path, f'keys_url = "{keys.url}"')
        token = keys.sign()
        assert [await prove(proof, token) for _ in range(3)] == ["acme"] * 3
        assert await prove(proof, token, b"acme") == "acme"
        with pytest.raises(ForeignTenant):
            await prove(proof, token, b"other")
        assert await prove(proof, keys.sign(tenant="other")) == "other"
        assert keys.asked == 1


def _forged(header: dict[str, Any], claims: dict[str, Any], signature: bytes = b"") -> bytes:
    parts = [json.dumps(header).encode(), json.dumps(claims).encode(), signature]
    return b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)


def forged_tokens(keys: Keys) -> dict[str, bytes]:
    """Tokens that prove nothing, by what is wrong with them. The issuer vouches for `acme` and for names that begin with
    `o`."""
    public = keys.by_id["a"].public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    der = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    claims = {"iss": ISSUER, "aud": "kvatlas", "exp": int(time.time()) + 600, "tenant": "acme"}
    stranger = Keys()
    stranger.add("a")
    head, _, signature = keys.sign().split(b".")

    def by_secret(secret: bytes, **header: Any) -> bytes:
        unsigned = b".".join(_forged({"alg": "HS256", "kid": "a", **header}, claims).split(b".")[:2])
        return _forged({"alg": "HS256", "kid": "a", **header}, claims, hmac.digest(secret, unsigned, hashlib.sha256))

    def by_stranger(**header: Any) -> bytes:
        named = {name: value for name, value in {"kid": "a", **header}.items() if value is not None}
        token: str = jwt.encode(claims, stranger.by_id["a"], algorithm="RS256", headers=named)
        return token.encode()

    own_key = stranger.jwks()["keys"][0]
    other_body = _forged({}, {**claims, "tenant": "other"}).split(b".")[1]
    return {
        "expired": keys.sign(exp=time.time() - 60),
        "not yet valid": keys.sign(nbf=time.time() + 600),
        "of tomorrow": keys.sign(iat=time.time() + 86_400),
        "without an end": keys.sign(exp=None),
        "with an end in words": keys.sign(exp="never"),
        "for another audience": keys.sign(aud="other"),
        "for no audience": keys.sign(aud=None),
        "of another issuer": keys.sign(iss="https://evil"),
        "of no issuer": keys.sign(iss=None),
        "of many issuers": keys.sign(iss=[ISSUER]),
        "without a tenant": keys.sign(tenant=None),
        "of many tenants": keys.sign(tenant=["acme"]),
        "of a tenant that the issuer may not name": keys.sign(tenant="widgets"),
        "of a tenant's part": keys.sign(tenant="acme/x"),
        "of half a letter": keys.sign(tenant="o\ud800"),
        "signed by a stranger": stranger.sign(),
        "signed by a stranger whose key it brings": by_stranger(jwk=own_key),
        "signed by a stranger whose certificate it brings": by_stranger(x5c=["MIIB"], x5u="http://127.0.0.1:1/"),
        "signed by a stranger whose key's address it brings": by_stranger(jku="http://127.0.0.1:1/"),
        "signed by a stranger, under no key's name": by_stranger(kid=None),
        "signed by a stranger, under a file's name": by_stranger(kid="../../../../dev/null"),
        "signed by nobody": _forged({"alg": "none", "kid": "a"}, claims),
        "signed by NoBody": _forged({"alg": "NoNe", "kid": "a"}, claims),
        "signed by no algorithm": _forged({"kid": "a"}, claims),
        "signed with the public key as a secret": by_secret(pem),
        "signed with the public key's bytes as a secret": by_secret(der),
        "signed with nothing as a secret": by_secret(b""),
        "signed with nothing as a secret, under a file's name": by_secret(b"", kid="/dev/null"),
        "under a name that is a list": by_secret(pem, kid=["a"]),
        "under a name that is an object": by_secret(pem, kid={"a": "a"}),
        "with an extension that must be understood": by_secret(pem, crit=["b64"], b64=False),
        "with another body": b".".join((head, other_body, signature)),
        "with a part more": keys.sign() + b".x",
        "without a signature": b".".join((head, _forged({}, claims).split(b".")[1], b"")),
        "with another kind of key": jwt.encode(
            claims, ec.generate_private_key(ec.SECP256R1()), algorithm="ES256", headers={"kid": "a"}
        ).encode(),
        "of no form": b"a.b.c",
        "very long": b"a" * 30_000 + b".b.c",
    }


async def test_no_other_token_counts(tmp_path: Path) -> None:
    async with served_keys() as keys:
        proof = proof_of(tmp_path, f'keys_url = "{keys.url}"', 'tenants = ["acme", "o*"]')
        for act, token in forged_tokens(keys).items():
            with pytest.raises(Unproven):
                print(f"a token {act}: {await prove(proof, token)}")
        assert await prove(proof, keys.sign()) == "acme"


async def test_new_keys_are_found_and_withdrawn_ones_do_not_count(tmp_path: Path) -> None:
    async with served_keys() as keys:
        proof = proof_of(tmp_path, f'keys_url = "{keys.url}"')
        old = keys.sign()
        assert await prove(proof, old) == "acme"
        issued = proof._tokens
        assert issued is not None
        ((_, _, known),) = issued._issuers.values()
        keys.by_id.clear()
        keys.add("b")
        now = time.monotonic()
        known._clock = lambda: now + 20  # an unknown key is asked for, but not at every request
        assert await prove(proof, keys.sign("b")) == "acme"
        with pytest.raises(Unproven):
            await prove(proof, old)


async def test_a_token_that_was_seen_counts_until_it_ends_and_no_longer(tmp_path: Path) -> None:
    async with served_keys() as keys:
        proof = proof_of(tmp_path, f'keys_url = "{keys.url}"')
        token = keys.sign(exp=int(time.time()) - LEEWAY_S + 2)
        assert await prove(proof, token) == "acme"

        async def has_expired() -> bool:
            try:
                return await prove(proof, token) is None
            except Unproven as error:
                return "has expired" in str(error)

        await until(has_expired, what="the token has expired")
        with pytest.raises(Unproven, match="has expired"):
            await prove(proof, token)


async def test_what_is_remembered_is_bounded_and_refusals_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas_router.tenancy.issuer.MOST_REMEMBERED", 3)
    async with served_keys() as keys:
        proof = proof_of(tmp_path, f'keys_url = "{keys.url}"')
        issued = proof._tokens
        assert issued is not None
        for number in range(5):
            await prove(proof, keys.sign(jti=str(number)))
            with pytest.raises(Unproven):
                await prove(proof, keys.sign(jti=str(number), aud="other"))
            with pytest.raises(Unproven):
                await prove(proof, b"%d.b.c" % number)
        assert len(issued._known) == 3


@pytest.mark.parametrize("others", [[], ["b"], ["b", "c"]])
async def test_a_key_that_is_withdrawn_from_a_file_counts_no_more(tmp_path: Path, others: list[str]) -> None:
    """Whatever else the file has, and even if the token was seen before."""
    keys, file = Keys(), tmp_path / "jwks"
    for key_id in ("a", *others):
        keys.add(key_id)
    file.write_text(json.dumps(keys.jwks()))
    proof, token = proof_of(tmp_path, f'keys_file = "{file}"'), keys.sign()
    assert await prove(proof, token) == "acme"
    issued = proof._tokens
    assert issued is not None
    ((_, _, known),) = issued._issuers.values()
    del keys.by_id["a"]
    file.write_text(json.dumps(keys.jwks()))
    now = time.monotonic()
    known._clock = lambda: now + FILE_AGE_S

    async def is_refused() -> bool:
        try:
            return await prove(proof, token) is None
        except Unproven:
            return True

    await until(is_refused, what="the file is read again")
    file.write_text("no keys")
    known._clock = lambda: now + 20 * FILE_AGE_S
    for one in others:
        assert await prove(proof, keys.sign(one)) == "acme", "a file that can't be read changes nothing"


async def test_keys_of_an_issuer_with_several_are_not_asked_for_again_and_again(tmp_path: Path) -> None:
    async with served_keys() as keys:
        keys.add("b")
        proof = proof_of(tmp_path, f'keys_url = "{keys.url}"')
        token = keys.sign()
        await prove(proof, token)
        issued = proof._tokens
        assert issued is not None
        ((_, _, known),) = issued._issuers.values()
        for later_s in range(20, 200, 20):
            known._clock = partial(add, time.monotonic(), later_s)
            assert await prove(proof, token) == await prove(proof, keys.sign("b")) == "acme"
        assert keys.asked == 1


@pytest.mark.parametrize(
    "said", [None, b"[1]", b'{"keys":' + b"[" * 100_000, b'{"keys":[{"kty":"RSA","n":"","e":""}]}']
)
async def test_keys_that_were_never_read_prove_nothing(tmp_path: Path, said: bytes | None) -> None:
    """Whatever the issuer answers instead."""
    keys = Keys()
    keys.add("a")
    (tmp_path / "jwks").write_bytes(said or b"")
    place = "keys_url = 'http://127.0.0.1:1/jwks'" if said is None else f"keys_file = '{tmp_path / 'jwks'}'"
    proof = proof_of(tmp_path, place)
    with pytest.raises(KeysUnknown):
        await prove(proof, keys.sign())


async def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    keys = Keys()
    keys.add("a")
    (tmp_path / "jwks").write_text(json.dumps(keys.jwks()))
    assert await prove(proof_of(tmp_path, f'keys_file = "{tmp_path / "jwks"}"'), keys.sign()) == "acme"
    pem = keys.by_id["a"].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "pem").write_bytes(pem)
    assert await prove(proof_of(tmp_path, f'keys_file = "{tmp_path / "pem"}"'), keys.sign()) == "acme"
