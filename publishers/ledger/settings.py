"""Settings of the ledger: facts that it can't learn from an engine's events."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvatlas.errors import InvalidValue
from kvatlas.identity import DEFAULT_TENANT, Scope
from kvatlas.validation import MAX_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Identity and event semantics of one engine.

    `block_size`: tokens in a full block; None: in the largest block seen so far. `granularity` g: publish only blocks with
    index % g == g-1. `chunk_tokens`: the chunk size of chunked attention; 0: unknown. `alignment_tokens`: the scheduler's block
    size; 0: the smallest one that fits all groups. `eagle`: the engine speculates with EAGLE; `eagle_groups`: the KV cache
    groups with its layers, by default those of full attention. `hybrid`: the model also has other attention, which its events
    don't show. `set_semantics`: the engine reports hits again, so a copy counts once, however often it is reported (vLLM with
    `kv_cache_report_mode="full"`). `salt_is_tenant`: a cache salt is the tenant's id; otherwise it is hashed. `adapter_ids`:
    adapter names by id, for an engine that reports only ids; blocks of other adapters are left out. `keep_untold`: hold blocks
    whose removal is never reported until `Ledger.expire` removes them. `has_store`: object store blocks are in a shared store
    with its own publisher (`kvatlas_publishers.shared_store`). Raises InvalidValue for sizes below 1 or for names that are not
    valid in a scope.
    """

    model_id: str
    tokenizer_id: str
    tenant_id: str = DEFAULT_TENANT
    block_size: int | None = None
    block_bytes: int = 0
    token_bytes: int = 0
    granularity: int = 1
    set_semantics: bool = False
    salt_is_tenant: bool = False
    chunk_tokens: int = 0
    alignment_tokens: int = 0
    eagle: bool = False
    eagle_groups: frozenset[int] = frozenset()
    hybrid: bool = False
    keep_untold: bool = False
    has_store: bool = False
    adapter_ids: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Scope(self.model_id, self.tokenizer_id, None, self.tenant_id)
        if self.block_size is not None and self.block_size < 1:
            raise InvalidValue(f"block size {self.block_size}; expected at least 1")
        if self.granularity < 1:
            raise InvalidValue(f"granularity {self.granularity}; expected at least 1")
        for what, number in (
            ("bytes per block", self.block_bytes),
            ("bytes per token", self.token_bytes),
            ("chunk size", self.chunk_tokens),
            ("scheduler block size", self.alignment_tokens),
        ):
            if number < 0:
                raise InvalidValue(f"{what} {number}; expected 0 (unknown) or more")

    def block_bytes_of(self, block_size: int | None) -> int:
        """Bytes of KV cache in a block of `block_size` tokens; 0: unknown."""
        return self.block_bytes or min(MAX_BLOCK_BYTES, self.token_bytes * (block_size or 0))

    @property
    def identity(self) -> list[str | int | bool | None]:
        """Settings that affect the blocks' hashes or counts."""
        of_engine = [
            self.model_id,
            self.tokenizer_id,
            self.tenant_id,
            self.block_size,
            self.set_semantics,
            self.salt_is_tenant,
        ]
        return [*of_engine, *(f"{name}={adapter}" for name, adapter in sorted(self.adapter_ids.items()))]
