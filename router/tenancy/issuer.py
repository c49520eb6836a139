"""Checks a JWT: its issuer, its audience, and the tenant that its claim names (RFC 7519; RFC 8725 says what to
check)."""

import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import jwt
from jwt.utils import base64url_decode

from kvatlas.errors import DATA_ERRORS
from kvatlas.validation import matches
from kvatlas_router.tenancy.caller import Caller
from kvatlas_router.tenancy.clients_file import Issuer, is_tenant_name
from kvatlas_router.tenancy.issuer_keys import IssuerKeys
from kvatlas_router.tenancy.refusals import Unproven

ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Public keys only: with a shared secret, anyone who can check a token can also make one."""
MOST_REMEMBERED = 10_000
MOST_TOKEN_BYTES = 16 << 10
LEEWAY_S = 30
"""Allowance for clocks that differ."""


class IssuedTokens:
    """Verifies the tokens of all issuers listed in one file. A verified token is cached until it expires or the keys
    change."""

    def __init__(self, issuers: Mapping[str, Issuer]) -> None:
        self._issuers = {
            issuer.issuer: (name, issuer, IssuerKeys(name, issuer.keys_file, issuer.keys_url))
            for name, issuer in issuers.items()
        }
        self._known: OrderedDict[bytes, tuple[float, IssuerKeys, int, Caller]] = OrderedDict()

    async def prove(self, token: bytes) -> Caller:
        """The token's caller. Raises Unproven or KeysUnknown."""
        digest = sha256(token).digest()
        if (known := self._known.get(digest)) is not None:
            until, keys, version, caller = known
            if time.time() < until and keys.version == version:
                keys.refresh()
                return caller
            del self._known[digest]
        caller, until, keys = await self._check(token)
        self._known[digest] = until, keys, keys.version, caller
        if len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)
        return caller

    async def _check(self, token: bytes) -> tuple[Caller, float, IssuerKeys]:
        if len(token) > MOST_TOKEN_BYTES:
            raise Unproven("the token is too long")
        header, unchecked = _read_unchecked(token)
        name, issuer, keys = self._issuers.get(str(unchecked.get("iss")), ("", None, None))
        if issuer is None or keys is None:
            raise Unproven("the token's issuer is not known here")
        key_id = header.get("kid")
        key = await keys.of(key_id if isinstance(key_id, str) else None)
        if key is None:
            raise Unproven("the token is signed by a key that its issuer does not list")
        claims = _claims(token, key, issuer)
        tenant_id = claims.get(issuer.claim)
        if not isinstance(tenant_id, str) or not is_tenant_name(tenant_id) or not matches(tenant_id, issuer.tenants):
            raise Unproven(f"the token's claim {issuer.claim!r} names no tenant that its issuer may vouch for")
        return issuer.caller(f"{name}/{tenant_id}", tenant_id), int(claims["exp"]) + LEEWAY_S, keys


def _read_unchecked(token: bytes) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The unverified header and claims, used only to find the key to check with. PyJWT's own parsing takes longer than checking
    a signature."""
    try:
        header, claims = (json.loads(base64url_decode(part)) for part in token.split(b".")[:2])
    except (ValueError, RecursionError):
        header = claims = None
    if not isinstance(header, dict) or not isinstance(claims, dict):
        raise Unproven("no valid key or token; send `Authorization: Bearer KEY`")
    return header, claims


def _claims(token: bytes, key: Any, issuer: Issuer) -> Mapping[str, Any]:
    try:
        claims: Mapping[str, Any] = jwt.decode(
            token,
            key,
            algorithms=ALGORITHMS,
            audience=issuer.audience,
            issuer=issuer.issuer,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iss", "aud"]},
        )
    except jwt.ExpiredSignatureError:
        raise Unproven("the token has expired") from None
    except (*DATA_ERRORS, jwt.PyJWTError) as error:  # such as a key whose type doesn't match the algorithm
        raise Unproven(f"the token is invalid: {error!s:.80}") from None
    return claims
