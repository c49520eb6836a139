"""Where to cut an answer. The next engine gets the part before the cut, and generates the part after it again."""

from dataclasses import dataclass

from kvatlas_router.continuation.rest_request import begun_stop, has_ids, most_tokens, stops_of
from kvatlas_router.continuation.sent_answer import SentAnswer
from kvatlas_router.continuation.thoughts import END, Markers, Thoughts
from kvatlas_router.tokens.text_request import Api, TextRequest


@dataclass(frozen=True, slots=True)
class Rest:
    """What the next engine has to generate.

    `parts`, `tokens`: how much of the answer the next engine gets; whatever the client has beyond that is generated again.
    `lag`: the text of up to this many of these tokens has not arrived yet; None: the number of tokens is a guess. `by_ids`: a
    conversation continues as a completion from token ids; `parsed`: only an engine's parser can read its tokens. `is_known`:
    it is known whether the next engine's prompt begins with the client's.

    `reasoned`: the answer has reasoning, so its `markers` must be known. `inside`: the cut is within the reasoning. `thought`:
    the reasoning tokens that the client has. `apart`: tokens before the end marker that engines don't count as reasoning.
    """

    parts: int = 0
    tokens: int = 0
    lag: int | None = 0
    by_ids: bool = False
    parsed: bool = False
    reasoned: bool = False
    markers: Markers | None = None
    inside: bool = False
    apart: int = 0
    thought: int = 0
    is_known: bool = True

    def counted(self, tokens: int) -> int:
        """How many tokens of the answer the next engine gets, if the text of `tokens` has been read."""
        return tokens if self.lag is None else min(self.tokens, max(self.tokens - self.lag, tokens))


class Cuts:
    """Finds the last point at which another engine can continue the answer. `most`: the answer's token limit."""

    def __init__(self, text: TextRequest, sent: SentAnswer, thoughts: Thoughts) -> None:
        self.most = most_tokens(text)
        self._sent = sent
        self._thoughts = thoughts
        self._stops = stops_of(text)
        self._chat = text.api.is_conversation
        self._with_ids = has_ids(text)
        self._letters_are_ids = text.api is Api.TOKENS and text.body.get("output_mode") in (None, "tokens")

    def is_at_limit(self, tokens: int) -> bool:
        """True if the limit allows no more tokens after these."""
        return self.most is not None and tokens >= self.most

    def find(self, text: str, *, by_ids: bool, finished: bool, most_parts: int | None) -> tuple[int, int]:
        """The number of parts before the cut, and the number of their characters. `text`: what the client has.
        `most_parts`: upper limit on the number of parts."""
        letters = len(text) - begun_stop(text, self._stops)
        at, kept = self._sent.letters, len(self._sent.parts)
        last = kept if most_parts is None else most_parts
        last = min(last, self._sent.finished_at - 1) if finished else last
        while kept and (kept > last or not self._may_end(text, kept, at, letters, by_ids=by_ids)):
            kept -= 1
            at -= len(self._sent.parts[kept].text)
        return kept, at

    def _may_end(self, text: str, kept: int, at: int, letters: int, *, by_ids: bool) -> bool:
        """True if another engine can continue after this part: it may generate another token, sees stop strings whole, and
        reads the text unchanged (templates may strip white space)."""
        last = self._sent.end_of(kept)
        if self.is_at_limit(last.tokens):
            return False
        if not last.text:  # a token with only a part of a character, or one whose text is held back
            return False
        if (self._with_ids or by_ids) and (self._stops or not self._gives_ids(kept)):
            return False
        if self._thoughts.reasoned and not self._thoughts.ends.keep and END not in text[:at]:
            behind = text[at : at + 1]
            if not behind or behind.isspace() or behind == END:
                return False  # white space after it may be missing
        return at <= letters and (by_ids or not (self._chat and at and text[at - 1].isspace()))

    def _gives_ids(self, kept: int) -> bool:
        """True if the part's ids end where its text ends: an event with several ids may end within a character."""
        if self._letters_are_ids:
            return True
        return self._sent.end_of(kept).ids - self._sent.end_of(kept - 1).ids == 1
