"""Matches tenants against a list of names. `acme/x` is a part of the tenant acme: one of its cache salts."""

from kvatlas.validation import matches

PART_MARK = "/"


def include(patterns: tuple[str, ...], tenant_id: str) -> bool:
    """True if the tenant, or the tenant that it is a part of, matches one of these names. `*` stands for any text."""
    return matches(tenant_id, patterns) or (
        PART_MARK in tenant_id and matches(tenant_id.partition(PART_MARK)[0], patterns)
    )
