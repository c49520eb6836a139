"""The probe of a status page: a form for a prompt, and what answers the form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self
from urllib.parse import parse_qs

from kvatlas.errors import InvalidValue
from kvatlas.status_page.content import Section

MAX_BYTES = 512 * 1024
"""Maximum size of a form: about 60,000 token ids."""
MAX_FIELDS = 16
MAX_NAME = 512


class PromptKind(StrEnum):
    """The kind of text that was pasted."""

    TOKENS = "tokens"
    TEXT = "text"
    CHAT = "chat"

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    PromptKind.TOKENS: "token ids",
    PromptKind.TEXT: "text, as a completion",
    PromptKind.CHAT: "text, as a chat's first message",
}


@dataclass(frozen=True, slots=True)
class Query:
    """A form that has been filled in. `model`: one of the names that the probe offered, or empty; `tenant`: empty unless
    given."""

    kind: PromptKind
    prompt: str
    model: str = ""
    tenant: str = ""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse a URL-encoded form. Raises InvalidValue for anything else, and for an empty prompt."""
        try:
            fields = parse_qs(body.decode("ascii"), max_num_fields=MAX_FIELDS, errors="strict")
        except ValueError as error:  # this includes UnicodeError
            raise InvalidValue(f"the form can't be read: {error}") from error
        kind = _field(fields, "kind")
        prompt = (fields.get("prompt") or [""])[0].replace("\r\n", "\n")  # browsers end lines with \r\n
        if kind not in _LABELS:
            raise InvalidValue(f"kind is {kind!r}; expected one of {', '.join(_LABELS)}")
        if not prompt.strip():
            raise InvalidValue("the prompt is empty; paste text or token ids")
        names = {name: _field(fields, name) for name in ("model", "tenant")}
        return cls(PromptKind(kind), prompt, **names)


def _field(fields: Mapping[str, Sequence[str]], name: str) -> str:
    value = (fields.get(name) or [""])[0].strip()
    if len(value.encode()) > MAX_NAME:
        raise InvalidValue(f"{name} has {len(value.encode())} bytes; expected at most {MAX_NAME}")
    return value


class Probe(Protocol):
    """Answers the queries that are made with a form."""

    async def models(self) -> Mapping[str, str]:
        """The models to choose from: what the form sends, and what it shows. Raises KvatlasError."""

    async def answer(self, query: Query) -> Section:
        """The workers that hold some of the prompt, and what it would cost there. Nothing is booked. Raises KvatlasError."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a probe on the page. `error`: why the last query failed; `answer`: the answer to it."""

    models: Mapping[str, str]
    query: Query | None = None
    error: str = ""
    answer: Section | None = None
