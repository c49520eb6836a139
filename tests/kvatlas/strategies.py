"""Hypothesis strategies for the values of the contract."""

from hypothesis import strategies as st

from kvatlas.blocks.block_sizes import in_order
from kvatlas.blocks.digest import MARK_WORDS, WORDS
from kvatlas.blocks.hashing import HASH_BYTES, pack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.wire import MAX_INCARNATION, MAX_SEQ
from kvatlas.events import (
    Checkpoint,
    Cleared,
    Heads,
    IndexEvent,
    Marked,
    Message,
    Removed,
    ScopeUse,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    Stored,
    Unmarked,
)
from kvatlas.identity import OWN_CHAIN, Scope
from kvatlas.validation import MAX_BLOCK_BYTES, MAX_BLOCK_TOKENS

token_ids = st.integers(0, (1 << 32) - 1)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
chains = st.sampled_from([OWN_CHAIN, "external:default", "external:x"])
scopes = st.builds(Scope, names, names, st.none() | names, names, chains)
worker_ids = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
hash_values = st.integers(0, (1 << 64) - 1)
packed_hashes = st.lists(hash_values, min_size=1, max_size=8).map(pack_hashes)
tiers = st.sampled_from(Tier)
digests = st.sampled_from([WORDS, WORDS + MARK_WORDS]).flatmap(
    lambda words: st.lists(st.integers(0, MAX_SEQ), min_size=words, max_size=words)
)
heads = st.dictionaries(hash_values, st.integers(0, (1 << 64) - 1), min_size=1, max_size=8).map(
    lambda bits: (pack_hashes(list(bits)), b"".join(one.to_bytes(8, "big") for one in bits.values()))
)
parents = st.none() | st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)


def _once(event: IndexEvent) -> object:
    """A key for events that a message may have only once; unique for all others."""
    return type(event) if isinstance(event, (Cleared, SnapshotBegin, SnapshotEnd)) else repr(event)


tier_bytes = st.just(()) | st.dictionaries(
    st.sampled_from(list(Tier)[1:]), st.integers(1, MAX_BLOCK_BYTES), max_size=4
).map(lambda sizes: in_order(sizes.items()))


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """A message whose events name scopes that it describes."""
    used = draw(st.lists(scopes, min_size=1, max_size=3, unique=True))
    uses = {
        scope.scope_id: ScopeUse(
            scope, draw(st.integers(1, MAX_BLOCK_TOKENS)), draw(st.integers(0, MAX_BLOCK_BYTES)), draw(tier_bytes)
        )
        for scope in used
    }
    ids = st.sampled_from(sorted(uses))
    fields = (ids, tiers, packed_hashes, parents, st.integers(0, 1 << 40))
    events: st.SearchStrategy[IndexEvent] = st.one_of(
        st.builds(Stored, *fields),
        st.builds(SnapshotChunk, *fields),
        st.builds(Removed, ids, tiers, packed_hashes),
        st.builds(SnapshotEnd, st.integers(0, MAX_SEQ), digests),
        st.builds(Checkpoint, digests),
        st.just(Cleared()),
        st.builds(SnapshotBegin, st.none() | st.integers(0, 255)),
        st.builds(Marked, ids, packed_hashes),
        st.builds(Unmarked, ids, packed_hashes),
        st.builds(lambda scope_id, drawn: Heads(scope_id, *drawn), ids, heads),
    )
    return Message(
        draw(worker_ids),
        draw(st.integers(1, MAX_INCARNATION)),
        draw(st.integers(0, MAX_SEQ)),
        draw(st.lists(events, max_size=6, unique_by=_once)),
        uses,
        draw(st.integers(0, MAX_SEQ)),
    )
