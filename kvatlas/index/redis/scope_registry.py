"""The full texts behind scope ids, in the store: who tells of a scope registers it; a scope that nobody uses is forgotten.

Whoever applies messages registers the scopes that they use, once a second at most, and the store remembers when. A scope is
forgotten in a call that sees that nobody registered it for long, after no shard held a block of it: so one that comes into
use meanwhile stays.
"""

from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any

from kvatlas.bus import wire
from kvatlas.errors import InvalidValue, LayoutMismatch
from kvatlas.identity import Scope, scope_from_canonical
from kvatlas.index.protocol import PartitionBatch
from kvatlas.index.redis.keys import SCOPE_USES, SCOPES, ShardKeys

FRESH_S = 1.0
"""Shorter than any doubt's patience: a wiped store knows the scopes before it gets the first snapshot."""
REMEMBERED_S = 300.0
"""What this process registered; shorter than the time after which a scope is forgotten."""
REMEMBERED_TEXTS = 65_536
SCOPES_A_CALL = 500
HOLDERS_A_CALL = 200

Call = Callable[[str, Sequence[str], Sequence[Any]], Awaitable[Any]]


class ScopeRegistry:
    """One process' view of the registry."""

    def __init__(self, call: Call) -> None:
        """`call` a function of the store."""
        self._call = call
        self._texts: dict[bytes, Scope] = {}
        self._fresh: set[bytes] = set()
        self._fresh_since_s = -FRESH_S
        self._used: dict[bytes, tuple[bytes, float]] = {}
        """Scopes that this process registered lately: canonical text, and when."""

    async def register(self, batches: Sequence[PartitionBatch]) -> None:
        """Write the full texts of the scopes that these messages use. Raises InvalidValue for a collision of ids."""
        now_s = monotonic()
        if now_s >= self._fresh_since_s + FRESH_S:
            self._fresh.clear()
            self._fresh_since_s = now_s
            self._used = {one: used for one, used in self._used.items() if used[1] > now_s - REMEMBERED_S}
        fresh = self._fresh
        new: dict[bytes, bytes] = {}
        for batch in batches:
            for raw in batch.messages:
                for scope_id, entry in raw[wire.SCOPES].items():
                    if scope_id not in fresh and scope_id not in new:
                        new[scope_id] = wire.scope_use(scope_id, entry).scope.canonical
        if new:
            await self._write(new)
            for scope_id, canonical in new.items():
                self._used[scope_id] = canonical, now_s
            fresh.update(new)

    async def register_again(self) -> None:
        """Write again all that this process registered lately: the store may have lost it."""
        await self._write({scope_id: canonical for scope_id, (canonical, _) in self._used.items()})

    @property
    def lately(self) -> int:
        """How many scopes this process registered lately: the registry has no fewer."""
        return len(self._used)

    async def _write(self, texts: dict[bytes, bytes]) -> None:
        ids = list(texts)
        for first in range(0, len(ids), SCOPES_A_CALL):
            some = ids[first : first + SCOPES_A_CALL]
            args = [word for scope_id in some for word in (scope_id, texts[scope_id])]
            stored = await self._call("kvatlas_scope", [SCOPES, SCOPE_USES], args)
            for scope_id, text in zip(some, stored, strict=True):
                if text != texts[scope_id]:
                    ours, known = scope_from_canonical(texts[scope_id]), scope_from_canonical(text)
                    raise InvalidValue(f"scope {ours} has the id {scope_id.hex()} of scope {known}")

    # ------------------------------------------------------------ asking

    def remember(self, scope_id: bytes, canonical: bytes | None) -> Scope:
        """The scope that this text is of. Raises LayoutMismatch where there is none."""
        if canonical is None:
            raise LayoutMismatch(f"scope {scope_id.hex()} is not in {SCOPES}")
        if len(self._texts) >= REMEMBERED_TEXTS:
            self._texts.clear()
        scope = self._texts[scope_id] = scope_from_canonical(canonical)
        return scope

    def known(self, scope_id: bytes) -> Scope | None:
        """The scope, where this process has read its text."""
        return self._texts.get(scope_id)

    # ------------------------------------------------------------ forgetting

    async def forget(self, shards: Sequence[ShardKeys], idle_s: float) -> int:
        """Forget scopes that nobody registered for `idle_s`, which is far longer than a call takes, and of which no shard
        holds a block; how many. Holders' own lists of the scopes that they used get shorter too."""
        idle_ms = int(idle_s * 1000)
        idle = list(await self._call("kvatlas_scopes_idle", [SCOPE_USES], [idle_ms, SCOPES_A_CALL]))
        if not idle:
            return 0
        held: set[bytes] = set()
        for k in shards:
            cursor: int | bytes = 0
            keys = [k.touched, *(k.blocks(scope_id) for scope_id in idle)]
            while True:
                cursor, *found = await self._call("kvatlas_untouch", keys, [cursor, HOLDERS_A_CALL, *idle])
                held.update(found)
                if int(cursor) == 0:
                    break
        if held:
            await self._call("kvatlas_scopes_used", [SCOPE_USES], list(held))
        unheld = [scope_id for scope_id in idle if scope_id not in held]
        return int(await self._call("kvatlas_scopes_forget", [SCOPES, SCOPE_USES], [idle_ms, *unheld])) if unheld else 0
