"""The KV cache groups of a fleet's model, and the caches that the lab builds for them.

The lab uses the simulator's own caches, with blocks of two tokens (`lab.requests`). Windows, chunks and intervals of real
tokens are converted to as many of those blocks. A window that ends within a block is rounded up, because engines need whole
blocks, and prompts resume after whole blocks.
"""

from dataclasses import dataclass, replace

from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.block_hash import SeededBlockHasher
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.engine.engine_cache import EngineCache
from kvatlas_simulator.hybrid_cache.cache import HybridCache
from kvatlas_simulator.hybrid_cache.groups import CacheGroup, Retention

CACHE_BLOCK = 2
"""Tokens per block in the lab's caches."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """`groups` in the order of the events' group index; several groups make a hybrid. `retention_interval`: in tokens;
    see `Retention`."""

    groups: tuple[CacheGroup, ...] = (CacheGroup(AttentionKind.FULL),)
    retention_interval: int = 0

    def __str__(self) -> str:
        """The groups in the form of flags."""
        return ",".join(map(str, self.groups))

    @property
    def is_hybrid(self) -> bool:
        return len(self.groups) > 1

    @property
    def chunk_tokens(self) -> int:
        """The chunk size of chunked attention; 0 if there is none. Events don't contain it."""
        return max((one.tokens for one in self.groups if one.kind is AttentionKind.CHUNKED_LOCAL), default=0)

    def scaled(self, block_tokens: int) -> "CacheLayout":
        """The layout in tokens of the lab's caches, for blocks of this many real tokens.

        Raises InvalidValue if chunks or the interval are not a multiple of such blocks.
        """
        groups = tuple(replace(one, tokens=_scaled_tokens(one, block_tokens)) for one in self.groups)
        return CacheLayout(groups, _whole_blocks("retention interval", self.retention_interval, block_tokens))

    def build(self, num_blocks: int, num_cpu_blocks: int, seed: int) -> EngineCache:
        """Build an empty cache for a scaled layout. Raises InvalidValue for a hybrid with a CPU tier, which the
        simulator does not have."""
        hasher = SeededBlockHasher(seed)
        if not self.is_hybrid:
            return KVCache(
                num_blocks=num_blocks,
                block_size=CACHE_BLOCK,
                hasher=hasher,
                num_cpu_blocks=num_cpu_blocks,
                clock=lambda: 0.0,  # nothing here expires
            )
        if num_cpu_blocks:
            raise InvalidValue(f"{len(self.groups)} groups with a CPU tier; expected one group, or --cpu-tokens 0")
        retention = Retention(self.retention_interval)
        return HybridCache(
            self.groups, num_blocks=num_blocks, block_size=CACHE_BLOCK, retention=retention, hasher=hasher
        )


def _scaled_tokens(group: CacheGroup, block_tokens: int) -> int:
    if group.kind is AttentionKind.SLIDING_WINDOW:
        return CACHE_BLOCK * -(-(group.tokens - 1) // block_tokens) + 1
    return _whole_blocks("chunks", group.tokens, block_tokens)


def _whole_blocks(what: str, tokens: int, block_tokens: int) -> int:
    if tokens % block_tokens:
        raise InvalidValue(
            f"{what} of {tokens} tokens; expected a multiple of the trace's blocks, {block_tokens} tokens"
        )
    return CACHE_BLOCK * tokens // block_tokens
