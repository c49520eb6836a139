"""A Hugging Face tokenizer and its chat template, in this process (extra `tokenizer`).

For a growing conversation, only the new part costs time. Tokenizers first cut a text at special tokens, so the text is encoded
in pieces that begin at special tokens, and the token ids of recent pieces are cached.
"""

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Self

import tokenizers

from kvatlas.errors import SettingsError
from kvatlas_router.tokens.chat_form import as_chat
from kvatlas_router.tokens.chat_template import ChatTemplate
from kvatlas_router.tokens.text_request import TextRequest
from kvatlas_router.tokens.tokenizer import CannotTokenize, PromptTokens, Why

MEMO_BYTES = 64 << 20
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class LocalTokenizer:
    """Makes token ids as vLLM and SGLang do: completions get special tokens; chats get only those in their template.

    `prompt_tokens` is a plain thread-safe function: `ThreadedTokenizer(local.prompt_tokens)`. `memo_bytes` bounds the cached
    pieces (text and token ids).
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None = None, *, memo_bytes: int = MEMO_BYTES
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.memo = PieceMemo(memo_bytes)
        self._tokenizer = tokenizer
        self._template = template
        self._cut = _cut_points(tokenizer.get_added_tokens_decoder().values())

    @classmethod
    def from_folder(cls, folder: str | Path, *, memo_bytes: int = MEMO_BYTES) -> Self:
        """Read a model's folder: `tokenizer.json`, and the template in `chat_template.jinja` or `tokenizer_config.json`.

        Raises SettingsError, whose message names the file.
        """
        root = Path(folder)
        path = root if root.suffix == ".json" else root / "tokenizer.json"
        if not path.is_file():
            raise SettingsError(f"tokenizer {path}: no such file; expected a folder with a tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_str(path.read_text())
        except Exception as error:  # the library has no exception class of its own
            raise SettingsError(f"tokenizer {path}: {error}") from error
        return cls(tokenizer, _load_template(path.parent), memo_bytes=memo_bytes)

    def encode(self, request: TextRequest) -> Sequence[int]:
        """Encode a request. Raises CannotTokenize (unsupported) for content other than text, and for a chat without a
        template."""
        tokens = self.prompt_tokens(request)
        if tokens.cut:
            raise CannotTokenize(Why.UNSUPPORTED, "a message has images or other media; expected text")
        return tokens.ids

    def prompt_tokens(self, request: TextRequest) -> PromptTokens:
        """Like `encode`; for a chat with images, returns the token ids of the text before the first image."""
        asked = request.body.get("add_special_tokens")
        if not request.api.is_conversation:
            prompt = request.prompt
            if (added := request.adds_to_prompt) is not None:
                raise CannotTokenize(Why.UNSUPPORTED, f"{added}: the tokens don't follow from a text")
            if not isinstance(prompt, str):
                return PromptTokens(array("I", prompt))
            return PromptTokens(self._encode(prompt, special=asked is not False))
        if self._template is None:
            raise CannotTokenize(Why.UNSUPPORTED, "the tokenizer has no chat template")
        tokens = self._encode(self._template.render(as_chat(request)), special=asked is True)
        return PromptTokens(tokens, cut=request.media_items > 0)

    def _encode(self, text: str, *, special: bool) -> Sequence[int]:
        if special or self._cut is None:
            return array("I", self._tokenizer.encode(text, add_special_tokens=special).ids)
        starts = sorted({0, *(found.start() for found in self._cut.finditer(text))})
        pieces = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
        known = {piece: self.memo.get(piece) for piece in dict.fromkeys(pieces)}
        missing = [piece for piece, ids in known.items() if ids is None]
        if missing:
            for piece, encoding in zip(
                missing, self._tokenizer.encode_batch_fast(missing, add_special_tokens=False), strict=True
            ):
                known[piece] = ids = array("I", encoding.ids)
                self.memo.add(piece, ids)
        whole = array("I")
        for piece in pieces:
            whole.extend(known[piece] or ())
        return whole


class PieceMemo:
    """An LRU cache that maps pieces of text to token ids. `hits` and `misses` count pieces."""

    def __init__(self, most_bytes: int) -> None:
        self.hits = 0
        self.misses = 0
        self._most_bytes = most_bytes
        self._bytes = 0
        self._pieces: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = Lock()

    def get(self, piece: str) -> "array[int] | None":
        with self._lock:
            if (ids := self._pieces.get(piece)) is None:
                self.misses += 1
                return None
            self._pieces.move_to_end(piece)
            self.hits += 1
            return ids

    def add(self, piece: str, ids: "array[int]") -> None:
        """Keep a piece, unless it would take up more than a quarter of the space."""
        size = _bytes(piece, ids)
        if size > self._most_bytes // 4:
            return
        with self._lock:
            if piece in self._pieces:
                return
            self._pieces[piece] = ids
            self._bytes += size
            while self._bytes > self._most_bytes:
                self._bytes -= _bytes(*self._pieces.popitem(last=False))

    @property
    def bytes(self) -> int:
        return self._bytes


def _bytes(piece: str, ids: "array[int]") -> int:
    return 256 + len(piece) + 4 * len(ids)


def _cut_points(added: Iterable[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """Matches the special tokens before which a text may be cut without changing its token ids.

    It excludes tokens that strip white space to their left, need a word boundary, are found only in normalized text, or may
    begin inside another token.
    """
    tokens = list(added)
    names = [token.content for token in tokens]
    safe = [
        token.content
        for token in tokens
        if not (token.lstrip or token.single_word or token.normalized)
        and not any(_begins_inside(token.content, other) for other in names if other != token.content)
    ]
    return re.compile(_alternatives(safe)) if safe else None


def _alternatives(texts: Iterable[str]) -> str:
    """A pattern that matches the longest of these texts. Common beginnings are written once, as in a trie: models have a
    thousand special tokens, and a pattern that tries each of them takes 70 times as long."""
    by_letter: dict[str, list[str]] = {}
    ends = False
    for text in texts:
        if text:
            by_letter.setdefault(text[0], []).append(text[1:])
        else:
            ends = True
    branches = []
    for letter, rests in by_letter.items():
        first, last = min(rests), max(rests)
        common = next((first[:at] for at in range(len(first)) if first[at] != last[at : at + 1]), first)
        branches.append(re.escape(letter + common) + _alternatives(rest[len(common) :] for rest in rests))
    if not branches:
        return ""
    return branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)}){'?' if ends else ''}"


def _begins_inside(token: str, other: str) -> bool:
    """True if `token` may begin inside an occurrence of `other`, after its first character."""
    return token in other[1:] or any(token.startswith(other[at:]) for at in range(1, len(other)))


def _load_template(folder: Path) -> ChatTemplate | None:
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = {}
    try:
        if path.is_file():
            config = json.loads(path.read_text())
        templates = _templates(config.get("chat_template"))
        own = folder / "chat_template.jinja"
        if own.is_file():
            path = own
            templates["default"] = own.read_text()
    except (OSError, ValueError) as error:
        raise SettingsError(f"tokenizer {path}: {error}") from error
    if not templates:
        return None
    special = {name: _content(config[name]) for name in _SPECIAL if config.get(name)}
    try:
        return ChatTemplate(templates, special)
    except SettingsError as error:
        raise SettingsError(f"tokenizer {path}: {error}") from error


def _templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    return {one["name"]: one["template"] for one in value or ()}


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
