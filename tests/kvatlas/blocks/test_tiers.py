"""Tiers and their aliases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.tiers import TIER_MASK, Tier, are_tiers, parse_tier, tiers_of
from kvatlas.errors import InvalidValue

ALIASES = {
    Tier.HBM: "hbm gpu gpu_memory vram",
    Tier.REMOTE_HBM: "remote_hbm remote_gpu remote_gpu_memory",
    Tier.CPU_DRAM: "cpu_dram cpu dram host host_memory cpu_pinned",
    Tier.LOCAL_SSD: "local_ssd ssd nvme disk",
    Tier.OBJECT_STORE: "object_store storage object s3 blob external",
}


@pytest.mark.parametrize(("tier", "alias"), [(t, a) for t, names in ALIASES.items() for a in names.split()])
def test_every_alias_is_parsed_in_any_spelling(tier: Tier, alias: str) -> None:
    for spelled in (alias, alias.upper(), alias.replace("_", "-"), f" {alias.title()} "):
        assert parse_tier(spelled) is tier


@pytest.mark.parametrize("engine", [("GPU", Tier.HBM), ("CPU", Tier.CPU_DRAM), ("STORAGE", Tier.OBJECT_STORE)])
def test_the_media_of_engines_are_parsed(engine: tuple[str, Tier]) -> None:
    assert parse_tier(engine[0]) is engine[1]


@pytest.mark.parametrize("engine", ["CPU_PINNED", "DISK", "EXTERNAL", "FS", "OBJ"])
def test_every_medium_that_engines_send_is_known(engine: str) -> None:
    parse_tier(engine)


@pytest.mark.parametrize("name", ["", "tape", "hbm2", "gpu 0", None, 3, b"gpu"])
def test_the_error_names_an_unknown_tier_and_what_was_expected(name: str) -> None:
    with pytest.raises(InvalidValue, match="unknown tier") as caught:
        parse_tier(name)
    assert repr(name) in str(caught.value)
    assert "cpu_dram" in str(caught.value)


@given(st.sets(st.sampled_from(Tier)), st.integers(0, 7).map(lambda bits: bits << len(Tier)))
def test_the_tiers_in_flags_come_nearest_first(tiers: set[Tier], others: int) -> None:
    flags = sum(tier.flag for tier in tiers) | others
    assert list(tiers_of(flags)) == sorted(tiers)
    assert are_tiers(flags) == (bool(tiers) and not others)


def test_three_bits_are_left() -> None:
    assert TIER_MASK == 0b11111
