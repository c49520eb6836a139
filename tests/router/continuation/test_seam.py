"""Whatever happens to an answer's engines, its client gets what a single engine would have sent."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.fleet.records import EngineKind
from kvatlas_router.continuation.cuts import Rest
from kvatlas_router.continuation.reasons import CannotContinue, ContinueMode, Why, why_not
from kvatlas_router.continuation.rest_request import counting_fields
from kvatlas_router.continuation.seam import DONE, Seam
from kvatlas_router.continuation.thoughts import ThoughtEnds
from kvatlas_router.tokens.text_request import Api, TextRequest
from tests.router.continuation.exact_engine import END, MARKERS, PROMPT, START, ExactEngine

PROMPT_TOKENS = 7
_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class Engine:
    """Knows the whole answer, as tokens, and continues after any part of it. `parts`: tokens in each event, in turn."""

    api: Api
    tokens: Sequence[str]
    shows_tokens: bool = False
    parts: Sequence[int] = (1,)

    def stream(self, body: dict[str, Any]) -> list[bytes]:
        """The events of its answer to a body."""
        sent = self._sent(body)
        whole = "".join(self.tokens)
        assert whole.startswith(sent)
        left = _behind(self.tokens, sent)[: body.get("max_tokens", 16)]
        shared = {"id": f"cmpl-{next(_NUMBERS)}", "object": "chunk", "created": next(_NUMBERS), "model": "m"}
        before = len(self.tokens) - len(_behind(self.tokens, sent))
        chat, events, done, turn = self.api is Api.CHAT, [], 0, 0
        if chat:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            events.append(self._event({**shared, "choices": [opening]}, before, 0))
        while done < len(left):
            some = left[done : done + self.parts[turn % len(self.parts)]]
            done, turn = done + len(some), turn + 1
            text = "".join(some)
            said = {"delta": {"content": text}} if chat else {"text": text}
            reason = "length" if done == len(left) else None
            shown = {"content": [{"token": before + done - len(some)}]} if self.shows_tokens else None
            choice = {"index": 0, **said, "logprobs": shown, "finish_reason": reason}
            events.append(self._event({**shared, "choices": [choice]}, before, done))
        events.append(self._event({**shared, "choices": []}, before, done))
        return [*events, DONE]

    def _sent(self, body: dict[str, Any]) -> str:
        if self.api is Api.COMPLETIONS:
            return str(body["prompt"]).removeprefix("Say: ")
        last = body["messages"][-1]
        assert (last["role"] == "assistant") == (body.get("continue_final_message") is True)
        return str(last["content"]) if last["role"] == "assistant" else ""

    @staticmethod
    def _event(chunk: dict[str, Any], before: int, done: int) -> bytes:
        usage = {
            "prompt_tokens": PROMPT_TOKENS + before,
            "total_tokens": PROMPT_TOKENS + before + done,
            "completion_tokens": done,
        }
        return b"data: " + json.dumps({**chunk, "usage": usage}, separators=(",", ":")).encode() + b"\n\n"


def _behind(tokens: Sequence[str], sent: str) -> list[str]:
    """The tokens after a text; the first one may be the rest of a token."""
    at = 0
    for index, token in enumerate(tokens):
        if at >= len(sent):
            return list(tokens[index:])
        at += len(token)
        if at > len(sent):
            return [token[len(token) - (at - len(sent)) :], *tokens[index + 1 :]]
    return []


def body_of(api: Api, most: int, *, wants_usage: bool) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "Say"}]} if api is Api.CHAT else {"prompt": "Say: "}
    options = {"stream_options": {"include_usage": True}} if wants_usage else {}
    return {"model": "m", "stream": True, "temperature": 0, "max_tokens": most, **asked, **options}


def run(
    text: TextRequest,
    engines: Sequence[Engine | ExactEngine],
    deaths: Sequence[int],
    silent: int = 0,
    ends: ThoughtEnds | None = None,
) -> bytes:
    """What a client gets from these engines, all but the last of which die after the given numbers of events; the first one
    dies after `silent` more."""
    seam, got, body = Seam(text, ends), b"", dict(text.body)
    kind = EngineKind.VLLM if isinstance(engines[0], ExactEngine) else EngineKind.SGLANG
    for engine, death in zip(engines, [*deaths, -1], strict=True):
        events = engine.stream({**body, **counting_fields(text, kind, PROMPT_TOKENS)})
        if not text.wants_usage:
            events = [event for event in events if b'"choices":[]' not in event]
        least = 0 if seam.events else silent + (2 if text.api is Api.CHAT else 1)  # before: tried again
        kept = events if death < 0 else events[: least + death % (len(events) - least)]
        for event in kept:
            got += seam.feed(event)
        if seam.ended:
            break
        if (end := seam.missing_end) is not None:
            return got + end
        rest = seam.rest()
        if rest.reasoned:
            rest = marked_rest(seam, rest)
        body = seam.builder.body(rest, rest.tokens)
        seam.resume(rest, rest.tokens)
    assert seam.ended
    return got


def marked_rest(seam: Seam, rest: Rest) -> Rest:
    """The rest of an answer with reasoning."""
    marked = seam.builder.with_markers(rest, MARKERS, seam.builder.prompt_ids, seam.builder.ids_of(rest))
    assert marked is not None
    return marked


def said(raw: bytes) -> tuple[str, list[str], list[Any], set[str]]:
    """The text, the finish reasons, the usages and the ids of a stream."""
    decoded = [json.loads(event[6:]) for event in raw.split(b"\n\n") if event.startswith(b"data: {")]
    choices = [choice for one in decoded for choice in one["choices"]]
    text = "".join(one.get("text", one.get("delta", {}).get("content")) for one in choices)
    reasons = [one["finish_reason"] for one in choices if one["finish_reason"] is not None]
    return text, reasons, [one["usage"] for one in decoded if "usage" in one], {one["id"] for one in decoded}


TOKENS = st.lists(
    st.sampled_from(["a", " b", "c\n", "\n\n", " ", '"', "\\", "ü", "🙂", "dd d"]), min_size=1, max_size=12
)
HALVES = TOKENS.map(lambda tokens: [part for one in tokens for part in (["", one] if one == "ü" else [one])])
"""Two tokens make one character: the first one has no text yet."""
APIS = st.sampled_from([Api.CHAT, Api.COMPLETIONS])


@given(HALVES, APIS, st.booleans(), st.booleans(), st.lists(st.integers(1, 40), max_size=4), st.integers(1, 14))
def test_a_stream_of_one_token_an_event_has_the_same_bytes(
    tokens: list[str], api: Api, wants_usage: bool, shows_tokens: bool, deaths: list[int], most: int
) -> None:
    text = TextRequest.of(api, body_of(api, most, wants_usage=wants_usage))
    engine = Engine(api, tokens, shows_tokens)
    undisturbed = run(text, [engine], [])
    found = run(text, [engine] * (len(deaths) + 1), deaths)
    assert _same_identity(found) == _same_identity(undisturbed)


@given(TOKENS, APIS, st.lists(st.integers(1, 40), max_size=3), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_a_stream_whose_events_differ_says_the_same(
    tokens: list[str], api: Api, deaths: list[int], parts: list[int]
) -> None:
    text = TextRequest.of(api, body_of(api, 99, wants_usage=True))
    undisturbed = run(text, [Engine(api, tokens)], [])
    engines = [Engine(api, tokens, parts=parts[at:] + parts[:at]) for at in range(len(deaths) + 1)]
    found = run(text, engines, deaths)
    assert said(found)[:3] == said(undisturbed)[:3] and len(said(found)[3]) == 1


EXACT_REQUESTS: list[tuple[Api, dict[str, Any]]] = [
    (Api.CHAT, {"messages": [{"role": "user", "content": "Say"}], "max_tokens": 9}),
    (Api.CHAT, {"messages": [{"role": "user", "content": "Say"}], "max_tokens": 9, "return_token_ids": True}),
    (Api.COMPLETIONS, {"prompt": list(PROMPT), "max_tokens": 9}),
    (Api.TOKENS, {"token_ids": list(PROMPT), "sampling_params": {"max_tokens": 9}}),
    (Api.GENERATE, {"input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 9}}),
]
EXACT = st.sampled_from(EXACT_REQUESTS)


@given(EXACT, HALVES, st.booleans(), st.lists(st.integers(1, 40), max_size=4))
def test_a_stream_of_token_ids_has_the_same_bytes(
    asked: tuple[Api, dict[str, Any]], tokens: list[str], whole: bool, deaths: list[int]
) -> None:
    """Whatever the text: white space, halves of characters."""
    api, body = asked
    text = TextRequest.of(api, {"stream": True, "temperature": 0, **body})
    engine = ExactEngine(["w", *tokens], whole)
    undisturbed = run(text, [engine], [])
    found = run(text, [engine] * (len(deaths) + 1), deaths)
    assert _same_identity(found) == _same_identity(undisturbed)


CHATS = st.sampled_from([body for api, body in EXACT_REQUESTS if api is Api.CHAT])


@given(CHATS, TOKENS, TOKENS, st.booleans(), st.lists(st.integers(1, 40), max_size=4), st.integers(1, 30))
def test_reasoning_goes_on_with_the_same_bytes(
    asked: dict[str, Any], thought: list[str], tokens: list[str], opened: bool, deaths: list[int], most: int
) -> None:
    """Before, at and after its end; whether the model's answer or the prompt begins it."""
    text = TextRequest.of(Api.CHAT, {"stream": True, "temperature": 0, **asked, "max_tokens": most + 2})
    engine = ExactEngine([*([] if opened else [START]), "\n", *thought, END, *tokens, "."], opened=opened)
    undisturbed = run(text, [engine], [], silent=1)
    found = run(text, [engine] * (len(deaths) + 1), deaths, silent=1)
    assert _same_identity(found) == _same_identity(undisturbed)


