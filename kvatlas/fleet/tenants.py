"""Which tenants a list of names stands for. `acme/x` is a part of tenant acme: one of its cache salts."""

from kvatlas.validation import matches

PART_MARK = "/"


def include(patterns: tuple[str, ...], tenant_id: str) -> bool:
    """Is the tenant, or the one that it is a part of, among these names? A `*` in one stands for any text."""
    return matches(tenant_id, patterns) or (
        PART_MARK in tenant_id and matches(tenant_id.partition(PART_MARK)[0], patterns)
    )
