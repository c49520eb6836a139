"""The part of an answer that a client has, in the pieces that engines sent."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

MOST_PARTS = 256
"""Older parts are merged into one part, because the seam is rarely far from the end."""


@dataclass(frozen=True, slots=True)
class Part:
    """`tokens`, `ids`: how many of each the answer has up to the end of this part."""

    text: str
    tokens: int
    ids: int


class SentAnswer:
    """`letters`: length of the parts' text. `ahead`: text that the client has after the parts and that the current
    engine has not repeated yet; `silent`: number of tokens after that which have no text yet, since a character may take
    several. `finished_at`: number of parts up to the last token; 0 until that token has been generated."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.ids = array("q")
        self.letters = 0
        self.ahead = ""
        self.silent = 0
        self.finished_at = 0

    @property
    def text(self) -> str:
        """All text that the client has."""
        return self.text_of(len(self.parts)) + self.ahead

    def text_of(self, parts: int) -> str:
        """The text of the first parts."""
        return "".join(part.text for part in self.parts[:parts])

    def ids_of(self, parts: int) -> list[int]:
        """The token ids of the first parts."""
        return self.ids[: self.end_of(parts).ids].tolist()

    def end_of(self, parts: int) -> Part:
        """The last of the first parts; an empty one if there is none."""
        return self.parts[parts - 1] if parts else Part("", 0, 0)

    def add(self, text: str, tokens: int, ids: Sequence[int], *, last: bool) -> None:
        """Add a part. `tokens`: how many the answer has up to the part's end. `last`: no token follows."""
        self.ids.extend(ids)
        self.letters += len(text)
        self.parts.append(Part(text, tokens, len(self.ids)))
        if last:
            self.finished_at = len(self.parts)
        if len(self.parts) > MOST_PARTS:
            self._merge(MOST_PARTS // 2)

    def _merge(self, number: int) -> None:
        end = self.end_of(number)
        self.parts[:number] = [Part(self.text_of(number), end.tokens, end.ids)]
        self.finished_at = max(0, self.finished_at - number + 1)

    def repeat_from(self, parts: int) -> None:
        """From here on, an engine repeats what the client has."""
        text, repeated = self.text, self.parts[parts:]
        while not self.ahead and repeated and not repeated[-1].text:
            repeated.pop()
            self.silent += 1
        del self.parts[parts:]
        del self.ids[self.end_of(parts).ids :]
        self.letters = len(self.text_of(parts))
        self.ahead = text[self.letters :]

    def clear(self) -> None:
        """Forget the answer."""
        self.parts.clear()
        del self.ids[:]
