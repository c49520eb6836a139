"""The expected length of answers is learned by pool, by the length that requests allow, and by session."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.request import RequestHints
from kvatlas_router.tokens import Api, TextRequest
from router_client import Choice, LearningSettings, Prompt, RouterClient, RouterSettings, StaticFleet, Usage
from router_client.learning.output_lengths import MOST_SESSIONS, OutputLengths
from router_client.prompt import OutputLimits
from tests.router_client.pools import SCOPE, pool, worker

pytestmark = pytest.mark.anyio

PROMPT = Prompt.of_tokens(SCOPE, [1] * 100)
SETTINGS = RouterSettings(deadline_ms=None)


def allowing(most: int | None, *, least: int = 0, session_id: str | None = None, scope: Scope = SCOPE) -> Prompt:
    return replace(PROMPT, output_limits=OutputLimits(least, most), session_id=session_id, scope=scope)


def test_before_any_answer_what_the_request_allows_is_expected() -> None:
    lengths = OutputLengths()
    assert [lengths.expect(allowing(most)) for most in (None, 16, 4_000)] == [128, 16, 4_000]
    assert lengths.expect(allowing(None, least=500)) == 500


def test_answers_to_requests_that_allow_as_much_teach_what_to_expect() -> None:
    lengths = OutputLengths()
    for _ in range(20):
        lengths.record(allowing(4_096), 200)
        lengths.record(allowing(None), 1_000)
    assert lengths.expect(allowing(4_096)) == pytest.approx(200 + 3_896 / 21, abs=1)
    assert lengths.expect(allowing(5_000)) < 500
    assert lengths.expect(allowing(None)) == pytest.approx(1_000, rel=0.1)
    assert lengths.expect(allowing(16)) == 16 and lengths.expect(allowing(4_096, least=700)) == 700
    assert lengths.expect(allowing(4_096, scope=Scope("other", "other"))) == 4_096
    for _ in range(200):
        lengths.record(allowing(4_096), 2_000)
    assert lengths.expect(allowing(4_096)) == pytest.approx(2_000, rel=0.1)


def test_a_session_has_answers_of_its_own_length() -> None:
    lengths = OutputLengths()
    for number in range(20):
        lengths.record(allowing(None, session_id=f"s{number}"), 100)
    for _ in range(6):
        lengths.record(allowing(None, session_id="long"), 2_000)
    assert lengths.expect(allowing(None, session_id="long")) > 1_500
    assert lengths.expect(allowing(None, session_id="s1")) < lengths.expect(allowing(None)) < 700


def test_sessions_are_forgotten_oldest_first() -> None:
    lengths = OutputLengths()
    for number in range(MOST_SESSIONS + 1):
        lengths.record(allowing(None, session_id=str(number)), 5_000 if number in (0, 1) else 10)
    assert lengths.expect(allowing(None, session_id="0")) < 100 < lengths.expect(allowing(None, session_id="1"))


@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.one_of(st.none(), st.integers(1, 1 << 20))), max_size=20),
    st.integers(0, 5_000),
    st.one_of(st.none(), st.integers(1, 1 << 20)),
)
def test_whatever_engines_say_the_request_s_limits_hold(
    answers: list[tuple[int, int | None]], least: int, most: int | None
) -> None:
    lengths = OutputLengths()
    for tokens, allowed in answers:
        lengths.record(allowing(allowed), tokens)
    expected = lengths.expect(allowing(most, least=least))
    assert expected >= 1 and (most is None or expected <= most) and (expected >= least or most is not None)
    replace(PROMPT, output_tokens=expected)  # raises if it is not a number of tokens


@pytest.mark.parametrize(
    ("body", "limits"),
    [
        ({}, OutputLimits()),
        ({"max_tokens": 4_000}, OutputLimits(0, 4_000)),
        ({"max_completion_tokens": 4_000, "max_tokens": 7}, OutputLimits(0, 7)),  # a field of chats
        ({"max_tokens": 50, "min_tokens": 20}, OutputLimits(20, 50)),
        ({"max_tokens": 50, "ignore_eos": True}, OutputLimits(50, 50)),
        ({"min_tokens": "20", "max_tokens": None}, OutputLimits(20, None)),  # as engines read it
    ],
)
def test_a_request_says_how_long_its_answer_may_be(body: dict[str, object], limits: OutputLimits) -> None:
    assert TextRequest(Api.COMPLETIONS, {"prompt": "Hi", **body}).output_limits == limits


async def answered(router: RouterClient, prompt: Prompt, tokens: int) -> Choice:
    async with router.route(prompt) as choice:
        await choice.done(usage=Usage(100, tokens))
    return choice


async def test_choices_are_priced_by_what_was_learned() -> None:
    router = RouterClient(MemoryIndex(), StaticFleet(pool(worker("w1"))), SETTINGS)
    choice = await router.reserve(allowing(4_000), dry_run=True)
    assert choice.output_tokens == 4_000
    assert choice.ttft_us is not None and choice.score_us > choice.ttft_us + 4_000 * 7_000
    assert choice.explanation()["ttft_us"] == choice.ttft_us
    for _ in range(10):
        await answered(router, PROMPT, 1_000)
    assert (await router.reserve(PROMPT, dry_run=True)).output_tokens == pytest.approx(921, abs=1)
    hints = RequestHints.parse({"request_id": "r", "model_id": "model", "tokenizer_id": "tokenizer", "token_ids": [1]})
    assert (await router.reserve(hints, dry_run=True)).output_tokens == pytest.approx(921, abs=1)
    said = Prompt.of_tokens(SCOPE, [1] * 100, output_tokens=50)
    assert (await router.reserve(said, dry_run=True)).output_tokens == 50
    failed = await router.reserve(allowing(4_000))
    await failed.done(500, Usage(100, 1))
    assert (await router.reserve(allowing(4_000), dry_run=True)).output_tokens == 4_000


async def test_nothing_is_learned_if_it_is_switched_off() -> None:
    settings = replace(SETTINGS, learning=LearningSettings(on=False))
    router = RouterClient(MemoryIndex(), StaticFleet(pool(worker("w1"))), settings)
    await answered(router, PROMPT, 1_000)
    assert (await router.reserve(PROMPT, dry_run=True)).output_tokens == 128
