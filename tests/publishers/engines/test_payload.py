"""Properties of the engines' wire formats."""

import hashlib
import struct
from typing import Any

import msgpack
import pytest

from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.blocks.tiers import Tier
from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas_publishers.engine_events import EngineCleared, EngineDropped, EngineRemoved, EngineStored
from kvatlas_publishers.engines import decode_batch, vllm
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from tests.publishers.engines.event_batches import BOTH, batch, only, stored


@pytest.mark.parametrize("kind", BOTH)
def test_a_batch_has_its_time_and_rank(kind: EngineKind) -> None:
    decoded = batch(["AllBlocksCleared"], kind=kind, rank=3)
    assert (decoded.ts, decoded.dp_rank) == (12.5, 3)


@pytest.mark.parametrize("kind", BOTH)
def test_the_rank_may_be_missing_and_more_fields_may_follow(kind: EngineKind) -> None:
    assert decode_batch(kind, msgpack.packb([1, []])).dp_rank is None
    assert decode_batch(kind, msgpack.packb([1, [], None, "more"])).dp_rank is None


def test_the_outer_batch_may_be_a_map() -> None:
    payload = msgpack.packb({"ts": 1.0, "events": [["AllBlocksCleared"]], "data_parallel_rank": 1})
    decoded = decode_batch(EngineKind.VLLM, payload)
    assert decoded.events == [EngineCleared()] and decoded.dp_rank == 1


def test_an_array_event_of_vllm_0_9_has_no_medium() -> None:
    event = only(["BlockStored", [1, 2], 9, [1, 2, 3, 4], 2, None])
    assert event == EngineStored([1, 2], 9, [1, 2, 3, 4], 2, Tier.HBM, untold_keys=vllm.UNTOLD_KEYS)
    assert only(["BlockRemoved", [1]]) == EngineRemoved([1], Tier.HBM)


def test_an_array_event_of_vllm_0_23_has_all_its_fields() -> None:
    keys = [["lora-a"], ["lora-a", ["img", -4]]]
    event = only(
        [
            "BlockStored",
            [1, 2],
            9,
            [1, 2, 3, 4],
            2,
            1,
            "CPU",
            "lora-a",
            keys,
            3,
            "sliding_window",
            128,
            "LOCAL",
            "own",
            1,
        ]
    )
    expected = EngineStored(
        [1, 2],
        9,
        [1, 2, 3, 4],
        2,
        Tier.CPU_DRAM,
        3,
        "lora-a",
        None,
        [None, [["img", -4]]],
        AttentionKind.SLIDING_WINDOW,
        128,
        offloaded=True,
    )
    assert event == expected
    assert only(["BlockRemoved", [1], "CPU", 3, "LOCAL", "own", "more"]) == EngineRemoved([1], Tier.CPU_DRAM, 3)


def test_a_map_event_leaves_defaults_out_and_may_have_more_fields() -> None:
    event = only(stored(parent_block_hash=9, session_id="s", lookahead_token_ids=[[3], [5]], ownership="x"))
    assert event == EngineStored([1, 2], 9, [1, 2, 3, 4], 2, lookahead_tokens=1, lookahead=(5,))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (EngineKind.VLLM, [b"\x01" * 32, b"\x02" * 32]),
        (EngineKind.VLLM, [2**64 - 1, 0]),
        (EngineKind.SGLANG, [-(2**63), 5]),
    ],
)
def test_hashes_are_taken_as_they_come(kind: EngineKind, names: list[Any]) -> None:
    assert only(stored(block_hashes=names, parent_block_hash=names[0]), kind=kind).hashes == names