@given(
    HALVES,
    HALVES,
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 40), max_size=3),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
)
def test_reasoning_in_other_events_says_the_same(
    thought: list[str], tokens: list[str], opened: bool, strips: bool, deaths: list[int], parts: list[int]
) -> None:
    """With several tokens in one event, and parsers that remove white space before the end of the reasoning, which a complete
    answer shows."""
    text = TextRequest.of(Api.CHAT, {**body_of(Api.CHAT, 99, wants_usage=True)})
    listed = [*([] if opened else [START]), "\n", "I", *thought, END, *tokens, "."]
    engines = [
        ExactEngine(listed, opened=opened, strips=strips, parts=parts[at:] + parts[:at])
        for at in range(len(deaths) + 1)
    ]
    silent, ends = 2 if strips or not opened else 1, ThoughtEnds()
    undisturbed = thoughts(run(text, engines[:1], [], silent, ends))
    assert thoughts(run(text, engines, deaths, silent, ends)) == undisturbed


def thoughts(raw: bytes) -> tuple[str, str, Any]:
    """The reasoning, the content and the usage of a chat."""
    decoded = [json.loads(event[6:]) for event in raw.split(b"\n\n") if event.startswith(b"data: {")]
    deltas = [choice["delta"] for one in decoded for choice in one["choices"]]
    reasoning, content = ("".join(delta.get(name, "") for delta in deltas) for name in ("reasoning", "content"))
    usage = {name: value for name, value in decoded[-1]["usage"].items() if name != "completion_tokens_details"}
    return reasoning, content, usage


