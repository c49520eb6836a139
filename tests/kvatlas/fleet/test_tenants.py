"""The tenants whose prompts a worker may get."""

import pytest

from kvatlas.fleet.identities import Identities, Identity
from kvatlas.fleet.tenants import include


@pytest.mark.parametrize(
    ("patterns", "tenant_id", "expected"),
    [
        (("acme",), "acme", True),
        (("acme",), "acme/salt", True),
        (("acme",), "acme/a/b", True),
        (("acme",), "acme2", False),
        (("acme",), "other/acme", False),
        (("acme*",), "acme-test", True),
        (("*",), "anybody", True),
        ((), "anybody", False),
    ],
)
def test_a_name_includes_its_salts(patterns: tuple[str, ...], tenant_id: str, expected: bool) -> None:
    assert include(patterns, tenant_id) is expected


def test_an_identity_says_whose_prompts_its_workers_may_get() -> None:
    identities = Identities(
        {
            "a": Identity(workers=("w1",), tenants=("acme", "b")),
            "b": Identity(workers=("w2",), tenants=("acme", "*")),
            "c": Identity(workers=("*",), tenants=("c",)),
        }
    )
    assert [identities.tenants_of(one) for one in ("w1", "w2", "w3")] == [("acme", "b"), (), ("c",)]
    assert Identities({}).tenants_of("w1") == ()