@pytest.mark.parametrize(
    ("spec_kind", "group", "kind"),
    [
        ("full_attention", 1, AttentionKind.FULL),
        ("mla_attention", 0, AttentionKind.MLA),
        ("sink_full_attention", 2, AttentionKind.SINK),
        ("sliding_window", 0, AttentionKind.SLIDING_WINDOW),
        ("sliding_window_mla", 1, AttentionKind.SLIDING_WINDOW_MLA),
        ("mamba", 0, AttentionKind.MAMBA),
        ("chunked_local_attention", 0, AttentionKind.CHUNKED_LOCAL),
        ("encoder_only_attention", 0, AttentionKind.OTHER),
        ("cross_attention", 0, AttentionKind.OTHER),
        ("unknown", 0, AttentionKind.OTHER),
        (None, 0, None),
        (None, None, None),
    ],
)
def test_an_event_tells_its_groups_kind(spec_kind: str | None, group: int | None, kind: AttentionKind | None) -> None:
    event = only(stored(group_idx=group, kv_cache_spec_kind=spec_kind, kv_cache_spec_sliding_window=128))
    assert (event.kind, event.window_tokens, event.group) == (kind, 128, group or 0)


def test_an_event_tells_how_far_a_hash_looks_ahead() -> None:
    assert only(stored(lookahead_token_ids=[[3], [5]])).lookahead == (5,)
    assert only(stored(lookahead_token_ids=None)).lookahead_tokens == 0
    assert "of one length" in batch(stored(lookahead_token_ids=[[5], []])).skipped[0]
    decoded = batch(stored(lookahead_token_ids=5), stored(kv_cache_spec_sliding_window="wide"))
    assert ["lookahead_token_ids 5" in decoded.skipped[0], "sliding_window 'wide'" in decoded.skipped[1]] == [True] * 2


@pytest.mark.parametrize(
    ("kind", "medium", "tier"),
    [
        (EngineKind.VLLM, None, Tier.HBM),
        (EngineKind.VLLM, "GPU", Tier.HBM),
        (EngineKind.VLLM, "CPU", Tier.CPU_DRAM),
        (EngineKind.VLLM, "STORAGE", Tier.OBJECT_STORE),
        (EngineKind.VLLM, "FS", Tier.LOCAL_SSD),
        (EngineKind.VLLM, "OBJ", Tier.OBJECT_STORE),
        (EngineKind.SGLANG, "GPU", Tier.HBM),
        (EngineKind.SGLANG, "CPU_PINNED", Tier.CPU_DRAM),
        (EngineKind.SGLANG, "DISK", Tier.LOCAL_SSD),
        (EngineKind.SGLANG, "EXTERNAL", Tier.OBJECT_STORE),
    ],
)
def test_media_are_tiers(kind: EngineKind, medium: str | None, tier: Tier) -> None:
    assert only(stored(medium=medium), kind=kind).tier is tier
    assert only({"type": "BlockRemoved", "block_hashes": [1], "medium": medium}, kind=kind).tier is tier


@pytest.mark.parametrize(
    ("medium", "tier"), [("GPU", Tier.REMOTE_HBM), ("FS", Tier.OBJECT_STORE), ("OBJ", Tier.OBJECT_STORE)]
)
def test_a_remote_copy_is_not_in_the_workers_own_memory(medium: str, tier: Tier) -> None:
    assert only(stored(medium=medium, locality="REMOTE")).tier is tier


def test_an_event_of_an_unknown_tier_is_skipped_by_name_and_the_rest_is_taken() -> None:
    decoded = batch(
        stored(medium="TAPE"),
        stored(medium="CPU", locality="REMOTE"),
        stored(locality="MOON"),
        stored(block_hashes=[7, 8]),
    )
    assert [event.hashes for event in decoded.events] == [[7, 8]]
    assert decoded.skipped[0].startswith("unknown tier 'TAPE'")
    assert "remote cpu_dram" in decoded.skipped[1] and "'MOON'" in decoded.skipped[2]


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.SGLANG])
@pytest.mark.parametrize("medium", [{}, [], 1, b"GPU"])
def test_an_event_whose_medium_is_no_text_is_skipped(kind: EngineKind, medium: object) -> None:
    decoded = batch(stored(medium=medium), stored(block_hashes=[7, 8]), kind=kind)
    assert [event.hashes for event in decoded.events] == [[7, 8]] and len(decoded.skipped) == 1


def test_vllm_clears_the_device_tier_and_sglang_all_tiers() -> None:
    assert only({"type": "AllBlocksCleared"}) == EngineCleared((Tier.HBM, Tier.CPU_DRAM))
    assert set(only({"type": "AllBlocksCleared"}, kind=EngineKind.SGLANG).tiers) == set(Tier)


