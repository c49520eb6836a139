"""What the ledger counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class LedgerCounters:
    """Since the ledger was made. In blocks, unless a field names something else."""

    stored: int = 0
    removed: int = 0
    cleared_events: int = 0
    removed_unknown: int = 0
    """Removals of a copy that was never stored here: it is older than the ledger."""
    sparse: int = 0
    """Stored in groups of other attention than full: of these only marks are published."""
    unknown_parent: int = 0
    zero_parent: int = 0
    """Blocks with an unknown parent that is named 0, by which some engines mean none."""
    parents_found: int = 0
    """Left out for their parent at first, and taken in once that was known."""
    unindexable: int = 0
    """Token ids beyond 32 bits, or not a full block's each, or an adapter or salt that can't name a scope."""
    other_block_size: int = 0
    placeholder_unknown: int = 0
    other_chain: int = 0
    """Left out: reported without token ids by an engine that reports them for other blocks."""
    adapter_unnamed: int = 0
    """Left out: of an adapter whose name neither the engine nor the settings tell."""
    engine_too_old: int = 0
    """Left out: of a version whose events don't say where in a prompt a block is."""
    parent_removed: int = 0
    """Stored behind a block that the engine holds, though it announced its removal."""
    removal_untold: int = 0
    """Left out: stored by a connector where nobody tells their removal."""
    store_told: int = 0
    """Told to the shared store's publisher."""
    store_unknown: int = 0
    """Stored in the shared store, but which blocks they are is not known: not told."""
    withdrawn: int = 0
    restored: int = 0
    judged_removals: int = 0
    """Removals of a hash that stands for several blocks, any of which may be gone: all of these count as gone."""
