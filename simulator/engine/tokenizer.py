"""Text for an engine without a model: a byte tokenizer, and synthetic output tokens.

A text's token ids are its UTF-8 bytes, 0 to 255. Generated ids are 256 and above and decode to ` t<id>`, so prompts and
answers can't be confused. `TextAnswer` is the exception: its tokens are characters, like those of a text.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Protocol

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


class Answer(Protocol):
    """The tokens of an endless answer, asked for one after another."""

    def __getitem__(self, index: int) -> int: ...


class AnswerTokens:
    """The endless answer to one prompt: pseudo-random, and the same on every engine that serves the same model.

    It depends only on model, adapter, prompt tokens and choice, so runs of one workload are comparable under any routing.
    """

    def __init__(self, model: str, prompt: Sequence[int], choice: int, vocab_size: int) -> None:
        prefix = f"{model}\0{choice}\0".encode()
        self._seed = xxhash.xxh3_64_intdigest(prefix + struct.pack(f"<{len(prompt)}I", *prompt))
        self._range = vocab_size - BYTE_TOKENS

    def __getitem__(self, index: int) -> int:
        return BYTE_TOKENS + xxhash.xxh3_64_intdigest(struct.pack("<Q", index), seed=self._seed) % self._range


_LETTERS = b'etaoinshrdlucmfwypvbgk,.\n"\\' + 5 * b" "


class TextAnswer:
    """An endless answer in text, whose next character depends on its seed and on all text before it: the prompt's and its
    own. So another engine that is given the prompt and a part of the answer, as token ids or as text, continues with the
    same text."""

    def __init__(self, model: str, prompt: Sequence[int], seed: int) -> None:
        self._text = xxhash.xxh3_64(f"{model}\0{seed}\0".encode())
        self._text.update(decode(prompt).encode())
        self._tokens: list[int] = []

    def __getitem__(self, index: int) -> int:
        while len(self._tokens) <= index:
            letter = _LETTERS[self._text.intdigest() % len(_LETTERS)]
            self._text.update(bytes((letter,)))
            self._tokens.append(letter)
        return self._tokens[index]
