"""The requirements for every engine adapter, whatever its engine: see `adapter_cases`."""

import random
from dataclasses import replace

import pytest

from kvatlas.errors import EngineEventError
from kvatlas_publishers.engine_events import EngineStored
from kvatlas_publishers.ledger.ledger import Ledger
from tests.publishers.engines.adapter_cases import AdapterCase, cases
from tests.publishers.ledger.naive_ledger import FoldedIndex

MUTATIONS = 60


@pytest.fixture(params=cases(), ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> AdapterCase:
    found: AdapterCase = request.param
    return found


def announced(ledger: Ledger) -> set[tuple[bytes, int, int]]:
    """(scope id, tier, sequence hash)"""
    return {(scope, int(tier), value) for scope, tier, _, value in ledger.announced()}


def test_all_of_a_recording_is_read_and_announced_prefix_closed(case: AdapterCase) -> None:
    decode, ledger, index = case.decoder(), case.ledger(), FoldedIndex()
    for payload in case.payloads:
        batch = decode(payload)
        assert not batch.skipped and not batch.lost
        index.fold(ledger.fold(batch))  # which checks that each event leaves it prefix-closed
    assert len({(tier, name) for _, tier, name, _ in ledger.announced()}) == case.blocks > 0
    assert {(scope, value.to_bytes(8, "little")) for scope, _, value in announced(ledger)} == set(index.held)


def test_a_decoder_reads_the_same_twice(case: AdapterCase) -> None:
    one, two = case.decoder(), case.decoder()
    assert [one(payload) for payload in case.payloads[:40]] == [two(payload) for payload in case.payloads[:40]]


@pytest.mark.parametrize("seed", [1, 2])
def test_of_stored_events_that_were_lost_nothing_more_is_announced(case: AdapterCase, seed: int) -> None:
    """A publisher that hears less of what an engine stored claims less, and never a block that the engine does not hold."""
    decode, rng, whole, partial = case.decoder(), random.Random(seed), case.ledger(), case.ledger()
    less = False
    for payload in case.payloads:
        batch = decode(payload)
        whole.fold(batch)
        partial.fold(replace(batch, events=[one for one in batch.events if not _lost(one, rng)]))
        assert announced(partial) <= announced(whole)
        less = less or announced(partial) < announced(whole)
    assert less


def _lost(event: object, rng: random.Random) -> bool:
    return isinstance(event, EngineStored) and bool(event.token_ids or event.local_hashes) and rng.random() < 0.2


def test_who_joins_late_announces_no_block_that_the_engine_does_not_hold(case: AdapterCase) -> None:
    decode, whole, late = case.decoder(), case.ledger(), case.ledger()
    for i, payload in enumerate(case.payloads):
        batch = decode(payload)
        whole.fold(batch)
        if i >= len(case.payloads) // 3:
            late.fold(batch)
    assert announced(late) <= announced(whole)


def test_damaged_bytes_are_refused_in_one_line_or_read_and_never_raise_anything_else(case: AdapterCase) -> None:
    rng = random.Random(3)
    refused: list[str] = []
    read = 0
    for _ in range(MUTATIONS):
        payload = bytearray(rng.choice(case.payloads))
        for _ in range(rng.randint(1, 4)):
            match rng.randrange(3):
                case 0:
                    payload[rng.randrange(len(payload))] = rng.randrange(256)
                case 1:
                    del payload[rng.randrange(len(payload)) :]
                case _:
                    at = rng.randrange(len(payload) + 1)
                    payload[at:at] = rng.choice(
                        [b"\xc0", b"-1", b"\xcf" + b"\xff" * 8, b"null", b"{}", b"\x93", b'"a"']
                    )
            if not payload:
                break
        try:
            batch = case.decoder()(bytes(payload))
        except EngineEventError as error:
            refused.append(str(error))
        else:
            read += 1
            case.ledger().fold(batch)
    assert read and refused
    assert not [line for line in refused if "\n" in line or len(line) > 400]


def test_a_payload_that_is_no_batch_is_refused(case: AdapterCase) -> None:
    for payload in (b"", b"\xc1", b"null", b"5", b"[5]"):
        with pytest.raises(EngineEventError):
            case.decoder()(payload)
