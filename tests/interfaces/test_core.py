"""A control plane's data model, element by element: keys, tiers, residencies, states, hints, events and costs."""

import pytest

from kvatlas.blocks.block_names import said_sequence_hash
from kvatlas.blocks.external_chain import external_chain
from kvatlas.blocks.residency import BlockKey, Residency
from kvatlas.blocks.tiers import Tier, parse_tier
from kvatlas.cost.quillcache import QuillcacheProfile
from kvatlas.errors import InvalidValue, UnknownTier
from kvatlas.fleet.capacity import CAPACITIES, capacity_of
from kvatlas.fleet.records import EngineEndpoint, EngineKind, WorkerState
from kvatlas.fleet.reported_load import read_load
from kvatlas.identity import Scope
from kvatlas.request import BlockHint, Fallbacks, RequestHints
from kvatlas_publishers.engines.open_events import batch_of
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.ledger.settings import LedgerSettings
from router_client.prompt import Prompt

SCOPE = Scope("model", "tokenizer")
EXTERNAL = Scope("model", "tokenizer", chain="external:default")


def test_a_key_says_the_block_where_it_can() -> None:
    own = BlockKey(SCOPE, "0123456789abcdef", "fedcba9876543210", 7, 64)
    assert said_sequence_hash(own) == 0xFEDCBA9876543210
    first = BlockKey(EXTERNAL, "session-9", "turn-1", 0, 64)
    assert said_sequence_hash(first).to_bytes(8, "little") == external_chain(["turn-1"], "session-9")
    with pytest.raises(InvalidValue, match="'turn-2' after 'turn-1': only publishers know which it is"):
        said_sequence_hash(BlockKey(EXTERNAL, "turn-1", "turn-2", 1, 64))
    with pytest.raises(InvalidValue, match="expected 16 hex digits"):
        said_sequence_hash(BlockKey(SCOPE, "root", "turn-1", 0, 64))


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        *(("Hbm", Tier.HBM), ("RemoteHbm", Tier.REMOTE_HBM), ("CpuDram", Tier.CPU_DRAM), ("LocalSsd", Tier.LOCAL_SSD)),
        *(("ObjectStore", Tier.OBJECT_STORE), ("VRAM", Tier.HBM), ("nvme", Tier.LOCAL_SSD), ("s3", Tier.OBJECT_STORE)),
    ],
)
def test_a_tier_is_read_by_alias_and_by_a_variants_name(name: str, tier: Tier) -> None:
    assert parse_tier(name) is tier and parse_tier(tier.label) is tier


def test_an_unknown_medium_is_refused_by_name() -> None:
    with pytest.raises(UnknownTier, match="'tape'"):
        parse_tier("tape")


def test_a_residency_in_the_devices_memory() -> None:
    assert Residency.hbm("w", SCOPE, 7, 4_096) == Residency(SCOPE, 7, "w", Tier.HBM, 4_096, pinned=False)


ENDPOINT = EngineEndpoint(
    id="w", kind=EngineKind.VLLM, model_id="model", tokenizer_id="tokenizer", locality_domain="rack-1"
)


def test_a_state_by_hand_with_load_and_a_profiles_capacity() -> None:
    unknown = ENDPOINT.worker_state()
    assert (unknown.id, unknown.locality_domain, unknown.hbm_capacity_bytes) == ("w", "rack-1", 0)
    known = ENDPOINT.worker_state(capacity_of("quillcache"))
    assert (known.hbm_capacity_bytes, known.cpu_capacity_bytes) == (80 << 30, 512 << 30)
    loaded = known.with_load(2_048, 3)
    assert (loaded.queued_prefill_tokens, loaded.running_decodes, known.running_decodes) == (2_048, 3, 0)
    assert loaded.hbm_capacity_bytes == CAPACITIES["quillcache"].hbm_bytes
    with pytest.raises(InvalidValue, match="running_decodes"):
        known.with_load(0, -1)
    with pytest.raises(InvalidValue, match="expected one of quillcache"):
        capacity_of("other")