@given(HALVES, st.lists(st.integers(1, 40), max_size=3), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_events_of_several_token_ids_go_on(tokens: list[str], deaths: list[int], parts: list[int]) -> None:
    """Engines put several into one event if their router reads slowly, or with speculative decoding."""
    text, tokens = generate_request(), [*tokens, *"end"]  # so the first event is never the last
    undisturbed = run(text, [ExactEngine(tokens)], [])
    engines = [ExactEngine(tokens, parts=parts[at:] + parts[:at]) for at in range(len(deaths) + 1)]
    found = [event for event in run(text, engines, deaths).split(b"\n\n") if event]
    assert _same_identity(found[-2]) == _same_identity(undisturbed.split(b"\n\n")[-3])


@pytest.mark.parametrize(("whole", "parts"), [(True, [3]), (False, [3]), (True, [2, 1]), (False, [2, 1])])
def test_a_part_is_not_guessed(whole: bool, parts: list[int]) -> None:
    """A single event does not show whether an engine's events have the whole answer; later ones do."""
    engines = [ExactEngine("aaa", whole=whole), ExactEngine("aaa", whole=whole, parts=parts)]
    if whole and len(parts) > 1:
        last = [event for event in run(generate_request(), engines, [3]).split(b"\n\n") if event][-2]
        assert b'"text":"aaa"' in last and b'"output_ids":[1000,1001,1002]' in last
    else:
        with pytest.raises(CannotContinue, match="diverged"):
            run(generate_request(), engines, [3])


def generate_request() -> TextRequest:
    body = {"stream": True, "input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 99}}
    return TextRequest.of(Api.GENERATE, body)


def test_a_template_that_leaves_out_the_end_of_the_prompt_is_noticed() -> None:
    """For example, one that opens `<think>` in the prompt, but not before a partial answer."""
    text = TextRequest.of(Api.CHAT, body_of(Api.CHAT, 9, wants_usage=True))
    seam, engine = Seam(text), Engine(Api.CHAT, ["a", "b", "c"])
    for event in engine.stream(dict(text.body))[:2]:
        seam.feed(event)
    rest = seam.rest()
    seam.resume(rest, rest.tokens)
    body = seam.builder.body(rest, rest.tokens)
    fewer = [event.replace(b'"prompt_tokens":8', b'"prompt_tokens":7') for event in engine.stream(body)]
    with pytest.raises(CannotContinue, match="template"):
        seam.feed(fewer[0])


def _same_identity(raw: bytes) -> bytes:
    names = set(re.findall(rb'"(?:request_)?id":"?([\w-]+)', raw))
    assert len(names) == 1 and len(set(re.findall(rb'"created":(\d+)', raw))) <= 1
    return re.sub(rb'("(?:request_)?id"|"created"):("[\w-]+"|\d+)', rb"\1:0", raw)


def test_another_answer_is_no_continuation() -> None:
    text = TextRequest.of(Api.COMPLETIONS, body_of(Api.COMPLETIONS, 4, wants_usage=True))
    with pytest.raises(CannotContinue, match="diverged"):
        run(text, [Engine(Api.COMPLETIONS, "abcd"), Engine(Api.COMPLETIONS, "abce")], [3])


@pytest.mark.parametrize(
    ("delta", "why"),
    [
        ({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, Why.TOOL_CALL),
        ({"audio": {"data": "aa"}}, Why.UNREADABLE),
    ],
)
def test_an_answer_that_is_more_than_text_ends_with_its_engine(delta: dict[str, Any], why: Why) -> None:
    seam = Seam(TextRequest.of(Api.CHAT, body_of(Api.CHAT, 9, wants_usage=True)))
    event = b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"
    assert seam.feed(event) == event
    with pytest.raises(CannotContinue, match=why.value):
        seam.rest()


def test_an_engine_that_dies_after_its_last_event_leaves_nothing_to_say() -> None:
    seam = Seam(TextRequest.of(Api.COMPLETIONS, body_of(Api.COMPLETIONS, 9, wants_usage=True)))
    end = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    assert seam.feed(end) == end
    assert seam.missing_end == b""


def test_positions_of_tokens_in_the_text_go_on() -> None:
    text = TextRequest.of(Api.COMPLETIONS, {**body_of(Api.COMPLETIONS, 9, wants_usage=False), "logprobs": 1})
    seam = Seam(text)
    events = [
        b'data: {"id":"1","choices":[{"index":0,"text":"%s","logprobs":{"text_offset":[%d]},"finish_reason":null}]}\n\n'
        % it
        for it in ((b"ab", 0), (b"c", 2), (b"d", 3))
    ]
    assert seam.feed(events[0]) == events[0]
    seam.resume(seam.rest(), 1)
    again = [event.replace(b'"1"', b'"2"').replace(b"[2]", b"[0]").replace(b"[3]", b"[1]") for event in events[1:]]
    assert seam.feed(again[0]) + seam.feed(again[1]) == events[1] + events[2]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, None),
        ({"temperature": 0.5, "seed": 7}, None),
        ({"tools": [{}], "tool_choice": "auto"}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"temperature": None}, Why.SAMPLED),
        ({"n": 8}, None),
        ({"n": 9}, Why.CHOICES),
        ({"use_beam_search": True}, Why.BEAMS),
        ({"echo": True}, Why.ECHO),
        ({"include_reasoning": False}, Why.REASONING),
        ({"response_format": {"type": "json_object"}}, Why.GUIDED),
        ({"structured_outputs": {"regex": "a+"}}, Why.GUIDED),
        ({"tools": [{}], "tool_choice": "required"}, Why.GUIDED),
        ({"modalities": ["text", "audio"]}, Why.AUDIO),
        ({"modalities": True}, None),
        ({"presence_penalty": 0.5}, Why.PENALTIES),
        ({"add_generation_prompt": False}, Why.TEMPLATE),
        ({"chat_template": "{{ messages }}"}, Why.TEMPLATE),
    ],
)
def test_which_requests_go_on(fields: dict[str, Any], why: Why | None) -> None:
    text = TextRequest.of(Api.CHAT, {**body_of(Api.CHAT, 9, wants_usage=True), **fields})
    assert why_not(text, ContinueMode.DETERMINISTIC) is why


