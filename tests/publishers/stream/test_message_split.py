import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.hashing import HASH_BYTES, pack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.wire import encode
from kvatlas.events import Checkpoint, Cleared, IndexEvent, Message, Removed, ScopeUse, Stored
from kvatlas.identity import OWN_CHAIN, Scope
from kvatlas.validation import MAX_BLOCK_BYTES
from kvatlas_publishers.stream.message_split import event_bytes, split_into_messages

SCOPES = [Scope("m" * n, "t", adapter) for n, adapter in ((1, None), (400, "lora"), (9, "другой"))]
USES = {scope.scope_id: ScopeUse(scope, 16, 1 << 20) for scope in SCOPES}

hash_lists = st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=120).map(pack_hashes)
scope_ids = st.sampled_from(sorted(USES))
tiers = st.sampled_from(Tier)
events = st.one_of(
    st.builds(
        Stored,
        scope_ids,
        tiers,
        hash_lists,
        st.none() | st.binary(min_size=8, max_size=8),
        st.integers(0, 1 << 40),
    ),
    st.builds(Removed, scope_ids, tiers, hash_lists),
    st.just(Cleared()),
    st.just(Checkpoint([1 << 40] * 15)),
)


def blocks(flushed: list[IndexEvent], granularity: int) -> list[object]:
    """The events' content block by block, however they are split."""
    out: list[object] = []
    for event in flushed:
        if not isinstance(event, (Stored, Removed)):
            out.append(event)
            continue
        for at in range(0, len(event.hashes), HASH_BYTES):
            one = event.hashes[at : at + HASH_BYTES]
            if isinstance(event, Removed):
                out.append(("removed", event.scope_id, event.tier, one))
            else:
                parent = event.hashes[at - HASH_BYTES : at] if at else event.parent
                index = event.first_index + at // HASH_BYTES * granularity
                out.append(("stored", event.scope_id, event.tier, one, parent, index))
    return out


@given(st.lists(events, max_size=12), st.integers(1200, 4000), st.integers(1, 4))
def test_parts_keep_every_block_in_order_and_fit(flushed: list[IndexEvent], limit: int, granularity: int) -> None:
    parts = split_into_messages(flushed, USES, limit, granularity)
    assert blocks([e for part, _ in parts for e in part], granularity) == blocks(flushed, granularity)
    for part, scopes in parts:
        assert part
        assert scopes.keys() == {e.scope_id for e in part if isinstance(e, (Stored, Removed))}
        longest = Message("w" * 64, (1 << 64) - 1, (1 << 53) - 1, part, scopes, 1 << 52)
        assert len(encode(longest)) <= limit


@given(events)
def test_an_event_takes_at_most_its_bound(event: IndexEvent) -> None:
    whole = len(encode(Message("w", 1, 1, [event])))
    assert whole - len(encode(Message("w", 1, 1, []))) <= event_bytes(event)


def test_events_that_fit_are_one_message() -> None:
    flushed: list[IndexEvent] = [Stored(sid, Tier.HBM, bytes(8 * 1000)) for sid in USES]
    assert len(split_into_messages(flushed, USES, 512 * 1024)) == 1


@pytest.mark.parametrize("chain", [OWN_CHAIN, "external:" + "c" * 503])
def test_the_longest_scope_fits_even_if_the_message_is_just_full(chain: str) -> None:
    scope = Scope("m" * 512, "t" * 512, "a" * 512, "n" * 512, chain)
    use = ScopeUse(scope, 1 << 16, MAX_BLOCK_BYTES, tuple((tier, MAX_BLOCK_BYTES) for tier in list(Tier)[1:]))
    for count in range(130, 260):
        stored = Stored(scope.scope_id, Tier.HBM, bytes(8 * count), bytes(8), 1 << 40)
        for part, scopes in split_into_messages([stored], {scope.scope_id: use}, 4_096):
            longest = Message("w" * 64, (1 << 64) - 1, (1 << 53) - 1, part, scopes, 1 << 52)
            assert len(encode(longest)) <= 4_096


def test_no_events_make_no_message() -> None:
    assert split_into_messages([], USES, 512 * 1024) == []