def test_an_offload_placeholder_has_no_tokens() -> None:
    event = only(stored(token_ids=[], block_size=0, medium="CPU"))
    assert event.token_ids == [] and event.tier is Tier.CPU_DRAM


def test_eagle_pairs_become_the_prompts_own_tokens_and_the_one_behind_them() -> None:
    pairs = [[10, 11], [11, 12], [12, 13], [13, 14]]
    event = only(stored(token_ids=pairs), kind=EngineKind.SGLANG)
    assert (event.token_ids, event.lookahead_tokens, list(event.lookahead)) == ([10, 11, 12, 13], 1, [14])


def test_pairs_that_do_not_follow_each_other_are_refused() -> None:
    skipped = batch(stored(token_ids=[[10, 11], [12, 13], [13, 14], [14, 15]]), kind=EngineKind.SGLANG).skipped
    assert "don't overlap" in skipped[0]


def sglang_page(hash_of_page: int, parent: int | None = None, *more: Any) -> list[Any]:
    return ["BlockStored", [hash_of_page], parent, [1, 2, 3, 4], 4, None, *more]


def test_sglang_before_0_5_6_is_recognised_by_the_hashes_of_its_roots() -> None:
    digest = hashlib.sha256(struct.pack("<4I", 1, 2, 3, 4)).digest()
    chained = int.from_bytes(digest[:8], "big", signed=True)
    no_page = hash(())

    def located(*fields: Any) -> bool:
        return bool(only(sglang_page(*fields), kind=EngineKind.SGLANG).located)

    assert located(chained) and located(7, chained)
    assert not located(hash((1, 2, 3, 4))) and not located(7, no_page)
    assert located(7, None, "GPU"), "0.5.9 and later name a medium"


def test_sglang_0_5_18_has_the_salt_in_the_metadata() -> None:
    event = only(sglang_page(7, None, "GPU", {"cache_salt": "acme"}), kind=EngineKind.SGLANG)
    assert event.salt == "acme"


def test_what_events_do_not_show_is_named() -> None:
    assert "extra keys" in only(stored(), kind=EngineKind.SGLANG).untold_keys
    assert "before 0.17" in only(["BlockStored", [7], None, [1, 2, 3, 4], 4, None, "GPU", None]).untold_keys
    assert not only(["BlockStored", [7], None, [1, 2, 3, 4], 4, None, "GPU", None, None]).untold_keys
    assert not only(stored()).untold_keys


def test_sglang_has_the_salt_in_every_event() -> None:
    event = only(stored(parent_block_hash=5, cache_salt="acme", lora_name="l"), kind=EngineKind.SGLANG)
    assert (event.salt, event.adapter) == ("acme", "l")


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        ({"lora_id": None}, None),
        ({"lora_id": 4}, "4"),
        ({"lora_id": 4, "lora_name": "sql"}, "sql"),
        ({"lora_id": "uid", "lora_name": ""}, "uid"),
    ],
)
@pytest.mark.parametrize("kind", BOTH)
def test_the_adapter_is_the_name_or_else_the_id(kind: EngineKind, fields: dict[str, Any], adapter: str | None) -> None:
    assert only(stored(**fields), kind=kind).adapter == adapter


@pytest.mark.parametrize(
    ("keys", "parent", "lora", "canonical", "salt"),
    [
        ([None, None], None, None, None, None),
        ([["acme"], None], None, None, None, "acme"),
        ([["l"], ["l"]], None, "l", None, None),
        ([["l", "acme"], ["l"]], None, "l", None, "acme"),
        (
            [["l", ["img", 3], "acme", b"\x01"], ["l", ["img", 1]]],
            None,
            "l",
            [[["img", 3], b"\x01"], [["img", 1]]],
            "acme",
        ),
        ([["img"], None], 9, None, [["img"], None], None),
        ([["img", "acme"], ["img"]], None, None, [["img"], ["img"]], "acme"),
    ],
)
def test_canonical_extra_keys_have_no_lora_and_no_salt(
    keys: list[Any], parent: int | None, lora: str | None, canonical: list[Any] | None, salt: str | None
) -> None:
    event = only(stored(extra_keys=keys, parent_block_hash=parent, lora_name=lora))
    assert (event.extra_keys, event.salt) == (canonical, salt)