def test_a_whole_state_is_a_load() -> None:
    state = {
        "id": "w",
        "locality_domain": "rack-2",
        "hbm_capacity_bytes": 10,
        "hbm_used_bytes": 5,
        "cpu_capacity_bytes": 4,
        "cpu_used_bytes": 1,
        "running_decodes": 3,
        "queued_prefill_tokens": 100,
    }
    read = read_load(state, "w", 7)
    assert read == WorkerState.model_validate({**state, "sampled_us": 7})
    assert read_load(state, "w", 7, "rack-1").locality_domain == "rack-1"  # the publisher's own takes precedence
    with pytest.raises(InvalidValue, match="load field id is 'w'; expected v"):
        read_load(state, "v", 7)
    with pytest.raises(InvalidValue, match="load field locality_domain"):
        read_load({**state, "locality_domain": 5}, "w", 7)


def test_each_block_hint_has_a_size() -> None:
    hints = RequestHints.parse(
        {
            "model_id": "model",
            "block_bytes": 100,
            "blocks": [
                {"block_hash": "a", "token_count": 64, "bytes": 300},
                {"block_hash": "b", "token_count": 64},
                {"block_hash": "c", "token_count": 10, "bytes": 50},
            ],
        }
    )
    assert hints.blocks is not None and hints.blocks[1] == BlockHint(block_hash="b", token_count=64)
    keys = hints.to_blocks(Fallbacks())
    assert [(key.prefix_hash, key.block_hash, key.token_count) for key in keys] == [
        *(("root", "a", 64), ("a", "b", 64), ("b", "c", 10)),
    ]
    assert hints.to_shape(Fallbacks()).input_tokens == 138
    prompt = Prompt.of_hints(hints)
    assert (prompt.input_tokens, prompt.block_size, prompt.hashes) == (138, 64, external_chain(["a", "b"]))
    assert [prompt.kv_bytes(0, 64, 64), prompt.kv_bytes(64, 128, 64), prompt.kv_bytes(32, 96, 64)] == [300, 100, 200]
    assert prompt.kv_bytes(0, 138, 64) == 300 + 100 + 16  # after the last full block, as many per token as in it


@pytest.mark.parametrize(
    ("blocks", "line"),
    [
        ([("a", 64), ("b", 10), ("c", 64)], "blocks.1.token_count is 10; expected 64"),
        ([("a", 64), ("b", 65)], "blocks.1.token_count is 65; expected 64"),
        ([("a", 0)], "blocks.0.token_count"),
    ],
)
def test_only_the_last_block_may_be_shorter(blocks: list[tuple[str, int]], line: str) -> None:
    listed = [{"block_hash": name, "token_count": tokens} for name, tokens in blocks]
    with pytest.raises(InvalidValue, match=line):
        Prompt.of_hints(RequestHints.parse({"model_id": "model", "blocks": listed}))


def open_batch(*events: dict[str, object], **fields: object) -> dict[str, object]:
    stored = [{"type": "block_stored", "block_size": 4, **event} for event in events]
    return {"engine_id": "e", "events": stored, **fields}


def test_bytes_of_events_are_what_the_index_and_prices_have() -> None:
    ledger = Ledger(LedgerSettings(model_id="model", tokenizer_id="tokenizer", set_semantics=True))
    tokens = list(range(8))
    ledger.fold(batch_of(open_batch({"block_hashes": ["a"], "token_ids": tokens[:4]}, bytes_per_block=100)))
    assert ledger.sizes.block_bytes == 100  # as in heartbeats, and so in prices
    event = {"block_hashes": ["b"], "parent_block_hash": "a", "token_ids": tokens[4:], "bytes_per_block": 200}
    ledger.fold(batch_of(open_batch(event, bytes_per_block=100)))
    assert ledger.sizes.block_bytes == 200 and ledger.uses[SCOPE.scope_id].block_bytes == 200


def test_events_without_tokens_among_others_with_them_are_counted() -> None:
    ledger = Ledger(LedgerSettings(model_id="model", tokenizer_id="tokenizer", set_semantics=True))
    ledger.fold(batch_of(open_batch({"block_hashes": ["x", "y"]})))
    assert ledger.announced_blocks == 2 and ledger.counters.other_chain == 0
    ledger.fold(batch_of(open_batch({"block_hashes": ["a"], "token_ids": [1, 2, 3, 4]})))
    assert ledger.announced_blocks == 1 and ledger.counters.other_chain == 2
    ledger.fold(batch_of(open_batch({"block_hashes": ["z"]})))
    assert ledger.announced_blocks == 1 and ledger.counters.other_chain == 3


def test_reading_a_block_in_hbm_costs_less_than_computing_it() -> None:
    cost = QuillcacheProfile()
    assert cost.transfer_us(4 << 20, Tier.HBM) < cost.prefill_us(64)
