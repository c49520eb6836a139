"""Joins several engines' streamed answers to one request for several choices."""

from array import array
from dataclasses import replace
from typing import Any

from kvatlas.runtime.json_text import decode
from kvatlas_router.answers.event_parser import Event
from kvatlas_router.continuation import edits
from kvatlas_router.continuation.cuts import Rest
from kvatlas_router.continuation.joined_events import JoinedEvents
from kvatlas_router.continuation.parsed_answer import ParsedAnswer
from kvatlas_router.continuation.reasons import Why
from kvatlas_router.continuation.rest_builder import RestBuilder
from kvatlas_router.continuation.rest_request import may_parse
from kvatlas_router.continuation.seam import DONE, Seam
from kvatlas_router.continuation.thoughts import ThoughtEnds
from kvatlas_router.continuation.usage import WholeUsage, count
from kvatlas_router.tokens.text_request import TextRequest


class ChoiceSeams(JoinedEvents):
    """Like `Seam`, with one seam for each choice. The first engine computes all choices. After its death, other engines
    continue the unfinished ones, one after another, each with a request for one choice. `awaits_choice`: one choice has ended,
    and another engine must continue the next one."""

    def __init__(self, text: TextRequest, ends: ThoughtEnds) -> None:
        super().__init__()
        self.ended = False
        self.parsed = None
        self._wants_usage = text.wants_usage
        prompt_ids, one = array("q"), replace(text, body={**text.body, "n": 1})
        self._seams = [Seam(one, ends, index=index, prompt_ids=prompt_ids) for index in range(text.choices)]
        self._next = self._seams[0]
        self._continued: Seam | None = None
        """The choice that the current engine continues; None: the first engine answers."""
        self._has_usage = False

    @property
    def builder(self) -> RestBuilder:
        """The next choice's seam."""
        return self._next.builder

    @property
    def why(self) -> Why | None:
        """The reason if one of the unfinished choices can't continue."""
        return next((one.why for one in self._seams if one.why is not None and not one.is_finished), None)

    @property
    def awaits_choice(self) -> bool:
        return self._continued is not None and self._continued.is_finished and not self._are_finished

    @property
    def reached(self) -> tuple[object, ...]:
        """See `Seam`."""
        return (*(one.reached for one in self._seams), self._has_usage)

    @property
    def usage(self) -> WholeUsage:
        """See `Seam`; covers all choices together."""
        counted = [one.usage for one in self._seams]
        first = next((one for one in counted if one.prompt_tokens is not None), counted[0])
        details = first.details
        if details is not None and count(details, "reasoning_tokens") is not None:
            thought = sum(count(one.details or {}, "reasoning_tokens") or 0 for one in counted)
            details = {**details, "reasoning_tokens": thought}
        return replace(first, completion_tokens=sum(one.completion_tokens or 0 for one in counted), details=details)

    @property
    def missing_end(self) -> bytes | None:
        """See `Seam`."""
        if self.ended:
            return b""
        return DONE if self._are_finished and (self._has_usage or not self._wants_usage) else None

    def rest(self, most_parts: int | None = None) -> Rest:
        """The part of the next choice that the client lacks. See `Seam`."""
        self._next = next((one for one in self._seams if not one.is_finished), self._seams[-1])
        return self._next.rest(most_parts)

    def resume(self, rest: Rest, tokens: int) -> None:
        """See `Seam`."""
        self._continued = self._next
        self._continued.identity = self._continued.identity or self._identity
        self._continued.resume(rest, tokens)
        self.begin_again()

    def give_up(self, why: Why) -> None:
        """See `JoinedEvents`."""
        for one in self._seams:
            one.give_up(why)

    @property
    def _identity(self) -> dict[str, bytes]:
        """The identity of the first choice that has begun: SGLang gives each choice its own."""
        return next((one.identity for one in self._seams if one.identity), {})

    @property
    def _are_finished(self) -> bool:
        return all(one.is_finished for one in self._seams)

    def _take(self, event: Event, data: bytes, raw: bytes) -> bytes:
        if data.strip() == b"[DONE]":
            self.ended = not self.awaits_choice
            return raw if self.ended else b""
        if event.cut:
            self.give_up(Why.LONG)
            return raw
        index, usage = _read(data)
        if index is None and usage is not None:
            return self._take_usage(raw, usage)
        if index is None or index >= len(self._seams):
            self.give_up(Why.CHOICES)
            return raw
        return (self._continued or self._seams[index]).feed(raw)

    def _take_usage(self, raw: bytes, usage: dict[str, Any]) -> bytes:
        """The bytes for the client that report the current engine's last usage."""
        if self._has_usage:
            return b""
        if self._continued is not None:
            self._continued.usage.learn(usage, first=False)
            if self.awaits_choice:
                return b""
            raw = edits.with_usage(edits.with_identity(raw, self._identity), self.usage.sum)
        self._has_usage = True
        return raw


def _read(data: bytes) -> tuple[int | None, dict[str, Any] | None]:
    """The index of an event's choice if it has exactly one; its usage if it has none."""
    try:
        decoded = decode(data)
    except ValueError:
        return None, None
    choices, usage = (decoded.get("choices"), decoded.get("usage")) if isinstance(decoded, dict) else (None, None)
    if not isinstance(choices, list) or len(choices) > 1:
        return None, None
    if not choices:
        return None, usage if isinstance(usage, dict) else None
    index = choices[0].get("index") if isinstance(choices[0], dict) else None
    return (index, None) if type(index) is int and index >= 0 else (None, None)


def seam_of(text: TextRequest, ends: ThoughtEnds) -> Seam | ChoiceSeams:
    """The seam of a request's answer."""
    if text.choices > 1:
        return ChoiceSeams(text, ends)
    return Seam(text, ends, parsed=ParsedAnswer(text) if may_parse(text) else None)
