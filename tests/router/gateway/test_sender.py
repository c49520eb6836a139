"""A picker believes the gateway about a request's sender, never the client."""

import json

import pytest
from google.protobuf.struct_pb2 import Struct

from kvatlas.errors import InvalidValue
from kvatlas_router.gateway.asked_request import AskedRequest
from kvatlas_router.gateway.extension_objects import PoolObjects
from kvatlas_router.gateway.picker import RequestHead
from kvatlas_router.gateway.sender import SenderTrust, SenderUnknown

pytestmark = pytest.mark.anyio
FAIRNESS = "x-gateway-inference-fairness-id"


def head(*headers: tuple[str, str], **metadata: object) -> RequestHead:
    given = ((":method", "POST"), (":path", "/v1/completions"), ("content-type", "application/json"), *headers)
    structs = {}
    for namespace, fields in metadata.items():
        structs[namespace] = Struct()
        structs[namespace].update(fields)  # type: ignore[arg-type]
    return RequestHead([(name.encode(), value.encode()) for name, value in given], None, structs)


async def test_without_a_source_there_is_one_tenant_whatever_clients_say() -> None:
    trust = SenderTrust.of((), "")
    body = json.dumps({"model": "m", "prompt": "Hi", "tenant_id": "acme"}).encode()
    asked = await AskedRequest.read(
        head((FAIRNESS, "acme"), ("x-tenant", "acme")), body, PoolObjects(), trust, fairness_header=FAIRNESS
    )
    assert asked.caller.tenant_id is None and asked.labels.tenant == ""
    believed = SenderTrust.of((FAIRNESS,), "")
    asked = await AskedRequest.read(head((FAIRNESS, "acme")), body, PoolObjects(), believed, fairness_header=FAIRNESS)
    assert asked.caller.tenant_id is None and asked.labels.tenant == "acme"


def test_a_header_names_the_tenant_once() -> None:
    trust = SenderTrust.of((), "header:X-Tenant")
    assert trust.caller(head(("x-tenant", "acme"))).tenant_id == "acme"
    for headers in ((), (("x-tenant", "acme"), ("x-tenant", "other")), (("x-tenant", ""),), (("x-tenant", "acme/x"),)):
        with pytest.raises(SenderUnknown):
            trust.caller(head(*headers))


def test_metadata_of_the_gateways_filters_name_the_tenant_and_headers_do_not() -> None:
    trust = SenderTrust.of((), "metadata:envoy.filters.http.jwt_authn/claims.tenant")
    named = {"envoy.filters.http.jwt_authn": {"claims": {"tenant": "acme"}}}
    assert trust.caller(head(("x-tenant", "other"), **named)).tenant_id == "acme"
    for metadata in ({}, {"other": {"claims": {"tenant": "acme"}}}, {"envoy.filters.http.jwt_authn": {"claims": "acme"}},
                     {"envoy.filters.http.jwt_authn": {"claims": {"tenant": 7}}}):  # fmt: skip
        with pytest.raises(SenderUnknown):
            trust.caller(head(("x-tenant", "acme"), ("claims.tenant", "acme"), **metadata))


async def test_a_salt_counts_within_its_tenant() -> None:
    trust = SenderTrust.of((), "header:x-tenant")
    for own, salt in (({}, "acme"), ({"cache_salt": "other"}, "acme/other")):
        body = json.dumps({"model": "m", "prompt": "Hi", **own}).encode()
        asked = await AskedRequest.read(head(("x-tenant", "acme")), body, PoolObjects(), trust, salts=True)
        assert asked.changed is not None and json.loads(asked.changed)["cache_salt"] == salt
        assert asked.call.text is not None and asked.call.text.cache_salt == salt


@pytest.mark.parametrize("text", ["x-tenant", "header:", "metadata:a", "metadata:/b", "body:tenant"])
def test_another_source_is_a_mistake(text: str) -> None:
    with pytest.raises(InvalidValue, match="expected header:NAME or metadata:NAMESPACE/KEY"):
        SenderTrust.of((), text)
