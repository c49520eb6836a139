"""Blocks of a chain share what they have in common."""

from kvatlas.blocks.hashing import extend_chain
from kvatlas.events import EngineBatch, EngineRemoved, EngineStored
from publishers.ledger.block import packed_hashes
from publishers.ledger.ledger import Ledger, LedgerSettings

SETTINGS = LedgerSettings("m", "t", block_size=2)
TOKENS = list(range(16))
CHAIN = extend_chain(TOKENS, 2)


def stored(first: int, last: int) -> EngineBatch:
    """Blocks `first` to `last` - 1 of one chain; block i has the name i + 1."""
    names = list(range(first + 1, last + 1))
    return EngineBatch([EngineStored(names, first or None, TOKENS[2 * first : 2 * last], 2)])


def test_blocks_stored_one_by_one_share_their_hashes_and_so_do_restored_ones() -> None:
    ledger = Ledger(SETTINGS)
    for at in range(8):
        ledger.fold(stored(at, at + 1))
    for one in (ledger, Ledger.load(ledger.dump(), SETTINGS)):
        blocks = [one.lineage.known[name] for name in range(1, 9)]
        assert len({id(block.stretch) for block in blocks}) == 1
        assert [block.index for block in blocks] == list(range(8))
        assert packed_hashes(blocks) == CHAIN
        assert b"".join(block.sequence_hash for block in blocks) == CHAIN


def test_a_forgotten_tail_is_made_again_with_the_same_hashes() -> None:
    ledger = Ledger(SETTINGS, remembered_evictions=0)
    ledger.fold(stored(0, 8))
    ledger.fold(EngineBatch([EngineRemoved([8, 7, 6])]))
    assert sorted(ledger.lineage.known) == [1, 2, 3, 4, 5]
    ledger.fold(stored(5, 8))
    blocks = [ledger.lineage.known[name] for name in range(1, 9)]
    assert packed_hashes(blocks) == CHAIN
    assert packed_hashes(reversed(blocks)) == b"".join(block.sequence_hash for block in reversed(blocks))
    assert ledger.digest.blocks == 8