@pytest.mark.parametrize(("counts", "lag"), [((1, 2, 3), 0), ((1, 2, 5), 2), ((1, 4, 5), 0)])
def test_the_last_tokens_of_an_event_of_several_may_have_no_text(counts: Sequence[int], lag: int) -> None:
    """For example half of a character, or the end of an answer, which engines report in a separate event. Then the text shows
    how many tokens the next engine gets."""
    seam = Seam(TextRequest.of(Api.CHAT, body_of(Api.CHAT, 9, wants_usage=True)))
    for tokens in counts:
        chunk = {"id": "1", "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
        usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        seam.feed(b"data: " + json.dumps({**chunk, "usage": usage}).encode() + b"\n\n")
    rest = seam.rest()
    assert (rest.tokens, rest.lag) == (counts[-1], lag)
    seam.resume(rest, rest.counted(3))
    less = {"id": "2", "choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": None}]}
    usage = {"prompt_tokens": 7 + (3 if lag else counts[-1]), "completion_tokens": 1, "total_tokens": 11}
    assert b'"content": "b"' in seam.feed(b"data: " + json.dumps({**less, "usage": usage}).encode() + b"\n\n")


def test_a_partial_message_of_the_client_goes_on() -> None:
    partial = {"continue_final_message": True, "add_generation_prompt": False}
    body = body_of(Api.CHAT, 9, wants_usage=True)
    messages = [*body["messages"], {"role": "assistant", "content": "He"}]
    seam = Seam(TextRequest.of(Api.CHAT, {**body, **partial, "messages": messages}))
    seam.feed(Engine(Api.CHAT, ["y", "!"]).stream(body)[1])
    assert seam.builder.body(seam.rest(), 1)["messages"][-1]["content"] == "Hey"
