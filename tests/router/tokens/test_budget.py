"""Any tokenizer within its budget, and off the event loop."""

import asyncio
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from kvatlas.errors import InvalidValue
from kvatlas_router.tokens import (
    Api,
    AwaitedTokenizer,
    BudgetedTokenizer,
    CannotTokenize,
    TextRequest,
    ThreadedTokenizer,
    TokenizerBudget,
    Why,
)
from tests.eventually import until

pytestmark = pytest.mark.anyio

REQUEST = TextRequest(Api.COMPLETIONS, {"prompt": "abc"})


def letters(request: TextRequest) -> Sequence[int]:
    assert isinstance(request.prompt, str)
    return [ord(letter) for letter in request.prompt]


async def test_a_callers_function_runs_in_a_thread_of_its_own() -> None:
    seen: list[str] = []

    def function(request: TextRequest) -> Sequence[int]:
        seen.append(threading.current_thread().name)
        return letters(request)

    tokenizer = ThreadedTokenizer(function)
    budgeted = BudgetedTokenizer(tokenizer)
    assert list(await budgeted.token_ids(REQUEST)) == [97, 98, 99]
    assert seen[0].startswith("kvatlas-tokenizer")
    assert budgeted.counters.tokenized == 1
    tokenizer.close()


@pytest.mark.parametrize(
    ("body", "inline"),
    [
        ({"prompt": "a" * 99}, True),
        ({"prompt": "a" * 100}, False),
        ({"prompt": "abc", "tools": [{}]}, False),
        ({"messages": [{"role": "user", "content": "a" * 30}]}, True),
        ({"messages": [{"role": "user", "content": "a" * 80}]}, False),
        ({"messages": [{"role": "user", "name": "a" * 80, "content": "a"}]}, False),
        ({"messages": [{"role": "user", "content": ""}] * 100}, False),
        ({"messages": [{}] * 100}, False),
        ({"messages": [{"tool_calls": [{"function": {"arguments": {"a" * 80: 1}}}]}]}, False),
    ],
)
async def test_what_is_short_is_tokenized_at_once(body: dict[str, Any], inline: bool) -> None:
    seen: list[str] = []

    def function(request: TextRequest) -> Sequence[int]:
        seen.append(threading.current_thread().name)
        return []

    tokenizer = ThreadedTokenizer(function, inline_letters=100)
    await tokenizer.token_ids(TextRequest(Api.COMPLETIONS if "prompt" in body else Api.CHAT, body))
    assert seen[0].startswith("kvatlas-tokenizer") is not inline
    tokenizer.close()


async def test_token_ids_that_are_given_need_no_tokenizer() -> None:
    async def none(_: TextRequest) -> Sequence[int]:
        raise AssertionError("not to be asked")

    budgeted = BudgetedTokenizer(AwaitedTokenizer(none))
    given = TextRequest.parse(Api.COMPLETIONS, b'{"prompt": [5, 6]}')
    assert list(await budgeted.token_ids(given)) == [5, 6] and budgeted.counters.given == 1
    with pytest.raises(InvalidValue, match="token id"):
        await budgeted.token_ids(TextRequest.parse(Api.COMPLETIONS, b'{"prompt": [-1]}'))


