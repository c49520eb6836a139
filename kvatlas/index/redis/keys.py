"""Key names in the store: one place that spells them. All of a shard's keys share one slot."""

from dataclasses import dataclass

LAYOUT = "kva:{fleet}:layout"
SCOPES = "kva:{fleet}:scopes"
"""HASH: scope id -> canonical text."""
SCOPE_USES = "kva:{fleet}:scope-uses"
"""ZSET: scope id, scored with the time of its last registration (ms of the store's clock)."""

LAYOUT_VERSION = 2
"""2 adds marks; all that version 1 has is the same in it."""
READABLE_VERSIONS = (1, LAYOUT_VERSION)


@dataclass(frozen=True, slots=True)
class ShardKeys:
    """The keys of shard k; `functions/_slot.lua` documents what each holds."""

    shard: int

    def _key(self, name: str) -> str:
        return f"kva:{{s{self.shard}}}:{name}"

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
    def meta(self) -> str:
        return self._key("meta")

    @property
    def marked(self) -> str:
        return self._key("marked")

    def blocks(self, scope_id: bytes) -> str:
        return self._key(f"blocks:{scope_id.hex()}")

    def marks(self, scope_id: bytes) -> str:
        return self._key(f"marks:{scope_id.hex()}")

    def children(self, scope_id: bytes) -> str:
        return self._key(f"children:{scope_id.hex()}")

    def parents(self, scope_id: bytes) -> str:
        return self._key(f"parents:{scope_id.hex()}")

    @property
    def pattern(self) -> str:
        """Matches every key of the shard."""
        return f"kva:{{s{self.shard}}}:*"
