"""Restores the layout and the scopes of a store that has been wiped."""

from time import monotonic

from kvatlas.index.redis.keys import SCOPES
from kvatlas.index.redis.layout import Layout, layout_errors, layout_id, make_layout, read_answering
from kvatlas.index.redis.scope_registry import FRESH_S, ScopeRegistry
from kvatlas.store.connection import Store


class WipeRecovery:
    """Writes again what this writer wrote recently. Raises Unreachable, also if the store has no memory for it."""

    def __init__(self, store: Store, registry: ScopeRegistry, layout: Layout) -> None:
        self._store = store
        self._registry = registry
        self._layout = layout
        self._layout_id: bytes | None = None
        self._answers: int | None = None
        """The number of the layout that answered when this was last read."""
        self._checked_s = -FRESH_S

    @property
    def answering(self) -> bool:
        """True if this layout was the one that answered at the last check."""
        return self._answers == self._layout.number

    async def check(self) -> None:
        """Call `recover`, but at most once a second."""
        now_s = monotonic()
        if now_s >= self._checked_s + FRESH_S:
            await self.recover()
            self._checked_s = now_s

    async def recover(self) -> None:
        """Write the layout if it is gone. Write the scopes if they are gone, or if the layout has been created again: a second
        writer may have restored only the layout."""
        with layout_errors(self._store):
            found, number = await layout_id(self._store, self._layout.number), self._layout.number
            if found is None:
                await make_layout(self._store, *self._layout, answers=self._answers)
                found = await layout_id(self._store, number)
            self._answers = await read_answering(self._store)
            recent = self._registry.recent
            if recent and (found != self._layout_id or await self._store.client.hlen(SCOPES) < recent):
                await self._registry.register_again()
            self._layout_id = found
