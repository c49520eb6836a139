"""Keys of blocks that an engine names itself."""

import re
from pathlib import Path
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvatlas.blocks.external_chain import MAX_HASH, external_chain, hash_text
from kvatlas.blocks.hashing import unpack_hashes
from kvatlas.errors import InvalidValue
from kvatlas.identity import OWN_CHAIN, Scope, scope_from_canonical

NAMES = st.lists(st.text(min_size=1, max_size=20), max_size=12)


def by_definition(names: list[str], root: str) -> list[int]:
    above, keys = xxh3_64_intdigest(root.encode(), 1337), []
    for name in names:
        above = xxh3_64_intdigest(pack("<QQ", above, xxh3_64_intdigest(name.encode(), 1337)), 1337)
        keys.append(above)
    return keys


@given(NAMES, st.text(min_size=1, max_size=9))
def test_a_key_stands_for_a_block_and_all_before_it(names: list[str], root: str) -> None:
    assert unpack_hashes(external_chain(names, root)) == by_definition(names, root)
    assert external_chain(names[:5], root) == external_chain(names, root)[: 8 * len(names[:5])]


def test_published_check_values() -> None:
    page = (Path(__file__).parents[3] / "docs" / "events.md").read_text()
    assert re.findall(r"`a` then `b` has the keys\s+`(\w+)` and `(\w+)`", page) == [tuple(CHECK_VALUES)]
    assert [hash_text(key) for key in unpack_hashes(external_chain(["a", "b"]))] == CHECK_VALUES
    assert external_chain(["a"], "root") == external_chain(["a"]) != external_chain(["a"], "session-1")


CHECK_VALUES = ["304c09be37a6f566", "b6283b6938cd44ea"]


def test_an_integer_is_the_text_of_its_64_bits() -> None:
    assert hash_text(-1) == hash_text(MAX_HASH) == "f" * 16
    assert hash_text(255) == "00000000000000ff"


def test_the_chain_is_part_of_a_scope_and_the_own_one_changes_no_id() -> None:
    own, external = Scope("m", "t"), Scope("m", "t", chain="external:x")
    assert own.scope_id == Scope("m", "t", chain=OWN_CHAIN).scope_id != external.scope_id
    assert own.canonical == b"\x94\xa1m\xa1t\xc0\xa7default"
    assert [scope_from_canonical(one.canonical) for one in (own, external)] == [own, external]
    assert own.pool_id == external.pool_id
    assert str(external) == "m/t/-/default/external:x"


@pytest.mark.parametrize("chain", ["", "external", "external:", "vllm", f"external:{'x' * 512}"])
def test_other_names_of_chains_are_refused(chain: str) -> None:
    with pytest.raises(InvalidValue, match="expected own, or external:NAME"):
        Scope("m", "t", chain=chain)
