"""Distinguishes events of new copies from reports of cache hits, which look the same on the wire.

vLLM reports the hits of a request with `kv_cache_report_mode: "full"` as if they were stored. Such a report begins at the
prompt's first block and has one event per group. All its blocks of full attention are held, and so are the last window of a
sliding group and the last block of a mamba group; earlier blocks of those groups may be gone. So events store new copies if one
of them

- has a parent,
- leaves out blocks (`EngineStored.token_ids` cover more blocks than it names), or
- names a block that a report would require to be held, but that is not held. This counts only while every copy is known: since
  the engine's start or a clear.

For all other events we know only that the blocks a report requires are held now. Their copies are **doubtful**: a removal takes
a certain copy first, so a block is claimed only while a copy certainly remains. A child stored after a block proves that the
block is held.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.engine_events import EngineDropped, EngineEvent, EngineHash, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.block import Stretch
from kvatlas_publishers.ledger.engine_groups import EngineGroups

MOST_DOUBTS = 131_072
"""Maximum number of doubtful hashes per group (about 100 bytes each). Beyond it, only hashes with a certain copy are
kept."""

_WINDOWS = (AttentionKind.SLIDING_WINDOW, AttentionKind.SLIDING_WINDOW_MLA)


class HitReports:
    """The doubtful copies in one engine's device tier. `held(tier, group, name)`: True if a copy is certain."""

    def __init__(self, groups: EngineGroups, held: Callable[[Tier, int, EngineHash], bool]) -> None:
        self.knows_all = False
        """True if we have seen every event since the engine was empty."""
        self._groups = groups
        self._held = held
        self._doubts: dict[int, dict[EngineHash, int]] = {}
        """Number of doubtful copies of each hash, by group."""
        self._lost: dict[int, set[EngineHash]] = {}
        """The subset of these whose certain copies may all have been removed, by group. `lost_before` looks for no others."""
        self._run_end = 0
        self._run_is_new = False
        self._has_removed = False
        """True once copies were removed in this batch: what is usable is known again only at its end."""

    def begin_batch(self) -> None:
        """Begin a new batch: event positions start at 0 again."""
        self._run_end = 0
        self._has_removed = False
        for group, lost in self._lost.items():
            doubts = self._doubts.get(group, {})
            if len(lost) > len(doubts):
                lost.intersection_update(doubts)

    def stored(self, events: Sequence[EngineEvent], at: int, event: EngineStored) -> Sequence[EngineStored]:
        """The copies that `event`, the batch's event number `at`, certainly adds to its group."""
        if at >= self._run_end:
            run = list(_run(events, at))
            self._run_end = at + len(run)
            self._run_is_new = any(map(self._is_new, run))
        if self._run_is_new:
            return (event,)
        doubts = self._doubts.setdefault(event.group, {})
        taken = []
        for name, needed in zip(event.hashes, self._needed(event), strict=True):
            taken.append(needed and not self._held(event.tier, event.group, name))
            if not taken[-1]:
                doubts[name] = doubts.get(name, 0) + 1
        if len(doubts) > MOST_DOUBTS:
            self._trim(event.group)
        return (event,) if all(taken) else list(self._parts(event, taken))

    def lost_before(self, event: EngineStored, parent: Stretch | None) -> list[EngineHash]:
        """The blocks up to `parent` whose doubtful copy must be a real one, since the event stored a child of `parent`.
        They are certain from now on."""
        lost, doubts = self._lost.get(event.group), self._doubts.get(event.group)
        if not lost or not doubts or not self._groups.is_full(event.group):
            return []
        found = []
        while parent is not None and (self._has_removed or parent.usable <= 0):
            if not lost.isdisjoint(parent.names):
                for name in lost.intersection(parent.names):
                    if not self._held(event.tier, event.group, name) and self._take(doubts, name):
                        found.append(name)
            parent = parent.parent
        lost.difference_update(found)
        return found

    def may_have_lost(self, group: int) -> bool:
        """True if `lost_before` looks at what is held."""
        return bool(self._lost.get(group))

    def has_doubts(self, group: int) -> bool:
        """True if `removed` looks at what is held."""
        return bool(self._doubts.get(group))

    def removed(self, event: EngineRemoved) -> EngineRemoved:
        """The event without the removals that took a doubtful copy."""
        self._has_removed = True
        doubts = self._doubts.get(event.group)
        if not doubts:
            return event
        if event.last:
            for name in event.hashes:
                doubts.pop(name, None)
            return event
        names = [
            name for name in event.hashes if self._held(event.tier, event.group, name) or not self._take(doubts, name)
        ]
        self._lost.setdefault(event.group, set()).update(name for name in names if name in doubts)
        return event if len(names) == len(event.hashes) else replace(event, hashes=names)

    def dropped(self, event: EngineDropped) -> None:
        """Record that all copies of these hashes are gone."""
        self._has_removed = True
        for group, doubts in self._doubts.items():
            if event.group in (None, group):
                for name in event.hashes:
                    doubts.pop(name, None)

    def cleared(self) -> None:
        """Record that the device tier is empty. From now on every copy is known."""
        self._doubts.clear()
        self._lost.clear()
        self.knows_all = True

    # ---------------------------------------------------------------- saved state

    def dump(self) -> list[Any]:
        """The state for `restore`."""
        groups = [[group, list(doubts), list(doubts.values())] for group, doubts in self._doubts.items()]
        return [self.knows_all, groups]

    def restore(self, saved: Sequence[Any]) -> None:
        """Restore the state that `dump` returned. Raises TypeError or ValueError for anything else."""
        self.knows_all, groups = saved
        self._doubts = {group: dict(zip(names, counts, strict=True)) for group, names, counts in groups}
        self._lost = {group: set(doubts) for group, doubts in self._doubts.items()}

    # ---------------------------------------------------------------- judgement

    def _is_new(self, event: EngineStored) -> bool:
        """True if the event is certainly not a report."""
        if len(event.token_ids) != event.block_size * len(event.hashes):
            return True
        if not self.knows_all:
            return False
        doubts: Mapping[EngineHash, int] = self._doubts.get(event.group, {})
        return any(
            needed and name not in doubts and not self._held(event.tier, event.group, name)
            for name, needed in zip(event.hashes, self._needed(event), strict=True)
        )

    def _needed(self, event: EngineStored) -> Sequence[bool]:
        """For each block of the event: True if it must be held in case this is a report."""
        count = len(event.hashes)
        if self._groups.is_full(event.group):
            return [True] * count
        told = self._groups.told.get(event.group)
        last = 0
        if told is not None and told.kind is AttentionKind.MAMBA:
            last = 1
        elif told is not None and told.kind in _WINDOWS:
            last = max(1, -(-((told.window_tokens or 0) - 1) // max(1, event.block_size)))
        return [at >= count - last for at in range(count)]

    def _parts(self, event: EngineStored, taken: Sequence[bool]) -> Iterator[EngineStored]:
        """The runs of the event's blocks that are taken."""
        hashes, size, full = event.hashes, event.block_size, self._groups.is_full(event.group)
        first = 0
        for is_taken, run in groupby(taken):
            last = first + len(list(run))
            if is_taken:
                ahead = event.lookahead
                if last < len(hashes):
                    ahead = event.token_ids[last * size : last * size + event.lookahead_tokens]
                yield replace(
                    event,
                    hashes=hashes[first:last],
                    parent=hashes[first - 1] if first else None,
                    token_ids=event.token_ids[first * size : last * size] if full else (),
                    extra_keys=event.extra_keys[first:last] if event.extra_keys and full else None,
                    salt=None if first else event.salt,
                    lookahead=ahead,
                )
            first = last

    @staticmethod
    def _take(doubts: dict[EngineHash, int], name: EngineHash) -> bool:
        """Remove a doubtful copy. Returns False if there is none."""
        count = doubts.get(name, 0)
        if count > 1:
            doubts[name] = count - 1
        elif count:
            del doubts[name]
        return count > 0

    def _trim(self, group: int) -> None:
        """Forget doubtful hashes without a certain copy."""
        kept = {name: count for name, count in self._doubts[group].items() if self._held(Tier.HBM, group, name)}
        self._doubts[group] = kept
        self.knows_all = False


def _run(events: Sequence[EngineEvent], at: int) -> Iterator[EngineStored]:
    """The events from `at` on that may come from one step of one request: one per group, in order."""
    group = -1
    for event in events[at:]:
        if not isinstance(event, EngineStored) or not event.maybe_again or event.group <= group:
            return
        group = event.group
        yield event
