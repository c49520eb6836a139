"""The names of keys in the store, all of which are spelled out here. All keys of a shard share one slot."""

from collections.abc import Iterable
from dataclasses import dataclass

LAYOUT = "kva:{fleet}:layout"
"""HASH: the layout with number 0, and the number of the layout that answers (`answers`; 0 if it is missing)."""
SCOPES = "kva:{fleet}:scopes"
"""HASH: scope id -> canonical text."""
SCOPE_USES = "kva:{fleet}:scope-uses"
"""ZSET: scope id, scored with the time of its last registration (ms of the store's clock)."""

USAGE_SCOPES = "kva:{fleet}:usage-scopes"
"""HASH: scope id -> canonical text, for forgotten scopes whose use is still counted."""

LAYOUT_VERSION = 2
SWITCHED_VERSION = 3
"""Version of a store in which a layout with a number other than 0 answers. Releases that don't know it must refuse to start."""


def layout_key(number: int) -> str:
    return f"{LAYOUT}:{number}" if number else LAYOUT


@dataclass(frozen=True, slots=True)
class ShardKeys:
    """The keys of shard k in the layout with this number; `functions/_slot.lua` documents their content."""

    shard: int
    number: int = 0

    def _key(self, name: str) -> str:
        tag = f"s{self.shard}-{self.number}" if self.number else f"s{self.shard}"
        return f"kva:{{{tag}}}:{name}"

    @property
    def holders(self) -> str:
        return self._key("holders")

    @property
    def active(self) -> str:
        return self._key("active")

    @property
    def retired(self) -> str:
        return self._key("retired")

    @property
    def free(self) -> str:
        return self._key("free")

    @property
    def digests(self) -> str:
        return self._key("digests")

    @property
    def touched(self) -> str:
        return self._key("touched")

    @property
    def workers(self) -> str:
        return self._key("workers")

    @property
    def partitions(self) -> str:
        return self._key("partitions")

    @property
    def steps(self) -> str:
        return self._key("steps")

    @property
    def held(self) -> str:
        return self._key("held")

    @property
    def moments(self) -> str:
        return self._key("moments")

    @property
    def spent(self) -> str:
        return self._key("spent")

    @property
    def meta(self) -> str:
        return self._key("meta")

    @property
    def marked(self) -> str:
        return self._key("marked")

    @property
    def pinned(self) -> str:
        return self._key("pinned")

    def pinned_by(self, holder: bytes) -> str:
        return self._key(f"pinned:{holder.hex()}")

    @property
    def of_state(self) -> list[str]:
        """The keys that `state_of` in `functions/_worker_state.lua` takes."""
        return [self.workers, self.holders, self.active, self.digests, self.steps, self.marked]

    def blocks(self, scope_id: bytes) -> str:
        return self._key(f"blocks:{scope_id.hex()}")

    def marks(self, scope_id: bytes) -> str:
        return self._key(f"marks:{scope_id.hex()}")

    def children(self, scope_id: bytes) -> str:
        return self._key(f"children:{scope_id.hex()}")

    def parents(self, scope_id: bytes) -> str:
        return self._key(f"parents:{scope_id.hex()}")

    def all(self, scope_ids: Iterable[bytes], pinned_by: Iterable[bytes]) -> list[str]:
        """Every key that a shard can have if it holds blocks of these scopes and pins of these holders."""
        names = [self.holders, self.active, self.retired, self.free, self.digests, self.touched, self.workers]
        names += (self.partitions, self.steps, self.held, self.moments, self.spent, self.meta, self.marked, self.pinned)
        names += map(self.pinned_by, pinned_by)
        of_scope = (self.blocks, self.marks, self.children, self.parents)
        return [*names, *(key(scope_id) for scope_id in scope_ids for key in of_scope)]

    @property
    def pattern(self) -> str:
        """A pattern that matches every key of the shard."""
        return self._key("*")
