import pytest

from kvatlas.blocks.hashing import HASH_BYTES, extend_chain
from kvatlas.errors import InvalidValue
from kvatlas_publishers.block_recorder import NAMESPACE_BYTES, block_names

TOKENS = list(range(64))


def test_a_name_ends_in_the_sequence_hash_of_its_block() -> None:
    names = block_names(TOKENS, 16)
    assert b"".join(bytes(name)[NAMESPACE_BYTES:] for name in names if isinstance(name, bytes)) == extend_chain(
        TOKENS, 16
    )
    assert {len(name) for name in names if isinstance(name, bytes)} == {NAMESPACE_BYTES + HASH_BYTES}


def test_a_partial_last_block_has_no_name() -> None:
    assert block_names(TOKENS[:40], 16) == block_names(TOKENS[:32], 16)


def test_a_chain_goes_on_from_its_parent() -> None:
    names = block_names(TOKENS, 16, adapter="lora", salt="pepper")
    assert block_names(TOKENS[32:], 16, names[1], adapter="lora", salt="pepper") == names[2:]


@pytest.mark.parametrize("parent", [7, b"short", block_names(TOKENS, 16, adapter="other")[0]])
def test_a_parent_without_a_name_of_the_same_adapter_and_salt_is_refused(parent: int | bytes) -> None:
    with pytest.raises(InvalidValue, match="parent"):
        block_names(TOKENS, 16, parent)