async def test_more_prompts_than_the_tokenizer_takes_at_once_wait_for_their_turn() -> None:
    running = most = 0

    async def count_calls(request: TextRequest) -> Sequence[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return letters(request)

    budgeted = BudgetedTokenizer(AwaitedTokenizer(count_calls), TokenizerBudget(deadline_ms=20_000, most_pending=4))
    found = await asyncio.gather(*(budgeted.token_ids(REQUEST) for _ in range(200)))
    assert len(found) == 200 and (budgeted.counters.tokenized, budgeted.counters.busy, most) == (200, 0, 4)


async def test_in_a_burst_requests_wait_longer_than_the_deadline_while_others_get_their_tokens() -> None:
    def slow(request: TextRequest) -> Sequence[int]:
        threading.Event().wait(0.06)
        return letters(request)

    tokenizer = ThreadedTokenizer(slow, threads=1)
    budgeted = BudgetedTokenizer(tokenizer, TokenizerBudget(1_000, most_pending=1, most_deadline_ms=60_000))
    await asyncio.gather(*(budgeted.token_ids(REQUEST) for _ in range(24)))
    assert (budgeted.counters.tokenized, budgeted.counters.late, budgeted.counters.busy) == (24, 0, 0)
    tokenizer.close()


@pytest.mark.parametrize(("most_pending", "tick_s"), [(1, 0.001), (2, 0.000_1)])
async def test_a_request_does_not_wait_for_ever_while_others_get_their_tokens(
    most_pending: int, tick_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances each time it is read, so it does not matter how long this process stands still."""
    now_s = itertools.count(1_000.0, tick_s)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: next(now_s))

    async def some(request: TextRequest) -> Sequence[int]:
        if request.prompt == "never":
            await anyio.sleep_forever()
        return letters(request)

    budget = TokenizerBudget(20, most_pending, most_deadline_ms=60)
    budgeted = BudgetedTokenizer(AwaitedTokenizer(some), budget)
    waiting = asyncio.ensure_future(budgeted.token_ids(TextRequest(Api.COMPLETIONS, {"prompt": "never"})))
    await until(lambda: budgeted._pending, what="the tokenizer is asked")
    others: set[Why | None] = set()
    while not waiting.done():
        try:
            await budgeted.token_ids(REQUEST)
            others.add(None)
        except CannotTokenize as error:
            others.add(error.why)
        await asyncio.sleep(0)
    with pytest.raises(CannotTokenize) as late:
        await waiting
    assert late.value.why is Why.LATE and others == {None if most_pending > 1 else Why.BUSY}
    await budgeted.aclose()
    assert list(await budgeted.token_ids(REQUEST)) == [97, 98, 99]  # no slot is lost


async def test_late_tokens_are_not_waited_for_and_too_many_pending_prompts_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_end = threading.Event()

    def slow(request: TextRequest) -> Sequence[int]:
        may_end.wait(30)
        return letters(request)

    tokenizer = ThreadedTokenizer(slow)
    budgeted = BudgetedTokenizer(tokenizer, TokenizerBudget(deadline_ms=1, most_pending=2))
    for _ in range(2):
        with pytest.raises(CannotTokenize) as late:
            await budgeted.token_ids(REQUEST)
        assert late.value.why is Why.LATE
    with pytest.raises(CannotTokenize) as busy:
        await budgeted.token_ids(REQUEST)
    assert busy.value.why is Why.BUSY
    assert len(caplog.messages) == 2  # one per kind, not per request
    assert all("prompt without token ids" in line and "routing it by load" in line for line in caplog.messages)
    may_end.set()
    budgeted = BudgetedTokenizer(tokenizer, TokenizerBudget(deadline_ms=20_000), budgeted.counters)
    assert list(await budgeted.token_ids(REQUEST)) == [97, 98, 99]
    assert (budgeted.counters.late, budgeted.counters.busy, budgeted.counters.tokenized) == (2, 1, 1)
    tokenizer.close()


async def test_an_error_in_the_callers_tokenizer_is_counted_and_reported() -> None:
    async def wrong(_: TextRequest) -> Sequence[int]:
        raise ZeroDivisionError("by zero")

    async def negative(_: TextRequest) -> Sequence[int]:
        return [-1]

    for function in (wrong, negative):
        budgeted = BudgetedTokenizer(AwaitedTokenizer(function))
        with pytest.raises(CannotTokenize) as error:
            await budgeted.token_ids(REQUEST)
        assert error.value.why is Why.FAILED and budgeted.counters.failed == 1


async def test_a_caller_that_goes_away_stops_an_awaited_tokenizer() -> None:
    stopped = asyncio.Event()

    async def endless(_: TextRequest) -> Sequence[int]:
        try:
            await anyio.sleep_forever()
        finally:
            stopped.set()
        raise AssertionError

    budgeted = BudgetedTokenizer(AwaitedTokenizer(endless), TokenizerBudget(deadline_ms=60_000))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(budgeted.token_ids, REQUEST)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    await until(stopped.is_set, what="the tokenizer stopped")
