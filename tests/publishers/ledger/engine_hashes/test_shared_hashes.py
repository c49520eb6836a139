"""Engines whose hashes leave the salt out: one hash stands for blocks of several scopes, and removals name hashes."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import Removed
from kvatlas.identity import Scope
from kvatlas_publishers.engine_events import EngineBatch, EngineCleared, EngineEvent, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from tests.publishers.ledger.one_chain import SCOPE_ID, fold, hashes_of, ledger, reverse, store

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
        """Evict a leaf, and perhaps its ancestors without another child, in any order, in one or several events."""
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
    """Even if the sidecar began in the middle and knows no parents."""
    engine, announcing = RadixEngine(chance), Ledger(SETTINGS)
    exact = True
    for _ in range(moves):
        move = chance.random()
        if move < 0.6:
            path = tuple(chance.randint(1, 2) for _ in range(chance.randint(1, 4)))
            events = engine.store(chance.choice(SALTS), path)
        elif move < 0.95:
            events = engine.evict()
        else:
            announcing.empty()
            exact, events = not engine.held, []
        announcing.fold(EngineBatch(events))
        claimed, held = _claimed(announcing), _true(engine.held)
        assert claimed <= held
        if exact and not announcing.counters.judged_removals:
            assert claimed == held


def test_a_hash_that_two_salts_share_stands_for_both_blocks() -> None:
    one = ledger()
    (a,) = fold(one, store([1, 2], salt="a"))
    (b,) = fold(one, store([1, 2], salt="b"))
    assert a.hashes != b.hashes and one.announced_blocks == 4
    (more,) = fold(one, store([3], 2, 2, salt="b"))
    assert more.parent == b.hashes[8:]
    # block 2 of "b" has a child, and leaves go first: the removed copies are those of "a", in whatever order they come
    assert fold(one, EngineRemoved([1]), EngineRemoved([2])) == [Removed(SCOPE_ID, Tier.HBM, reverse(a.hashes))]
    assert one.counters.judged_removals == 0
    assert {name for _, _, name in one.resident()} == {1, 2, 3}
    assert fold(one, EngineRemoved([3, 2, 1])) == [Removed(SCOPE_ID, Tier.HBM, more.hashes + reverse(b.hashes))]
    assert not set(one.resident()) and not one.announced_blocks


def test_if_a_removal_may_be_of_several_blocks_none_of_them_is_claimed() -> None:
    one = ledger()
    (a,) = fold(one, store([1], salt="a"))
    (b,) = fold(one, store([1], salt="b"))
    (gone,) = fold(one, EngineRemoved([1]))
    assert isinstance(gone, Removed) and sorted(hashes_of(gone)) == sorted([a.hashes, b.hashes])
    assert one.counters.judged_removals == 1 and {name for _, _, name in one.resident()} == {1}
    assert fold(one, store([1], salt="a")) == [a]  # two copies, one certainly of "a"
    assert fold(one, EngineRemoved([1])) == [Removed(a.scope_id, Tier.HBM, a.hashes)]
    assert fold(one, EngineRemoved([1])) == [] and not set(one.resident())


def test_a_shared_hash_survives_a_dump_and_is_forgotten_with_all_its_blocks() -> None:
    one = Ledger(LedgerSettings("m", "t"), remembered_evictions=0)
    fold(one, store([1], salt="a"), store([1], salt="b"), store([1], salt="b"))
    one = Ledger.load(one.dump(), one.settings, remembered_evictions=0)
    assert one.announced_blocks == 2
    fold(one, EngineRemoved([1]))
    assert one.announced_blocks == 1
    fold(one, EngineRemoved([1]), EngineRemoved([1]))
    assert one.announced_blocks == 0 and not one.lineage.known and not one.lineage.namespaces


def test_a_placeholder_of_a_shared_hash_is_a_copy_in_any_scope() -> None:
    one = ledger()
    fold(one, store([1], adapter="a"), store([1], adapter="b"))
    events = fold(one, store([1], token_ids=[], block_size=0, tier=Tier.CPU_DRAM))
    assert {event.scope_id for event in events} == {Scope("m", "t", "a").scope_id, Scope("m", "t", "b").scope_id}
    fold(one, EngineCleared(tuple(Tier)))
    assert not one.announced_blocks
