"""The request for the part of an answer that a client still lacks, in each of the forms that another engine may need."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas_router.continuation.chat_events import ChatEvents
from kvatlas_router.continuation.cuts import Cuts, Rest
from kvatlas_router.continuation.generate_events import GenerateEvents
from kvatlas_router.continuation.parsed_answer import ParsedAnswer
from kvatlas_router.continuation.reasons import CannotContinue, Why
from kvatlas_router.continuation.rest_request import body_of_ids, body_of_rest, has_ids, stops_of
from kvatlas_router.continuation.sent_answer import SentAnswer
from kvatlas_router.continuation.thoughts import END as END_OF_REASONING
from kvatlas_router.continuation.thoughts import Markers, Thoughts
from kvatlas_router.tokens.text_request import Api, TextRequest

THINKING = "<think>"
"""An answer that begins with this contains reasoning that its engine did not parse. Templates change or drop such text."""


class RestBuilder:
    """Finds the rest of an answer, and builds the requests for it, from what the seam reads while events arrive.
    `prompt_ids`: the prompt's token ids; empty unless the engine gave them for a chat. `index`: the choice's index."""

    def __init__(
        self,
        text: TextRequest,
        sent: SentAnswer,
        thoughts: Thoughts,
        prompt_ids: Sequence[int],
        chat_events: ChatEvents | None,
        generate: GenerateEvents | None,
        parsed: ParsedAnswer | None = None,
        *,
        index: int = 0,
    ) -> None:
        self.text = text
        self.prompt_ids = prompt_ids
        self.stops = stops_of(text)
        self.cuts = Cuts(text, sent, thoughts)
        self.is_read = bool(text.body.get("tools") or text.body.get("logprobs") or text.media_items)
        """Only an engine can read the answer's tokens: they may be tool calls, or must have logprobs."""
        self._sent = sent
        self._thoughts = thoughts
        self._chat_events = chat_events
        self._generate = generate
        self._parsed = parsed
        self._asks_as_chat = text.api in (Api.MESSAGES, Api.RESPONSES)
        self._with_ids = has_ids(text)
        self._body = text.body
        self._index = index

    def of_engines(self, kind: EngineKind, scope: Scope) -> None:
        """Set the engines' kind and model, which decide how they read a conversation. vLLM adds a choice's index to its
        seed."""
        seed = self._body.get("seed")
        body = self._body
        if kind is EngineKind.VLLM and isinstance(seed, int) and not isinstance(seed, bool):
            body = {**body, "seed": seed + self._index}
        self.text = TextRequest(self.text.api, body, kind, scope)

    def find(self, *, finished: bool, most_parts: int | None = None) -> Rest:
        """The part of the answer that the client has not received. `finished`: only the final event is missing. `most_parts`:
        the next engine gets at most this many of the received parts. Raises CannotContinue."""
        if self._parsed is not None and self._parsed.has_call:
            return self._parsed.rest
        sent, text = self._sent, self._sent.text
        can_write = self._chat_events is not None and self._chat_events.can_write
        by_ids = can_write and bool(self.prompt_ids) and not self.is_read
        if not by_ids and self.text.api.is_conversation and text.lstrip().startswith(THINKING):
            raise CannotContinue(Why.REASONING)
        if self._generate is not None and self._generate.whole is None:
            most_parts = 0
        kept, at = self.cuts.find(text, by_ids=by_ids, finished=finished, most_parts=most_parts)
        tokens = sent.end_of(kept).tokens
        reasoned = self._thoughts.reasoned and not (by_ids and END_OF_REASONING in text[:at])
        if by_ids:
            return Rest(kept, tokens, by_ids=True, reasoned=reasoned)
        # an event of several tokens may end within a character, or with the token that ends the answer
        held = max(tokens - sent.end_of(kept - 1).tokens if kept else 1, *map(len, self.stops), 1)
        lag = None if self._asks_as_chat else min(held - 1, tokens)
        return Rest(kept, tokens, lag, reasoned=reasoned)

    def asks(self, rest: Rest) -> Api:
        """The API of the request."""
        if rest.by_ids:
            return Api.COMPLETIONS
        return Api.CHAT if self._asks_as_chat else self.text.api

    def by_ids(self, rest: Rest) -> Rest:
        """The rest of a conversation whose template does not fit, provided that the token ids of its prompt and text are
        known. Raises CannotContinue."""
        if self.is_read or (self._chat_events is not None and not self._chat_events.can_write):
            raise CannotContinue(Why.TEMPLATE)
        return replace(rest, by_ids=True)

    def with_markers(self, rest: Rest, markers: Markers, prompt_ids: Sequence[int], ids: Sequence[int]) -> Rest | None:
        """The rest by these ids; None if the markers among them disagree with what the client has, since the model then marks
        its reasoning differently."""
        inside = markers.is_open([*prompt_ids, *ids])
        if rest.parts and inside != self._is_inside(rest):
            return None
        end = ids.index(markers.ids[1]) if markers.ids[1] in ids else len(ids)
        sglang = self.text.kind is EngineKind.SGLANG  # counts the markers, too
        apart = 0 if sglang or markers.is_open(prompt_ids) else 1
        thought = min(len(ids), end + 1) if sglang else max(0, end - apart)
        return replace(rest, by_ids=True, markers=markers, inside=inside, apart=apart, thought=thought)

    def trusts(self, rest: Rest, tokens: int) -> bool:
        """True if this number of tokens, counted in the answer's text, may be right: parsers remove white space after
        the reasoning."""
        if rest.lag is None:
            return self._is_inside(rest) or self._thoughts.ends.keep is True
        return abs(rest.tokens - tokens) <= rest.lag

    def knows_end(self, rest: Rest) -> bool:
        """False if the client must get the end of its reasoning from the next engine's tokens, and it is not known what
        parsers do with white space there."""
        return self._thoughts.ends.keep is not None or (rest.parts > 0 and not rest.inside)

    def _is_inside(self, rest: Rest) -> bool:
        return self._thoughts.reasoned and END_OF_REASONING not in self.text_of(rest)

    # ------------------------------------------------------------ what the next engine gets

    def text_of(self, rest: Rest) -> str:
        """The text of the answer that the next engine gets."""
        return self._sent.text_of(rest.parts)

    def ids_of(self, rest: Rest) -> Sequence[int]:
        """The token ids of the answer that the next engine gets, as far as the engines gave them."""
        return self._sent.ids_of(rest.parts)

    def body(self, rest: Rest, tokens: int) -> dict[str, Any]:
        """The body of the request for the rest. `tokens`: the number of the answer's tokens so far. Raises CannotTokenize
        for a conversation whose chat is not known."""
        if rest.parsed:
            assert self._parsed is not None
            return self.body_of_ids(self._parsed.prompt_ids, self._parsed.known_ids, tokens, rest)
        ids = self._sent.ids_of(rest.parts) if self._with_ids or rest.by_ids else []
        if rest.by_ids:
            return self.body_of_ids(self.prompt_ids, ids, tokens, rest)
        return body_of_rest(self.text, self.text_of(rest), ids, tokens)

    def body_of_ids(self, prompt_ids: Sequence[int], ids: Sequence[int], tokens: int, rest: Rest) -> dict[str, Any]:
        """The body with ids that did not come from the engine. `ids`: the answer so far; `tokens`: the number of its tokens,
        as its engines counted them."""
        shown = {} if rest.markers is None else {"skip_special_tokens": False}
        return body_of_ids(self.text, prompt_ids, ids, tokens) | shown

    def body_of_raw(self, raw: str, tokens: int) -> dict[str, Any]:
        """The body of a chat for the rest of an answer with reasoning. `raw`: the part that the model has generated."""
        return body_of_rest(self.text, raw, (), tokens)
