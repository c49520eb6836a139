"""Text for an engine without a model: a byte tokenizer, and synthetic output tokens.

A text's token ids are its UTF-8 bytes, 0 to 255. Generated ids are 256 and above and decode to ` t<id>`, so prompts and
answers can't be confused.
"""

import struct
from collections.abc import Iterable, Sequence

import xxhash

BYTE_TOKENS = 256


def encode(text: str) -> list[int]:
    """The token ids of a text."""
    return list(text.encode())


def decode(token_ids: Iterable[int]) -> str:
    """The text of token ids; invalid UTF-8 becomes replacement characters."""
    out = bytearray()
    for token in token_ids:
        if token < BYTE_TOKENS:
            out.append(token)
        else:
            out += f" t{token}".encode()
    return out.decode(errors="replace")


class AnswerTokens:
    """The endless answer to one prompt: pseudo-random, and equal on every engine that serves the same model.

    It depends only on model, adapter, prompt tokens and choice, so runs of one workload are comparable under any routing.
    """

    def __init__(self, model: str, prompt: Sequence[int], choice: int, vocab_size: int) -> None:
        prefix = f"{model}\0{choice}\0".encode()
        self._seed = xxhash.xxh3_64_intdigest(prefix + struct.pack(f"<{len(prompt)}I", *prompt))
        self._range = vocab_size - BYTE_TOKENS

    def __getitem__(self, index: int) -> int:
        return BYTE_TOKENS + xxhash.xxh3_64_intdigest(struct.pack("<Q", index), seed=self._seed) % self._range
