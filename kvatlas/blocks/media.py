"""Images, audio and video in a prompt: the items that touch each block, in the form that engines hash
(`kvatlas.blocks.hashing`).

vLLM (0.24 to 0.33): a block's key contains `[id, offset]` for each item with placeholder tokens in the block or in the
lookahead tokens after it. The offset is the position of the item minus that of the block's first token
(`kv_cache_utils._gen_mm_extra_hash_keys`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from kvatlas.blocks.hashing import ExtraKeys
from kvatlas.errors import InvalidValue
from kvatlas.validation import Count, Positive


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One item of a prompt. `id`: what the engine hashes (vLLM: the item's content hash, or the name that the request gives
    it); `offset`, `length`: where its placeholder begins and how long it is, in tokens. Raises InvalidValue for an item that
    can't be part of a prompt."""

    id: Annotated[str, Field(min_length=1)]
    offset: Count
    length: Positive

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise InvalidValue(f"media item {self.id!r:.80}; expected the engine's name for it")
        for what, number, least in (("offset", self.offset, 0), ("length", self.length, 1)):
            if type(number) is not int or number < least:
                raise InvalidValue(f"media item with {what} {number!r:.20}; expected at least {least} tokens")


def media_keys(items: Sequence[MediaItem], block_size: int, blocks: int, lookahead_tokens: int = 0) -> list[ExtraKeys]:
    """What the items contribute to the extra keys of each of a prompt's first `blocks` blocks."""
    keys: list[ExtraKeys] = [None] * blocks
    for item in sorted(items, key=lambda item: item.offset):
        first = max(0, (item.offset - lookahead_tokens) // block_size)
        last = min(blocks - 1, (item.offset + item.length - 1) // block_size)
        for i in range(first, last + 1):
            keys[i] = [*(keys[i] or ()), [item.id, item.offset - i * block_size]]
    return keys
