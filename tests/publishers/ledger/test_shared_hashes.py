"""An engine whose hashes leave the salt out: one hash stands for blocks of several scopes, and removals name hashes."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.blocks.hashing import extend_chain
from kvatlas.events import EngineBatch, EngineEvent, EngineRemoved, EngineStored
from kvatlas.identity import Scope
from publishers.ledger.ledger import Ledger, LedgerSettings

SETTINGS = LedgerSettings("m", "t", block_size=1, salt_is_tenant=True)
SALTS = (None, "a", "b")

Path = tuple[int, ...]
Held = set[tuple[str | None, Path]]


class RadixEngine:
    """A tree of blocks for each salt, leaves evicted first."""

    def __init__(self, chance: random.Random) -> None:
        self.held: Held = set()
        self._chance = chance

    def store(self, salt: str | None, path: Path) -> list[EngineEvent]:
        known = max((n for n in range(len(path) + 1) if n == 0 or (salt, path[:n]) in self.held), default=0)
        new = [path[: n + 1] for n in range(known, len(path))]
        self.held |= {(salt, one) for one in new}
        if not new:
            return []
        parent = _name(path[:known]) if known else None
        names = [_name(one) for one in new]
        return [EngineStored(names, parent, path[known:], 1, salt=salt, salt_inherited=False)]

    def evict(self) -> list[EngineEvent]:
        """A leaf, and perhaps what is above it and has no other child; told in any order, as one event or several."""
        leaves = [one for one in self.held if not self._children(one)]
        if not leaves:
            return []
        salt, path = self._chance.choice(sorted(leaves, key=repr))
        gone = []
        while path and not self._children((salt, path)):
            self.held.discard((salt, path))
            gone.append(_name(path))
            path = path[:-1]
            if self._chance.random() < 0.5:
                break
        if self._chance.random() < 0.5:
            gone.reverse()
        return [EngineRemoved([name]) for name in gone] if self._chance.random() < 0.5 else [EngineRemoved(gone)]

    def _children(self, one: tuple[str | None, Path]) -> bool:
        salt, path = one
        return any(s == salt and len(p) == len(path) + 1 and p[:-1] == path for s, p in self.held)


def _name(path: Path) -> int:
    return hash(("shared", path))


def _claimed(ledger: Ledger) -> set[tuple[bytes, int]]:
    return {(scope_id, value) for scope_id, _, _, value in ledger.announced()}


def _true(held: Held) -> set[tuple[bytes, int]]:
    return {
        (
            Scope("m", "t", None, salt or "default").scope_id,
            int.from_bytes(extend_chain(path, 1)[-8:], "little"),
        )
        for salt, path in held
    }


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(5, 40))
def test_nothing_is_claimed_in_a_scope_where_it_is_not_held(chance: random.Random, moves: int) -> None:
    """Also where the sidecar began in the middle, and knows no parents."""
    engine, ledger = RadixEngine(chance), Ledger(SETTINGS)
    exact = True
    for _ in range(moves):
        move = chance.random()
        if move < 0.6:
            path = tuple(chance.randint(1, 2) for _ in range(chance.randint(1, 4)))
            events = engine.store(chance.choice(SALTS), path)
        elif move < 0.95:
            events = engine.evict()
        else:
            ledger.empty()
            exact, events = not engine.held, []
        ledger.fold(EngineBatch(events))
        claimed, held = _claimed(ledger), _true(engine.held)
        assert claimed <= held
        if exact and not ledger.counters.judged_removals:
            assert claimed == held
