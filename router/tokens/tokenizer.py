"""The tokenizer protocol, and tokenizers that call the caller's own function."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, Protocol

from kvatlas.blocks.media import MediaItem
from kvatlas.dataclass import dataclass
from kvatlas.errors import KvatlasError
from kvatlas_router.tokens.text_request import TextRequest


class Why(StrEnum):
    """Why a request has no token ids."""

    LATE = "late"
    BUSY = "busy"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"
    NO_ENGINE = "no_engine"


class CannotTokenize(KvatlasError):
    """A request's token ids are unknown, so it is routed by load."""

    def __init__(self, why: Why, line: str) -> None:
        super().__init__(line)
        self.why = why


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Token ids of a prompt with images or other media: all ids and the items' places or, if `cut`, only the ids before the
    first item."""

    ids: Sequence[int]
    media: Sequence[MediaItem] = ()
    cut: bool = False


Tokens = Sequence[int] | PromptTokens
"""Token ids of a text, or of a prompt that has more than text."""


class Tokenizer(Protocol):
    """Finds all the token ids, in order, that the engine will compute for a request's first prompt."""

    async def token_ids(self, request: TextRequest) -> Tokens:
        """Find the token ids without blocking the event loop. Raises CannotTokenize."""
        ...


_RENDERED = frozenset({"chat_template", "chat_template_kwargs", "documents", "functions", "tools"})
"""Fields that make a prompt longer than its text."""


def _is_short(request: TextRequest, letters: int) -> bool:
    """True if rendering and tokenizing are quick: the prompt has fewer than `letters` letters. In a conversation, every
    name and value counts, plus one letter for each, because templates also read fields other than the text."""
    if _RENDERED & request.body.keys():
        return False
    if not request.api.is_conversation:
        return request.letters < letters
    waiting: list[Any] = [request.body]
    while waiting and letters > 0:
        value = waiting.pop()
        letters -= 1
        if isinstance(value, str):
            letters -= len(value)
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value
    return letters > 0


class ThreadedTokenizer:
    """Runs a plain function in its own threads. The function must be safe to run in `threads` threads at the same
    time."""

    def __init__(self, function: Callable[[TextRequest], Tokens], threads: int = 2, *, inline_letters: int = 0) -> None:
        """`inline_letters`: for a request with fewer letters than this, counting all fields of a conversation, the function
        is called directly, since that takes less time than switching threads."""
        self._function = function
        self._inline_letters = inline_letters
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvatlas-tokenizer")

    async def token_ids(self, request: TextRequest) -> Tokens:
        """Raises whatever the function raises. Cancelling the caller doesn't stop the function."""
        if _is_short(request, self._inline_letters):
            return self._function(request)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._function, request)

    def close(self) -> None:
        """End the threads; running calls finish first."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class AwaitedTokenizer:
    """Calls the caller's own coroutine function."""

    def __init__(self, function: Callable[[TextRequest], Awaitable[Tokens]]) -> None:
        self._function = function

    async def token_ids(self, request: TextRequest) -> Tokens:
        return await self._function(request)


def to_array(token_ids: Sequence[int]) -> "array[int]":
    """Token ids as machine words, which take four bytes each and are faster to hash. Raises OverflowError or
    TypeError."""
    return token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
