"""The blocks that one engine holds, and the changes that are published.

    EngineStored --resolver--> blocks --+
    EngineRemoved, EngineCleared -------+--residency--> changed blocks --prefix_closure--> change --index_events--> events
                                              |                                              +----> marks --mark_events----+
                                              +--sparse_holdings------------------------------------+

An engine batch becomes a change of usable residency (prefix-closed, full-attention groups only), as events in an order that
keeps residency prefix-closed after each of them. If the model has other groups too, marks say at which of these blocks a prompt
can be resumed. Facts about the groups are learned from a batch before the batch is folded.

The following blocks are left out and counted. Their references are kept, so that a later removal finds its count:
- blocks whose parent is unknown, or known only in another scope: never re-rooted, but resolved once the parent is known;
- blocks that can't be hashed: token ids beyond 32 bits, or tokens that don't fill a whole block each;
- blocks of a size other than the engine's (partial blocks);
- blocks reported without token ids by an engine that reports them for other blocks. If an engine never reports token ids, its
  blocks belong to an external chain instead;
- blocks of an engine whose hashes and parents don't reveal where in the prompt the blocks are;
- offload placeholders of an unknown hash. Those of a known hash are copies of its block, in any scope. The same holds for a
  connector's events with tokens; if their hash is unknown, they are left out only if the engine uses adapters, salts or extra
  keys at all.
A block that was left out is accepted if the engine stores it again in a form that can be resolved.

When in doubt, the ledger under-reports: a count never exceeds the engine's own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.digest import Digest
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import InvalidValue
from kvatlas.events import Cleared, Heads, IndexEvent, Marked, ScopeUse, SnapshotChunk
from kvatlas.identity import OWN_CHAIN
from kvatlas_publishers.engine_events import (
    EngineBatch,
    EngineCleared,
    EngineDropped,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStarted,
    EngineStored,
)
from kvatlas_publishers.ledger import dump as ledger_dump
from kvatlas_publishers.ledger.block_bytes import BlockBytes
from kvatlas_publishers.ledger.connectors.connector_blocks import ConnectorBlocks, split_by_knowledge
from kvatlas_publishers.ledger.connectors.shared_store_writes import StoreWrites, is_stores
from kvatlas_publishers.ledger.counters import LedgerCounters
from kvatlas_publishers.ledger.engine_groups import EngineGroups
from kvatlas_publishers.ledger.engine_hashes.resolver import BlockResolver, has_keys
from kvatlas_publishers.ledger.hit_reports import HitReports
from kvatlas_publishers.ledger.holdings import Holdings
from kvatlas_publishers.ledger.lineage import Lineage
from kvatlas_publishers.ledger.publication import Publication
from kvatlas_publishers.ledger.residency import Residency
from kvatlas_publishers.ledger.settings import LedgerSettings

__all__ = ["REMEMBERED_EVICTIONS", "Ledger", "LedgerCounters", "LedgerSettings"]

REMEMBERED_EVICTIONS = 65_536
"""Maximum number of engine hashes that are remembered after their last copy is gone (about 400 bytes each), but never more
than were held at the same time."""
LEAST_REMEMBERED = 1_024
"""Minimum number of engine hashes to remember, even if the engine holds fewer."""


class Ledger:
    """Pure and synchronous: engine batches in, index events out."""

    def __init__(self, settings: LedgerSettings, *, remembered_evictions: int = REMEMBERED_EVICTIONS) -> None:
        self.settings = settings
        self.counters = LedgerCounters()
        self.other_block_size: int | None = None
        """Tokens per block of the engine, if the settings say otherwise."""
        self.block_bytes_of = BlockBytes(settings)
        self._remembered_evictions = remembered_evictions
        self._most_held = LEAST_REMEMBERED
        """The most engine hashes ever held at once."""
        self.store_writes: StoreWrites | None = None
        """The engine's events about the shared store, if the settings name one."""
        self._begin_empty()

    def empty(self) -> None:
        """Forget everything, without events: the caller starts a new incarnation."""
        self.lineage.release()
        self._begin_empty()

    def _begin_empty(self) -> None:
        self._connector = ConnectorBlocks(self.counters, self._is_resident, keep=self.settings.keep_untold)
        self.groups = EngineGroups(self.settings)
        if self.store_writes is not None:
            self.store_writes.forget_names()
        elif self.settings.has_store:
            self.store_writes = StoreWrites(self.counters)
        self.reuse = self.groups.reuse(None)
        self._reports = HitReports(self.groups, self._is_resident)
        self._regrouped = False
        self.chain: str | None = None
        """Chain of the engine's blocks (`kvatlas.identity.Scope.chain`); None until the engine reports blocks."""
        self._begin(Holdings(), self.settings.block_size)

    def _begin(self, holdings: Holdings, block_size: int | None) -> None:
        """Start again, with nothing but the counts in `holdings`."""
        settings = self.settings
        self.lineage = Lineage(settings, self.block_bytes_of)
        self._resolver = BlockResolver(self.lineage, self.counters, block_size)
        self._resolver.lookahead_tokens = self.groups.lookahead_tokens
        self._residency = Residency(
            self.lineage,
            self._resolver,
            holdings,
            self.counters,
            self.groups,
            self.reuse.bits,
            set_semantics=settings.set_semantics,
            one_by_one=self.reuse.rule is not None,
        )
        if self.store_writes is not None:
            self.store_writes.follow(self.lineage, self._resolver, self._residency, self.groups)
        self._publication = Publication(
            self.lineage, self._residency, self.counters, self.reuse.rule, settings.granularity
        )

    @property
    def block_size(self) -> int | None:
        """Number of tokens in the engine's full blocks; None until it is known."""
        return self._resolver.block_size

    @property
    def sizes(self) -> BlockSizes:
        """Sizes of the engine's blocks, in any scope."""
        return self.block_bytes_of.of_worker(self.block_size)

    def set_told_block_bytes(self, block_bytes: int) -> None:
        """Set the size given by the engine's metrics, or by a shared store's writers. It is used if neither events nor
        settings give one."""
        self.block_bytes_of.tell_metrics(block_bytes)
        self.lineage.read_block_bytes()

    @property
    def uses(self) -> dict[bytes, ScopeUse]:
        """Every scope that may appear in the last fold's events, or in a snapshot taken before the next fold."""
        return self.lineage.uses

    @property
    def digest(self) -> Digest:
        """Digest of everything published now."""
        return self._publication.digest

    @property
    def awaiting_events(self) -> int:
        """Number of stored events that are waiting for their parent."""
        return len(self._resolver.awaiting)

    @property
    def digest_words(self) -> list[int]:
        """`Digest.words` of everything published now, followed by `MarkDigest.words` if marks are used."""
        return self._publication.digest_words

    @property
    def dropped(self) -> int | None:
        """See `SnapshotBegin`; None if marks are not used."""
        return None if self.reuse.rule is None else self.reuse.rule.dropped

    @property
    def marked_blocks(self) -> int:
        """Number of blocks marked now."""
        return self._publication.marked_blocks

    @property
    def announced_blocks(self) -> int:
        """Number of blocks published now, in any tier."""
        return self._publication.blocks

    @property
    def orphans(self) -> int:
        """Number of blocks that the engine holds after a hole."""
        return self._publication.orphans

    # ---------------------------------------------------------------- folding

    def fold(self, batch: EngineBatch) -> list[IndexEvent]:
        """Fold one batch. Returns the net change of published blocks, in the order in which it must be published.

        The result must be discarded if the batch revealed facts about the engine's groups that change which blocks are
        published or marked: see `take_regrouped`.
        """
        self.lineage.forget_unused_scopes()  # earlier changes are published by now
        events: list[IndexEvent] = [Cleared()] if self._learn(batch) else []
        residency, writes = self._residency, self.store_writes
        residency.forgotten.drop_unnamed()
        cleared = False
        if self._connector.was_reset(batch.events):
            batch = replace(batch, events=[EngineCleared((Tier.CPU_DRAM,)), *batch.events])
        self._reports.begin_batch()
        for at, event in enumerate(batch.events):
            if isinstance(event, EngineStored):
                if event.salt == self.settings.tenant_id and self.settings.salt_is_tenant:
                    event = replace(event, salt=None)  # the tenant of events without a salt
                if event.local_hashes is not None and event.chain != self.chain:
                    event = replace(event, local_hashes=None)  # a placeholder
                    self.counters.other_chain += len(event.hashes)
                if not event.located:
                    self.counters.engine_too_old += len(event.hashes)
                    continue
                if event.removes_held and event.parent is not None:
                    self.counters.parent_removed += residency.is_removed(event.tier, event.group, event.parent)
                if not event.adapter_named:
                    named = self.settings.adapter_ids.get(event.adapter or "")
                    if named is None:
                        self.counters.adapter_unnamed += len(event.hashes)
                        self._resolver.uses_keys = True
                        continue
                    event = replace(event, adapter=named, adapter_named=True)
                if not self._resolver.uses_keys and has_keys(event):
                    self._resolver.uses_keys = True
                    residency.forget_unproven()
                    if writes is not None:
                        writes.forget_unproven()
                if writes is not None and is_stores(event):
                    writes.store(event)
                    continue
                if event.removal_told and not event.offloaded:
                    self._store(batch.events, at, event)
                    continue
                for part in self._connector.stored(event, self.block_size):
                    for run in split_by_knowledge(part, self.lineage.known):
                        residency.store(run)
            elif isinstance(event, EngineRemoved):
                if writes is not None and is_stores(event):
                    event = writes.remove(event)
                is_device = event.tier is Tier.HBM
                if is_device and self._reports.has_doubts(event.group):
                    residency.end_removals()  # whether a copy is certain depends on the removals before
                residency.remove(self._reports.removed(event) if is_device else self._connector.removed(event))
            elif isinstance(event, EngineDropped):
                residency.drop(event)
                self._reports.dropped(event)
            elif isinstance(event, EngineStarted):
                self._reports.knows_all = True
            else:
                residency.clear(event)
                if Tier.HBM in event.tiers:
                    self._reports.cleared()
                self._connector.clear(event.tiers)
                if writes is not None and Tier.OBJECT_STORE in event.tiers:
                    writes.clear()
                cleared = True
        events += self._publication.settle(cleared=cleared)
        evictions = len(self.lineage.evicted)
        self._most_held = max(self._most_held, len(self.lineage.known) - evictions)
        remembered = min(self._remembered_evictions, self._most_held)
        if evictions > remembered:
            forgotten, lost = self.lineage.trim(remembered)
            residency.forget(forgotten)
            if residency.forgotten.forget_after(lost):
                events += self._publication.settle(cleared=False)
        return events

    def _store(self, events: Sequence[EngineEvent], at: int, event: EngineStored) -> None:
        """Store those of the engine's own copies that event number `at` of the batch makes certain."""
        residency, reports = self._residency, self._reports
        if self.settings.set_semantics or event.tier is not Tier.HBM:
            residency.store(event)
            return
        if event.parent is not None:
            if reports.may_have_lost(event.group):
                residency.end_removals()
            for name in reports.lost_before(event, self.lineage.known.get(event.parent)):
                residency.hold(name, event.group)
            residency.store(event)
        elif event.maybe_again:
            residency.end_removals()
            for part in reports.stored(events, at, event):
                residency.store(part)
        else:
            residency.store(event)

    def expire(self) -> list[EngineRemoved]:
        """Return removals for blocks whose removal is never reported and that were not stored again during the last
        four calls. The caller must fold them."""
        return self._connector.expire()

    def forget_adapter(self, adapter: str) -> list[IndexEvent]:
        """Forget an adapter that the engine reloaded from another path. No request will use its old blocks, because new ones
        have other engine hashes. Returns the change, as `fold` does.

        If an engine hash stands for blocks with and without the adapter, everything is forgotten: see `take_regrouped`.
        """
        self.lineage.forget_unused_scopes()
        self._residency.forgotten.drop_unnamed()
        if self.store_writes is not None:
            self.store_writes.forget_adapter(adapter)
        known = {**self.lineage.known, **self.lineage.variants.detached}
        names = [name for name, stretch in known.items() if stretch.namespace.adapter == adapter]
        if any(name in self._residency.shared.by_hash for name in names):
            self.empty()
            self._regrouped = True
            return []
        self._residency.forget_names(names)
        return self._publication.settle(cleared=False)

    def learn_hybrid(self) -> None:
        """Learn that the model also has attention other than full, even if its events don't show it."""
        self.settings = replace(self.settings, hybrid=True)
        self.groups.settings = self.settings
        self.reuse = self.groups.reuse(self.block_size)

    def ages(self) -> list[tuple[Tier, int, EngineHash, int]]:
        """(tier, group, name, calls of `expire` since it was last stored) of blocks whose removal is never reported."""
        return self._connector.ages()

    def restore_ages(self, ages: Mapping[tuple[Tier, int, EngineHash], int]) -> None:
        """Restore the ages of a loaded ledger: those that `ages` returned when it was saved, plus the ticks since."""
        self._connector.restore(self.resident(), ages)

    @property
    def uses_keys(self) -> bool:
        """True if the engine has reported an adapter, a salt or extra keys."""
        return self._resolver.uses_keys

    def take_regrouped(self) -> bool:
        """True if the engine's groups turned out to be different since the last call. Then the caller starts a new
        incarnation."""
        regrouped, self._regrouped = self._regrouped, False
        return regrouped

    def _learn(self, batch: EngineBatch) -> bool:
        """Learn sizes and groups from a batch. Returns True if all published blocks are forgotten."""
        learned = forgot_all = False
        for event in batch.events:
            if isinstance(event, EngineStored):
                learned = self.groups.learn(event) or learned
                if self.chain != OWN_CHAIN and (event.token_ids or event.local_hashes):
                    was_external, self.chain = self.chain is not None, event.chain
                    if was_external and event.chain == OWN_CHAIN:
                        self.counters.other_chain += self.announced_blocks
                        forgot_all = self._forget_blocks() or forgot_all
                if event.block_size != self.block_size and self._learn_block_size(event):
                    forgot_all = self._forget_blocks() or forgot_all
                    learned = True
        if self._resolver.lookahead_tokens != self.groups.lookahead_tokens:
            self._resolver.lookahead_tokens = self.groups.lookahead_tokens
            forgot_all = (self.block_size is not None and self._forget_blocks()) or forgot_all
        if learned:
            self._regroup()
        return forgot_all

    def _regroup(self) -> None:
        """Bring residency and marks in line with the known groups."""
        reuse = self.groups.reuse(self.block_size)
        holdings = self._residency.holdings.by_group.values()
        size = self.block_size
        misplaced = any(holding.indexable != self.groups.is_resident(holding.group, size) for holding in holdings)
        before, self.reuse = self.reuse, reuse
        if reuse.rule == before.rule and not misplaced:
            return
        self._regrouped = True
        saved = ledger_dump.unpack(self.dump(), self.settings.identity)
        uses_keys, unproven = self._resolver.uses_keys, self._residency.unproven
        self._begin(Holdings(), self.block_size)
        self._resolver.uses_keys = uses_keys
        self._residency.unproven.update(unproven)
        self._restore(saved)

    def _learn_block_size(self, event: EngineStored) -> bool:
        """Learn the block size from an event. Returns True if blocks have been resolved with a different size."""
        known = self.block_size
        size = self.groups.told_block_size(event, known)
        if size is None or size == known:
            return False
        if self.settings.block_size is not None:
            self.other_block_size = size
            return False
        self._resolver.block_size = size
        return known is not None

    def _forget_blocks(self) -> bool:
        """Drop all blocks until they are stored again, because they were resolved with the size of a partial block. Returns
        True if some of them were published."""
        announced = self.announced_blocks > 0
        uses_keys = self._resolver.uses_keys
        self._residency.end_removals()
        self._residency.count_by_name()
        self._begin(self._residency.holdings, self.block_size)
        self._resolver.uses_keys = uses_keys
        return announced

    # ---------------------------------------------------------------- state

    def snapshot(self) -> list[SnapshotChunk]:
        """Everything that is published now. Each chunk has at most 32 KiB of hashes, all from one chain."""
        return self._publication.snapshot()

    def mark_snapshot(self) -> list[Marked | Heads]:
        """All marks and their heads; at most 32 KiB of hashes per event."""
        return self._publication.mark_snapshot()

    def marked(self) -> Iterator[tuple[bytes, int]]:
        """The marked blocks: (scope id, sequence hash)."""
        for block in self._publication.marked():
            yield block.namespace.scope_id, int.from_bytes(block.sequence_hash, "little")

    def resident(self) -> Iterator[tuple[Tier, int, EngineHash]]:
        """Everything the engine holds, publishable or not: (tier, group, engine hash)."""
        for holding, name in self._residency.resident():
            yield holding.tier, holding.group, name

    def _is_resident(self, tier: Tier, group: int, name: EngineHash) -> bool:
        return self._residency.is_resident(tier, group, name)

    def announced(self) -> Iterator[tuple[bytes, Tier, EngineHash, int]]:
        """The published blocks: (scope id, tier, engine hash, sequence hash), once per engine hash that holds the block."""
        return self._publication.announced()

    # ---------------------------------------------------------------- saved state

    def dump(self) -> bytes:
        """The whole ledger except its counters, for the saved state."""
        return ledger_dump.pack(
            self.settings.identity,
            self.block_size,
            self.groups,
            self.lineage,
            self._residency,
            self._resolver.awaiting,
            self._reports.dump(),
            uses_keys=self._resolver.uses_keys,
        )

    @classmethod
    def load(
        cls, dumped: bytes, settings: LedgerSettings, *, remembered_evictions: int = REMEMBERED_EVICTIONS
    ) -> "Ledger":
        """Load a ledger that `dump` wrote. Raises InvalidValue for any other bytes, or if the ledger was saved with
        settings that give blocks different hashes. The granularity may differ."""
        ledger = cls(settings, remembered_evictions=remembered_evictions)
        saved = ledger_dump.unpack(dumped, settings.identity)
        try:
            ledger.groups.restore(saved.groups, saved.lookahead_tokens, saved.untold_keys)
            ledger._check_block_size(saved.block_size)
            ledger.reuse = ledger.groups.reuse(saved.block_size)
            ledger._begin(Holdings(), saved.block_size)
            ledger._resolver.uses_keys = saved.unproven is None
            ledger._residency.unproven.update(saved.unproven or ())
            ledger._restore(saved)
            ledger._reports.restore(saved.reports)
            chains = {one.chain for one in ledger.lineage.namespaces.values()}
            ledger.chain = OWN_CHAIN if OWN_CHAIN in chains else next(iter(chains), None)
            ledger._connector.restore(ledger.resident())
        except (LookupError, TypeError, ValueError) as error:
            raise InvalidValue(f"saved ledger contradicts itself: {error}") from error
        return ledger

    def _check_block_size(self, saved: int | None) -> None:
        """Check that the saved blocks have the size that the engine's groups now require. Raises InvalidValue."""
        size = self.settings.block_size or self.groups.smallest_full or saved
        if size != saved:
            raise InvalidValue(f"saved ledger of blocks of {saved} tokens; expected {size}")

    def _restore(self, saved: ledger_dump.SavedLedger) -> None:
        saved.restore(self.lineage, self._residency, self._resolver.awaiting)
        self._publication.begin()
