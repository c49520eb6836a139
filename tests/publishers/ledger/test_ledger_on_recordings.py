"""After a recording the ledger holds what the engine's own block table held, and announces the usable part of it."""

from pathlib import Path

import pytest

from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas_publishers.engine_events import EngineBatch, EngineStarted, EngineStored
from kvatlas_publishers.engines import decode_batch
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from tests.publishers.ledger.naive_ledger import FoldedIndex, NaiveLedger
from tests.publishers.recordings import FILES, Held, Recording, read_recording

ADAPTER_IDS = {"1": "1", "2": "2"}
"""vLLM 0.11 reports only ids."""
SETTINGS = LedgerSettings("m", "t", adapter_ids=ADAPTER_IDS)


@pytest.fixture(params=FILES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def recording(request: pytest.FixtureRequest) -> Recording:
    path: Path = request.param
    return read_recording(path)


def test_there_are_seven_recordings() -> None:
    assert len(FILES) == 7


def from_its_start(settings: LedgerSettings) -> Ledger:
    """The ledger of an engine whose events are read from the first one on."""
    ledger = Ledger(settings)
    ledger.fold(EngineBatch([EngineStarted()]))
    return ledger


def assert_resident(ledger: Ledger, recording: Recording) -> None:
    """Check that the ledger has everything that the engine holds. Two copies of a window's blocks may have been reports of
    hits."""
    held = set(ledger.resident())
    assert held <= recording.expected_resident
    left_out = recording.expected_resident - held
    assert len(left_out) <= (2 if recording.name == "vllm-0.33.0-hybrid" else 0)
    assert all(group == 1 for _, group, _ in left_out)


def announced(ledger: Ledger) -> set[Held]:
    return {(tier, 0, name) for _, tier, name, _ in ledger.announced()}


def test_the_ledger_holds_and_announces_exactly_what_the_engine_has(recording: Recording) -> None:
    ledger, index = from_its_start(SETTINGS), FoldedIndex()
    for _, payload in recording.batches:
        batch = decode_batch(recording.kind, payload)
        assert not batch.skipped
        index.fold(ledger.fold(batch))
    assert_resident(ledger, recording)
    assert announced(ledger) == recording.expected_usable
    assert {(scope, seq.to_bytes(8, "little")) for scope, _, _, seq in ledger.announced()} == set(index.held)
    assert ledger.block_size == recording.block_size


@pytest.mark.parametrize("granularity", [1, 4])
def test_the_thinned_closure_is_announced_after_every_batch(recording: Recording, granularity: int) -> None:
    ledger = from_its_start(LedgerSettings("m", "t", granularity=granularity, adapter_ids=ADAPTER_IDS))
    reports_hits = recording.name.startswith("vllm-0.33")
    index, naive = FoldedIndex(granularity), NaiveLedger(recording.block_size, granularity)
    for i, (_, payload) in enumerate(recording.batches):
        batch = decode_batch(recording.kind, payload)
        index.fold(ledger.fold(batch))
        naive.fold(batch)
        if i % 8 == 0 or i == len(recording.batches) - 1:  # the reference is slow
            usable = naive.usable()
            if reports_hits:  # a doubtful copy may be left out
                assert all(tiers <= usable.get(key, set()) for key, tiers in index.held.items())
            else:
                assert index.held == usable
    expected = {(tier, name) for tier, _, name in recording.expected_usable}
    assert {(tier, name) for _, tier, name, _ in ledger.announced()} <= expected
    assert index.held


@pytest.mark.parametrize("granularity", [1, 4])
def test_a_ledger_goes_on_after_a_dump_and_a_load(recording: Recording, granularity: int) -> None:
    settings = LedgerSettings("m", "t", granularity=granularity, adapter_ids=ADAPTER_IDS)
    straight, ledger, index = from_its_start(settings), from_its_start(settings), FoldedIndex(granularity)
    for i, (_, payload) in enumerate(recording.batches):
        batch = decode_batch(recording.kind, payload)
        straight.fold(batch)
        index.fold(ledger.fold(batch))
        if i % 37 == 20:
            ledger = Ledger.load(ledger.dump(), settings)
    assert_resident(ledger, recording)
    assert set(ledger.announced()) == set(straight.announced())
    assert ledger.digest == straight.digest
    assert ledger.uses == straight.uses
    if granularity == 1:
        assert announced(ledger) == recording.expected_usable


def test_set_semantics_would_lose_blocks_of_an_engine_that_counts(recording: Recording) -> None:
    ledger = Ledger(LedgerSettings("m", "t", set_semantics=True, adapter_ids=ADAPTER_IDS))
    for _, payload in recording.batches:
        ledger.fold(decode_batch(recording.kind, payload))
    assert len(recording.expected_resident - set(ledger.resident())) == recording.a_set_fold_would_miss


def test_a_router_finds_the_blocks_from_the_prompts_tokens_alone(recording: Recording) -> None:
    """The tokens of each run from a root, hashed as a router does, give the sequence hashes announced for it."""
    ledger, found = Ledger(SETTINGS), 0
    for _, payload in recording.batches:
        batch = decode_batch(recording.kind, payload)
        ledger.fold(batch)
        now = {(name, sequence_hash) for _, _, name, sequence_hash in ledger.announced()}
        for event in batch.events:
            if isinstance(event, EngineStored) and event.parent is None and event.extra_keys is None and not event.salt:
                hashes = unpack_hashes(extend_chain(event.token_ids, recording.block_size))
                of_event = {pair for pair in now if pair[0] in set(event.hashes)}
                assert of_event <= set(zip(event.hashes, hashes, strict=True))
                found += len(of_event)
    assert found > 30
