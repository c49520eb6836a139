"""A tokenizer's budget: how long a request waits for its tokens, and how many may wait."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas.runtime.background_task import end_tasks, wait_for_first
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.telemetry import sampled_context
from kvatlas_router.tokens.counters import TokenCounters
from kvatlas_router.tokens.text_request import TextRequest
from kvatlas_router.tokens.tokenizer import CannotTokenize, PromptTokens, Tokenizer, Tokens, Why, to_array

_log = logging.getLogger("kvatlas_router.tokens")


@dataclass(frozen=True, slots=True)
class TokenizerBudget:
    """`deadline_ms`: after this time, a request is routed without its tokens. `most_deadline_ms`: upper bound of that deadline
    while the tokenizer is slow but still answering. `most_pending`: concurrent calls to the tokenizer; other requests wait for
    a free slot, within the same deadline.

    A token takes an engine about 40 us and a local tokenizer 1 us, so waiting costs less than a miss. In a burst, all requests
    are late together; with individual deadlines, all of the tokenizer's work would be wasted.
    """

    deadline_ms: float = 200.0
    most_pending: int = 64
    most_deadline_ms: float = 1_000.0


class BudgetedTokenizer:
    """Keeps any tokenizer within a budget. Each failure becomes a CannotTokenize, counted by its reason.

    A late call continues in its thread and counts as pending until it ends. So a tokenizer that is too slow for its load gets
    fewer calls, and work never piles up.
    """

    def __init__(
        self, tokenizer: Tokenizer, budget: TokenizerBudget | None = None, counters: TokenCounters | None = None
    ) -> None:
        self.budget = budget or TokenizerBudget()
        self.counters = counters or TokenCounters()
        self._tokenizer = tokenizer
        self._pending: set[asyncio.Task[Tokens]] = set()
        self._slots = asyncio.Semaphore(self.budget.most_pending)
        self._last_done_s = -inf
        self._log = RateLimitedLog(_log)

    async def token_ids(self, request: TextRequest) -> Sequence[int]:
        """A text's token ids, as an array of machine words. Raises CannotTokenize (also for a prompt with more than text), or
        InvalidValue for an out-of-range token id."""
        found = await self.prompt_tokens(request)
        if found.media or found.cut:
            raise CannotTokenize(Why.UNSUPPORTED, "the prompt has more than text")
        return found.ids

    async def prompt_tokens(self, request: TextRequest) -> PromptTokens:
        """The token ids of any prompt, as an array of machine words. Raises CannotTokenize, or InvalidValue for an
        out-of-range token id."""
        if (given := request.token_ids) is not None:
            self.counters.given += 1
            return PromptTokens(_check(given), request.media)
        began = time.perf_counter_ns()
        try:
            found = await self._tokenize_in_time(request)
            if isinstance(found, PromptTokens):
                tokens = PromptTokens(_check(found.ids), found.media, found.cut)
            else:
                tokens = PromptTokens(_check(found))
        except CannotTokenize as error:
            _count(self.counters, error.why)
            if error.why is Why.FAILED:
                self.counters.last_failure = str(error)
            if error.why is not Why.UNSUPPORTED:
                self._log.report(error.why.value, f"prompt without token ids: {error}; routing it by load")
            raise
        except KvatlasError as error:
            self.counters.failed += 1
            raise CannotTokenize(Why.FAILED, str(error)) from error
        finally:
            self.counters.reading_time.add((time.perf_counter_ns() - began) / 1e9, span=sampled_context())
        self.counters.tokenized += 1
        return tokens

    async def aclose(self) -> None:
        """Cancel the pending calls."""
        await end_tasks(list(self._pending))

    async def _tokenize_in_time(self, request: TextRequest) -> Tokens:
        began_s = time.monotonic()
        if self._slots.locked():
            await self._wait_for_slot(began_s)
        else:
            await self._slots.acquire()  # immediately
        task: asyncio.Task[Tokens] = asyncio.create_task(self._tokenizer.token_ids(request))
        self._pending.add(task)
        task.add_done_callback(self._discard)
        try:
            if not await self._is_done_in_time(task, began_s):
                raise CannotTokenize(Why.LATE, f"no token ids within {self._waited_ms(began_s):g} ms")
        except asyncio.CancelledError:
            task.cancel()
            raise
        try:
            return task.result()
        except KvatlasError:
            raise
        except Exception as error:
            # a tokenizer may be any user code: its errors must not fail the request
            _log.warning("tokenizer failed", exc_info=error)
            raise CannotTokenize(Why.FAILED, f"tokenizer: {type(error).__name__}: {error}") from error
        finally:
            del task  # its error's traceback holds this frame: a cycle, which would keep the request alive for a while

    async def _wait_for_slot(self, began_s: float) -> None:
        slot = asyncio.ensure_future(self._slots.acquire())
        try:
            if not await self._is_done_in_time(slot, began_s):
                line = f"the tokenizer is busy with {len(self._pending)} prompts, and no slot became free within"
                raise CannotTokenize(Why.BUSY, f"{line} {self._waited_ms(began_s):g} ms")
        except BaseException:
            if not slot.cancel() and not slot.cancelled():
                self._slots.release()
            raise

    async def _is_done_in_time(self, awaited: asyncio.Future[Any], began_s: float) -> bool:
        budget = self.budget
        while not awaited.done():
            due_s = max(began_s, self._last_done_s) + budget.deadline_ms / 1_000
            left_s = min(due_s, began_s + max(budget.deadline_ms, budget.most_deadline_ms) / 1_000) - time.monotonic()
            if left_s <= 0:
                return False
            await wait_for_first((awaited,), left_s)
        return True

    def _waited_ms(self, began_s: float) -> int:
        return round((time.monotonic() - began_s) * 1_000)

    def _discard(self, task: asyncio.Task[Tokens]) -> None:
        self._pending.discard(task)
        self._slots.release()
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            _log.debug("tokenizer: %s", error)  # for late calls, too
        else:
            self._last_done_s = time.monotonic()


def _check(token_ids: Sequence[int]) -> Sequence[int]:
    try:
        return to_array(token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidValue("the prompt has a token id that is not an integer from 0 to 2^32-1") from error


def _count(counters: TokenCounters, why: Why) -> None:
    match why:
        case Why.LATE:
            counters.late += 1
        case Why.BUSY:
            counters.busy += 1
        case Why.UNSUPPORTED:
            counters.unsupported += 1
        case Why.FAILED:
            counters.failed += 1
        case Why.NO_ENGINE:
            counters.no_engine += 1
