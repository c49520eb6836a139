"""Blocks reported with local hashes instead of token ids, of our own chain and of external ones."""

from dataclasses import replace

import pytest

from kvatlas.blocks.external_chain import hash_text, name_hash
from kvatlas.blocks.hashing import local_hash
from kvatlas.fleet.records import EngineKind
from kvatlas.identity import DEFAULT_EXTERNAL_CHAIN
from kvatlas_publishers.engine_events import EngineBatch, EngineEvent, EngineHash, EngineStored, LocalHashes
from kvatlas_publishers.engines import decode_batch
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from tests.publishers.engines.open_traffic import BLOCK, OpenTraffic
from tests.publishers.ledger.naive_ledger import FoldedIndex

SETTINGS = LedgerSettings("m", "t", block_size=BLOCK, set_semantics=True, salt_is_tenant=True)


def with_local_hashes(event: EngineEvent) -> EngineEvent:
    if not isinstance(event, EngineStored) or not event.token_ids:
        return event
    tokens = event.token_ids
    local = [local_hash(tokens[at : at + BLOCK]) for at in range(0, len(tokens), BLOCK)]
    return replace(event, token_ids=(), local_hashes=LocalHashes(local))


def external(event: EngineEvent, parents: dict[EngineHash, EngineHash | None]) -> EngineEvent:
    """The event without tokens; further copies have the parent that their block had at first."""
    if not isinstance(event, EngineStored):
        return event
    before = event.parent
    for name in event.hashes:
        before = parents.setdefault(name, before) if event.token_ids else parents[name]
        before = name
    names = [name_hash(hash_text(name)) for name in event.hashes if isinstance(name, int)]
    local = LocalHashes(names, DEFAULT_EXTERNAL_CHAIN, name_hash("root"))
    return replace(event, token_ids=(), parent=parents[event.hashes[0]], local_hashes=local)


@pytest.mark.parametrize("seed", range(3))
def test_local_hashes_say_what_tokens_say_also_across_a_save(seed: int) -> None:
    by_tokens, by_hashes = Ledger(SETTINGS), Ledger(SETTINGS)
    told_by_tokens, told_by_hashes = FoldedIndex(), FoldedIndex()
    for at, payload in enumerate(OpenTraffic(numbered=False, seed=seed).batches):
        batch = decode_batch(EngineKind.OPEN, payload)
        told = replace(batch, events=[with_local_hashes(event) for event in batch.events])
        told_by_hashes.fold(by_hashes.fold(told))  # in a different order, after a save
        told_by_tokens.fold(by_tokens.fold(batch))
        assert told_by_hashes == told_by_tokens
        if at % 40 == 39:
            by_hashes = Ledger.load(by_hashes.dump(), SETTINGS)
    assert by_hashes.digest == by_tokens.digest and by_hashes.chain == "own"


@pytest.mark.parametrize("seed", range(3))
def test_an_external_chain_holds_as_many_blocks_in_each_tier_prefix_closed_also_across_a_save(seed: int) -> None:
    by_tokens, by_names, index = Ledger(SETTINGS), Ledger(SETTINGS), FoldedIndex()
    parents: dict[EngineHash, EngineHash | None] = {}
    for at, payload in enumerate(OpenTraffic(numbered=False, seed=seed).batches):
        batch = decode_batch(EngineKind.OPEN, payload)
        by_tokens.fold(batch)
        index.fold(by_names.fold(EngineBatch([external(event, parents) for event in batch.events])))
        assert {(tier, name) for _, tier, name, _ in by_names.announced()} == {
            (tier, name) for _, tier, name, _ in by_tokens.announced()
        }
        if at % 40 == 39:
            by_names = Ledger.load(by_names.dump(), SETTINGS)
    assert by_names.chain == DEFAULT_EXTERNAL_CHAIN
    assert not {key for _, _, _, key in by_names.announced()} & {key for _, _, _, key in by_tokens.announced()}


def test_what_waits_for_its_parent_waits_across_a_save() -> None:
    ledger = Ledger(SETTINGS)
    child = EngineStored([2], 1, (), BLOCK, local_hashes=LocalHashes([22]))
    ledger.fold(EngineBatch([child]))
    assert ledger.counters.unknown_parent == 1 and ledger.digest.blocks == 0
    ledger = Ledger.load(ledger.dump(), SETTINGS)
    ledger.fold(EngineBatch([EngineStored([1], None, (), BLOCK, local_hashes=LocalHashes([11]))]))
    assert ledger.digest.blocks == 2
