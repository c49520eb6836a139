"""TensorRT-LLM's records become engine events, and then the ledger's blocks."""

import json
from typing import Any

import pytest

from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas.errors import EngineEventError
from kvatlas_publishers.engine_events import EngineBatch
from kvatlas_publishers.engines.tensorrt_llm import EventDecoder, plain_block_hash, read_records
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from tests.publishers.trtllm_serve import BLOCK, WINDOW, TrtllmServe

PROMPT = list(range(1, 4 * BLOCK + 1))


class Reader:
    """A decoder and a ledger that take everything that an engine returns."""

    def __init__(self, **settings: Any) -> None:
        self.ledger = Ledger(LedgerSettings("m", "m", set_semantics=True, **settings))
        self.decoder = EventDecoder()
        self.refused: list[str] = []

    def take(self, engine: TrtllmServe) -> None:
        for record in read_records(engine.drain()):
            try:
                self.ledger.fold(EngineBatch(self.decoder.decode(record)))
            except EngineEventError as error:
                self.refused.append(str(error))

    @property
    def held(self) -> set[tuple[str, int]]:
        """(tier, sequence hash) of the announced blocks."""
        return {(tier.label, value) for _, tier, _, value in self.ledger.announced()}


def chain(tokens: list[int]) -> list[int]:
    return unpack_hashes(extend_chain(tokens, BLOCK))


def test_block_hashes_are_those_of_the_engines_own_hasher() -> None:
    """Values of `BlockKeyHasher::hash`, compiled from its C++ lines."""
    first = plain_block_hash([1, 2, 3, 4], 0)
    assert first == 924206229973855
    assert plain_block_hash([5, 6, 7, 8], first) == 2728178455351807326
    assert plain_block_hash([5, 6], first) == 6875034662206558884
    assert plain_block_hash([128000, 50256, 0, 2**31 - 1], 0) == 521593524319911
    assert first != 12119090535462750509, "the same block with adapter 42"


def test_stored_blocks_are_held_under_their_tokens_hashes_and_gone_when_removed() -> None:
    engine, reader = TrtllmServe(), Reader()
    names = engine.store(PROMPT)
    reader.take(engine)
    assert reader.held == {("hbm", value) for value in chain(PROMPT)}
    more = engine.store([90, 91, 92, 93], names[1])
    engine.remove(names[3], names[2])
    reader.take(engine)
    assert reader.held == {("hbm", value) for value in chain([*PROMPT[: 2 * BLOCK], 90, 91, 92, 93])}
    engine.remove(*more, names[1], names[0])
    reader.take(engine)
    assert not reader.held and not reader.refused


def test_a_short_block_is_not_announced_and_its_removal_is_no_matter() -> None:
    engine, reader = TrtllmServe(), Reader()
    names = engine.store([*PROMPT, 50, 51])
    reader.take(engine)
    assert len(reader.held) == 4 and reader.ledger.block_size == BLOCK
    engine.remove(names[4])
    reader.take(engine)
    assert len(reader.held) == 4 and reader.ledger.counters.removed_unknown == 0


def test_a_block_moves_between_levels_and_a_removal_takes_it_from_where_it_is() -> None:
    engine, reader = TrtllmServe(), Reader()
    names = engine.store(PROMPT[:BLOCK])
    engine.store(PROMPT[BLOCK:], names[0], level=1)
    engine.move(names[0], 0, 1)
    reader.take(engine)
    assert reader.held == {("cpu_dram", value) for value in chain(PROMPT)}
    engine.move(names[0], 1, 0)
    engine.put({"type": "updated", "block_hash": names[0], "cache_level": None, "priority": None})
    reader.take(engine)
    assert ("hbm", chain(PROMPT)[0]) in reader.held and ("cpu_dram", chain(PROMPT)[0]) not in reader.held
    engine.store(PROMPT[:BLOCK])  # reported again: it is in the engine's tree once
    engine.remove(names[0])
    reader.take(engine)
    assert not reader.held


