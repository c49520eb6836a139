"""The ledger's counters."""

from dataclasses import dataclass


@dataclass(slots=True)
class LedgerCounters:
    """Counts since the ledger was created; they are numbers of blocks unless a field says otherwise."""

    stored: int = 0
    removed: int = 0
    cleared_events: int = 0
    removed_unknown: int = 0
    """Removals of a copy that is older than the ledger, so it was never stored here."""
    sparse: int = 0
    """Stored in groups other than those of full attention, for which only marks are published."""
    unknown_parent: int = 0
    zero_parent: int = 0
    """Blocks with unknown parent 0, which some engines send for no parent."""
    parents_found: int = 0
    """Left out at first because their parent was unknown, and accepted once it was known."""
    unindexable: int = 0
    """Blocks with token ids beyond 32 bits or too few tokens, or with an adapter or salt that a scope can't have."""
    other_block_size: int = 0
    placeholder_unknown: int = 0
    other_chain: int = 0
    """Left out: reported without token ids by an engine that does report them for other blocks."""
    adapter_unnamed: int = 0
    """Left out: neither the engine nor the settings name their adapter."""
    engine_too_old: int = 0
    """Left out: this engine version's events don't show where in a prompt a block is."""
    parent_removed: int = 0
    """Stored after a block that the engine still holds, although it reported its removal."""
    removal_untold: int = 0
    """Left out: stored by a connector whose removals are never reported."""
    store_told: int = 0
    """Reported to the shared store's publisher."""
    store_unknown: int = 0
    """Stored in the shared store, but not reported to its publisher, because the blocks can't be identified."""
    withdrawn: int = 0
    restored: int = 0
    judged_removals: int = 0
    """Removals of a hash that stands for several blocks. Any of these may be gone, so all count as gone."""
