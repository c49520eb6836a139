"""Derives from the cache's KV events what a subscriber does: copies by (hash, medium)."""

from collections import Counter
from collections.abc import Iterable

from kvatlas_simulator.cache.kv_events import BlockRemoved, BlocksStored, GpuCleared, KVEvent, Medium


class EventFold:
    """Folds events into `copies`, and checks that each one is possible."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.copies: Counter[tuple[int, Medium]] = Counter()

    def apply(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    assert len(event.token_ids) == len(event.block_hashes) * self.block_size
                    assert len(event.extra_keys) == len(event.block_hashes)
                    self.copies.update((block_hash, event.medium) for block_hash in event.block_hashes)
                case BlockRemoved():
                    key = (event.block_hash, event.medium)
                    assert self.copies[key] > 0, f"{key} was removed more often than stored"
                    self.copies[key] -= 1
                    if not self.copies[key]:
                        del self.copies[key]
                case GpuCleared():
                    for key in [key for key in self.copies if key[1] is Medium.GPU]:
                        del self.copies[key]

    def holds(self, block_hash: int) -> bool:
        return any(self.copies[(block_hash, medium)] for medium in Medium)