@pytest.mark.parametrize("told", [True, False], ids=["salt told", "salt not told"])
def test_what_an_adapter_or_an_untold_salt_computed_is_left_out(told: bool) -> None:
    engine, reader = TrtllmServe(), Reader()
    adapted = engine.store(PROMPT, adapter=True)
    engine.store([7] * BLOCK, adapted[3], adapter=True)
    engine.store(PROMPT, adapter=True, salt="s", tell_salt=told)
    engine.store([5] * BLOCK, salt="s", tell_salt=told)  # nothing can be known from a single salted block
    reader.take(engine)
    assert not reader.held and len(reader.refused) == 4
    engine.store(PROMPT, salt="s", tell_salt=told)
    reader.take(engine)
    assert len(reader.held) == (4 if told else 0) and not reader.held & {("hbm", value) for value in chain(PROMPT)}


def test_blocks_are_announced_up_to_the_first_image() -> None:
    engine, reader = TrtllmServe(), Reader()
    names = engine.store(PROMPT, mm_block=2)
    engine.store([7] * BLOCK, names[3])
    engine.store([9] * BLOCK, mm_block=0)
    reader.take(engine)
    assert reader.held == {("hbm", value) for value in chain(PROMPT)[:2]}
    [why] = reader.refused
    assert "begin with an image" in why


def test_the_largest_window_is_full_attention_and_a_smaller_one_makes_it_an_upper_bound() -> None:
    engine, reader = TrtllmServe(), Reader()
    engine.restart(64, WINDOW)
    engine.store(PROMPT, window=64)
    names = engine.store(PROMPT)
    reader.take(engine)
    assert len(reader.held) == 4 and "unknown kind of attention" in reader.ledger.reuse.upper_bound
    engine.remove(names[3], window=64)
    reader.take(engine)
    assert len(reader.held) == 4
    engine.remove(names[3])
    reader.take(engine)
    assert len(reader.held) == 3


def test_a_created_cache_is_an_empty_one() -> None:
    engine, reader = TrtllmServe(), Reader()
    engine.store(PROMPT)
    engine.put({"type": "created", "num_blocks_per_cache_level": [10]})
    reader.take(engine)
    assert not reader.held


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "data None"),
        ({"type": "moved"}, "unknown event 'moved'"),
        ({"type": "stored", "parent_hash": "a", "blocks": []}, "parent_hash 'a'"),
        ({"type": "stored", "parent_hash": None, "blocks": [5]}, "AttributeError"),
        ({"type": "stored", "parent_hash": None, "blocks": [{"block_hash": 1, "cache_level": 0}]}, "KeyError 'tokens'"),
        ({"type": "stored", "parent_hash": None, "blocks": [{"block_hash": 1, "tokens": []}]}, "stored block"),
        ({"type": "removed", "block_hashes": ["a"]}, "expected an array of integers"),
        ({"type": "updated", "block_hash": 1, "cache_level": 5}, "updated cache_level 5"),
    ],
)
def test_a_record_that_can_not_be_read_is_refused_in_one_line(data: Any, why: str) -> None:
    [record] = read_records(json.dumps([{"event_id": 1, "data": data, "window_size": 8}]).encode())
    with pytest.raises(EngineEventError, match=why) as raised:
        EventDecoder().decode(record)
    assert "\n" not in str(raised.value)


def test_hashes_of_another_algorithm_are_refused() -> None:
    engine, reader = TrtllmServe(), Reader()
    engine.store(PROMPT)
    engine.records[1]["hash_algo"] = "v2_sha256"
    reader.take(engine)
    assert not reader.held and reader.refused == ["block hashes use 'v2_sha256'; expected v1_block_key"]


@pytest.mark.parametrize("body", [b"", b"{}", b"[5]", b'[{"event_id": -1}]', b'[{"event_id": true}]', b"[" * 100_000])
def test_an_answer_that_is_no_array_of_records_is_refused(body: bytes) -> None:
    with pytest.raises(EngineEventError):
        read_records(body)
