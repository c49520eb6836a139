"""What a listener to the cache's changes believes: copies by (hash, medium), and the token lineage of each hash."""

from collections import Counter
from collections.abc import Iterable

from simulator.cache.block_changes import BlockChange, BlockRemoved, BlocksStored, GpuCleared, Medium


class EventFold:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.copies: Counter[tuple[int, Medium]] = Counter()

    def apply(self, changes: Iterable[BlockChange]) -> None:
        for change in changes:
            match change:
                case BlocksStored():
                    assert len(change.token_ids) == len(change.block_hashes) * self.block_size
                    assert len(change.extra_keys) == len(change.block_hashes)
                    self.copies.update((block_hash, change.medium) for block_hash in change.block_hashes)
                case BlockRemoved():
                    key = (change.block_hash, change.medium)
                    assert self.copies[key] > 0, f"{key} was removed more often than stored"
                    self.copies[key] -= 1
                    if not self.copies[key]:
                        del self.copies[key]
                case GpuCleared():
                    for key in [key for key in self.copies if key[1] is Medium.GPU]:
                        del self.copies[key]

    def held(self, block_hash: int) -> bool:
        return any(self.copies[(block_hash, medium)] for medium in Medium)
