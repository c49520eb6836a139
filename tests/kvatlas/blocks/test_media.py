"""The images that touch each block."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.media import MediaItem, media_keys
from kvatlas.errors import InvalidValue


@st.composite
def items_in_order(draw: st.DrawFn) -> list[MediaItem]:
    items, at = [], 0
    for name in draw(st.lists(st.sampled_from("abc"), max_size=5)):
        at += draw(st.integers(0, 20))
        length = draw(st.integers(1, 30))
        items.append(MediaItem(name, at, length))
        at += length
    return items


@given(items_in_order(), st.integers(1, 9), st.integers(0, 30), st.integers(0, 3))
def test_a_block_has_the_items_in_it_and_in_the_tokens_that_its_hash_covers(
    items: list[MediaItem], size: int, blocks: int, lookahead: int
) -> None:
    expected = []
    for start in range(0, blocks * size, size):
        covered = range(start, start + size + lookahead)
        inside = [item for item in items if any(item.offset <= at < item.offset + item.length for at in covered)]
        expected.append([[item.id, item.offset - start] for item in inside] or None)
    assert media_keys(items, size, blocks, lookahead) == expected


def test_an_item_of_any_length_costs_no_more_than_the_prompts_blocks() -> None:
    assert media_keys([MediaItem("a", 3, 1 << 60)], 4, 2) == [[["a", 3]], [["a", -1]]]


@pytest.mark.parametrize("fields", [("a", -1, 2), ("a", 0, 0), ("a", 1.5, 2), ("a", 0, True), ("", 0, 1), (7, 0, 1)])
def test_an_item_that_stands_nowhere_is_refused_in_one_line(fields: tuple[object, ...]) -> None:
    with pytest.raises(InvalidValue) as error:
        MediaItem(*fields)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