IMAGE = "9f" * 32


@pytest.mark.parametrize(
    ("keys", "canonical", "salt"),
    [
        ([[IMAGE]], [[IMAGE]], None),
        ([["l", f"l:{IMAGE}"]], [[f"l:{IMAGE}"]], None),
        ([[IMAGE, "acme"]], [[IMAGE]], "acme"),
        ([["acme"]], None, "acme"),
    ],
)
def test_an_image_alone_in_a_first_block_is_no_salt_where_events_are_arrays(
    keys: list[Any], canonical: list[Any] | None, salt: str | None
) -> None:
    event = only(["BlockStored", [1], None, [1, 2], 2, None, "GPU", "l" if keys[0][0] == "l" else None, keys])
    assert (event.extra_keys, event.salt) == (canonical, salt)


def test_an_image_alone_makes_no_tenant() -> None:
    ledger = Ledger(LedgerSettings("m", "t", salt_is_tenant=True))
    ledger.fold(batch(["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, [[IMAGE]]]))
    assert [use.scope for use in ledger.uses.values()] == [Scope("m", "t")] and ledger.announced_blocks == 1


def test_where_images_have_offsets_a_text_of_any_form_is_a_salt() -> None:
    event = only(stored(extra_keys=[[[IMAGE, 0], IMAGE], None]))
    assert (event.extra_keys, event.salt) == ([[[IMAGE, 0]], None], IMAGE)


def test_keys_that_say_what_they_are_are_the_same_as_those_that_do_not() -> None:
    tagged = [["lora", "l", "/path"], ["mm", IMAGE, 3], ["cache_salt", "acme"], ["prompt_embeds", b"\x01"]]
    event = only(stored(extra_keys=[tagged, [["lora", "l", "/path"]]], lora_name="l"))
    assert (event.extra_keys, event.salt) == ([[[IMAGE, 3], b"\x01"], None], "acme")


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("fields", "named"), [({"lora_id": 4}, False), ({"lora_id": 4, "lora_name": "sql"}, True), ({}, True)]
)
def test_an_adapters_id_is_not_its_name(kind: EngineKind, fields: dict[str, Any], named: bool) -> None:
    assert only(stored(**fields), kind=kind).adapter_named is named


REMAINING = bytes.fromhex(
    "93cb3ff80000000000009185a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573930b0c0da66d656469756da3"
    "475055a967726f75705f69647800b572656d61696e696e675f636f70795f636f756e74739301000000"
)
"""As proposed for versions of vLLM after 0.33: one copy of the first block is left."""


def test_a_removal_with_counts_takes_only_blocks_of_which_no_copy_is_left() -> None:
    decoded = decode_batch(EngineKind.VLLM, REMAINING)
    assert decoded.events == [EngineRemoved([12, 13], last=True)]


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_the_last_copy_takes_the_block_whatever_was_counted(copies: int) -> None:
    ledger = Ledger(LedgerSettings("m", "m", block_size=2))
    for _ in range(copies):
        ledger.fold(batch(stored()))
    for left in range(copies - 1, -1, -1):
        removed = {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU", "remaining_copy_counts": [left]}
        ledger.fold(batch(removed))
        assert ledger.digest.blocks == (2 if left else 1)
    ledger.fold(batch(stored()))
    assert ledger.digest.blocks == 2


@pytest.mark.parametrize("counts", [[1, 0], "x", [-1], [None]])
def test_counts_that_fit_no_hashes_drop_the_blocks_named(counts: Any) -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU", "remaining_copy_counts": counts}
    decoded = batch(removed)
    assert (decoded.events, decoded.lost, len(decoded.skipped)) == ([EngineDropped([2], None)], False, 1)


def test_a_version_that_tells_removals_with_the_last_copy_only_is_read_with_set_semantics() -> None:
    ledger = Ledger(LedgerSettings("m", "m", block_size=2, set_semantics=True))
    for _ in range(3):
        ledger.fold(batch(stored()))
    ledger.fold(batch({"type": "BlockRemoved", "block_hashes": [2, 1], "medium": "GPU"}))
    assert ledger.digest.blocks == 0
