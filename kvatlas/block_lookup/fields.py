"""Residencies as JSON types, as they appear in the output of commands and in HTTP answers."""

from typing import Any

from kvatlas.blocks.external_chain import hash_text
from kvatlas.blocks.residency import Residency
from kvatlas.identity import Scope


def scope_fields(scope: Scope) -> dict[str, str | None]:
    return {
        "model_id": scope.model_id,
        "tokenizer_id": scope.tokenizer_id,
        "adapter_id": scope.adapter_id,
        "tenant_id": scope.tenant_id,
        "chain": scope.chain,
    }


def residency_fields(residency: Residency) -> dict[str, Any]:
    """The fields of a residency. The hash is given as 16 hex digits, because JSON numbers can't hold 64 bits."""
    return {
        "worker": residency.worker_id,
        **scope_fields(residency.scope),
        "tier": residency.tier.label,
        "sequence_hash": hash_text(residency.sequence_hash),
        "bytes": residency.bytes,
        "pinned": residency.pinned,
        "resumable": residency.resumable,
    }
