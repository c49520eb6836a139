"""The full texts behind the scope ids in the store.

A process that applies messages registers the scopes that they use, at most once a second, and the store records the time. A
scope without blocks in any shard is deleted by a call that checks that it has not been registered for a long time. A scope that
comes into use in the meantime therefore stays.
"""

from collections.abc import Collection, Sequence
from time import monotonic

from kvatlas.bus import wire
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.errors import InvalidValue, LayoutMismatch
from kvatlas.identity import SCOPE_ID_BYTES, Scope, scope_from_canonical
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import SCOPE_USES, SCOPES, USAGE_SCOPES, ShardKeys
from kvatlas.index.redis.records import TOUCHED_BYTES
from kvatlas.index.redis.shard_reader import read_hash
from kvatlas.index.redis.usage_reader import UsageReader
from kvatlas.store.connection import Store

FRESH_S = 1.0
"""Shorter than the time after which workers are doubted, so that a wiped store knows the scopes before the first
snapshot."""
REMEMBERED_S = 300.0
"""How long this process remembers what it has registered. Shorter than the time after which a scope is forgotten."""
REMEMBERED_TEXTS = 65_536
SCOPES_A_CALL = 200
"""As many as `MOST_WORDS` in scope.lua allows."""
MOST_USED_SCOPES = 50_000
"""Maximum number of names of forgotten scopes that are kept for `usage`."""


class ScopeRegistry:
    """The registry as one process sees it."""

    def __init__(self, store: Store, functions: IndexFunctions) -> None:
        self._store = store
        self._functions = functions
        self._texts: dict[bytes, Scope] = {}
        self._fresh: set[bytes] = set()
        self._fresh_since_s = -FRESH_S
        self._used: dict[bytes, tuple[bytes, float]] = {}
        """The scopes that this process registered in the last REMEMBERED_S: canonical text and time (s)."""

    async def register(self, batches: Sequence[PartitionBatch]) -> None:
        """Write the full texts of the scopes that these messages use. Raises InvalidValue if two scopes have the same id."""
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
        """Write everything again that this process registered recently, because the store may have lost it."""
        await self._write({scope_id: canonical for scope_id, (canonical, _) in self._used.items()})

    @property
    def recent(self) -> int:
        """How many scopes this process has registered recently; the registry has at least that many."""
        return len(self._used)

    async def _write(self, texts: dict[bytes, bytes]) -> None:
        ids = list(texts)
        for first in range(0, len(ids), SCOPES_A_CALL):
            some = ids[first : first + SCOPES_A_CALL]
            args = [word for scope_id in some for word in (scope_id, texts[scope_id])]
            if other := await self._functions.call("kvatlas_scope", [SCOPES, SCOPE_USES], args):
                scope_id, text = other
                ours, known = scope_from_canonical(texts[scope_id]), scope_from_canonical(text)
                raise InvalidValue(
                    f"scope {ours.log_name} has the id {scope_id.hex()} of another scope ({known.log_name})"
                )

    # ------------------------------------------------------------ reading

    async def scope(self, scope_id: bytes) -> Scope:
        """The scope behind an id. Raises LayoutMismatch if it is not registered, or Unreachable."""
        if (known := self._texts.get(scope_id)) is not None:
            return known
        canonical = await self._store.ask(self._store.client.hget(SCOPES, scope_id))
        if canonical is None:
            raise LayoutMismatch(f"scope {scope_id.hex()} is not in {SCOPES}")
        if len(self._texts) >= REMEMBERED_TEXTS:
            self._texts.clear()
        scope = self._texts[scope_id] = scope_from_canonical(canonical)
        return scope

    async def known(self, scope_ids: Collection[bytes]) -> dict[bytes, Scope]:
        """Those of these scopes whose names are known, including forgotten ones. Raises Unreachable."""
        texts: dict[bytes, bytes] = {}
        for key in (SCOPES, USAGE_SCOPES):
            missing = [scope_id for scope_id in scope_ids if scope_id not in texts]
            for first in range(0, len(missing), SCOPES_A_CALL):
                some = missing[first : first + SCOPES_A_CALL]
                found = await self._store.ask(self._store.client.hmget(key, some))
                texts.update((one, text) for one, text in zip(some, found, strict=True) if text is not None)
        return {scope_id: scope_from_canonical(text) for scope_id, text in texts.items()}

    async def ids(self) -> list[bytes]:
        """Every registered scope id. Raises Unreachable."""
        return list(await read_hash(self._store, SCOPES))

    # ------------------------------------------------------------ forgetting

    async def forget(self, shards: Sequence[ShardKeys], idle_s: float, usage: Sequence[UsageReader] = ()) -> int:
        """Forget scopes that have no blocks in any shard and have not been registered for `idle_s`, which must be far longer
        than a call takes. Returns how many were forgotten. They are also removed from the holders' lists of used scopes. If the
        `usage` of a forgotten scope is counted, its name is kept, for up to MOST_USED_SCOPES scopes."""
        idle_ms = int(idle_s * 1000)
        idle = list(await self._functions.call("kvatlas_scopes_idle", [SCOPE_USES], [idle_ms, SCOPES_A_CALL]))
        if not idle:
            return 0
        held: set[bytes] = set()
        for k in shards:
            keys = [key for scope_id in idle for key in (k.blocks(scope_id), k.marks(scope_id))]
            held.update(await self._functions.call_ro("kvatlas_held", keys, idle))
            await self._untouch(k, [scope_id for scope_id in idle if scope_id not in held])
        if held:
            await self._functions.call("kvatlas_scopes_used", [SCOPE_USES], list(held))
        unheld = [scope_id for scope_id in idle if scope_id not in held]
        if not unheld:
            return 0
        await self._keep_names(unheld, usage)
        return int(await self._functions.call("kvatlas_scopes_forget", [SCOPES, SCOPE_USES], [idle_ms, *unheld]))

    async def _keep_names(self, scope_ids: Sequence[bytes], usage: Sequence[UsageReader]) -> None:
        spent = {scope_id for reader in usage for scope_id in await reader.spent_scopes()}.intersection(scope_ids)
        if not spent:
            return
        if await self._store.ask(self._store.client.hlen(USAGE_SCOPES)) >= MOST_USED_SCOPES:
            for reader in usage:
                await reader.merge(spent)
            return
        names = {scope_id: scope.canonical for scope_id, scope in (await self.known(spent)).items()}
        if names:
            await self._store.ask(self._store.client.hset(USAGE_SCOPES, mapping=names))

    async def _untouch(self, k: ShardKeys, scope_ids: Sequence[bytes]) -> None:
        """Remove scopes from the lists of every holder that used them, one holder per call, because a list may be long."""
        gone = set(scope_ids)
        for holder in await read_hash(self._store, k.holders) if gone else ():
            packed = await self._store.ask(self._store.client.hget(k.touched, holder)) or b""
            unused = gone.intersection(packed[at : at + SCOPE_ID_BYTES] for at in range(0, len(packed), TOUCHED_BYTES))
            if unused:
                keys = [k.touched, k.held, k.holders, k.moments, k.spent]
                keys += [key for scope_id in unused for key in (k.blocks(scope_id), k.marks(scope_id))]
                await self._functions.call("kvatlas_untouch", keys, [holder, b"".join(unused)])
