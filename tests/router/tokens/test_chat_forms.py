"""Anthropic's messages and OpenAI's responses become the same chats as in vLLM and SGLang."""

from contextlib import suppress
from itertools import product
from typing import Any

import pytest

from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas_router.tokens import Api, CannotTokenize, TextRequest, Why
from kvatlas_router.tokens.chat_form import as_chat
from kvatlas_router.tokens.chat_template import ChatTemplate
from kvatlas_router.tokens.engine_questions import question_before_media, render_question, tokenize_question
from tests.router.tokens.small_model import CHATML

VLLM, SGLANG = EngineKind.VLLM, EngineKind.SGLANG
USER = {"role": "user", "content": "Who?"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
SHOWN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def messages(kind: EngineKind = VLLM, **body: Any) -> dict[str, Any]:
    return dict(as_chat(TextRequest(Api.MESSAGES, {"messages": [USER], **body}, kind)).body)


def responses(*items: Any, kind: EngineKind = VLLM, **body: Any) -> list[Any]:
    asked = as_chat(TextRequest(Api.RESPONSES, {"input": list(items), **body}, kind))
    return list(asked.body["messages"])


@pytest.mark.parametrize(
    ("system", "vllm", "sglang"),
    [
        ("Be brief.", "Be brief.", "Be brief."),
        (" ", " ", None),
        ([text("One."), text(""), text("Two.")], "One.Two.", "One.\nTwo."),
        ([text("x-anthropic-billing-header: 1f"), text("One.")], "One.", "x-anthropic-billing-header: 1f\nOne."),
    ],
)
def test_a_system_prompt_is_the_first_message(system: Any, vllm: str, sglang: str | None) -> None:
    for kind, expected in ((VLLM, vllm), (SGLANG, sglang)):
        first = [] if expected is None else [{"role": "system", "content": expected}]
        assert messages(kind, system=system)["messages"] == [*first, USER]


def test_an_agents_turn_is_text_calls_and_results() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "é"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("a"), text("b"), IMAGE]}
    turns = [
        {"role": "user", "content": [text("Read it.")]},
        {"role": "assistant", "content": [text("I do."), call]},
        {"role": "user", "content": [text("So?"), result]},
    ]
    function = {"name": "read", "arguments": '{"path": "\\u00e9"}'}
    begin = [
        {"role": "user", "content": "Read it."},
        {
            "role": "assistant",
            "content": "I do.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
    ]
    tool, asked = {"role": "tool", "tool_call_id": "t1"}, {"role": "user", "content": "So?"}
    assert messages(messages=turns)["messages"] == [
        *begin,
        {**tool, "content": "a\nb"},
        {"role": "user", "content": [SHOWN]},
        asked,
    ]
    assert messages(SGLANG, messages=turns)["messages"] == [
        *begin,
        asked,
        {**tool, "content": [text("a"), text("b"), SHOWN]},
    ]


def test_thoughts_tools_and_effort_are_what_the_engine_gives_to_its_template() -> None:
    thought = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, text("Yes.")]}
    ]
    said = {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}
    assert messages(messages=[USER, *thought])["messages"] == [USER, said]
    tool = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}, "cache_control": {}}
    chat = messages(tools=[tool], tool_choice={"type": "any"}, output_config={"effort": "xhigh"}, max_tokens=3)
    function = {"name": "read", "description": "Reads.", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert (chat["tool_choice"], chat["reasoning_effort"]) == ("required", "xhigh")
    shown = {"type": "function", "function": {**function, "strict": False}, "defer_loading": None}
    assert messages(SGLANG, tools=[tool])["tools"] == [shown]
    assert messages(SGLANG, output_config={"effort": "xhigh"})["reasoning_effort"] == "max"
    named = messages(tools=[tool], tool_choice={"type": "tool", "name": "read"})["tool_choice"]
    assert named == {"type": "function", "function": {"name": "read"}}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (VLLM, {"messages": [USER, {"role": "system", "content": "now"}]}),
        (VLLM, {"thinking": {"type": "disabled"}}),
        (SGLANG, {"thinking": {"type": "adaptive"}}),
        (SGLANG, {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]}]}),
        (VLLM, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        (VLLM, {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}),
        (VLLM, {"messages": [{"role": "user", "content": [5]}]}),
        (VLLM, {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "x"}]}]}]}),
        (VLLM, {"messages": [5]}),
    ],
)
def test_messages_whose_rendering_a_router_can_not_know_have_no_tokens(kind: EngineKind, body: dict[str, Any]) -> None:
    with pytest.raises(CannotTokenize, match="a router can't render that as the engine does") as error:
        messages(kind, **body)
    assert error.value.why is Why.UNSUPPORTED and "\n" not in str(error.value)


def test_items_of_one_answer_are_one_message() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Read it."}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I do."}]},
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    function = {"name": "read", "arguments": "{}"}
    calls = [{"id": id, "type": "function", "function": function} for id in ("c1", "c2")]
    assert responses(*items, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text("Read it.")]},
        {"role": "assistant", "reasoning": "Hm.", "content": "I do.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]


def test_a_response_of_a_text_has_its_tools_and_effort() -> None:
    tool = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": True}
    body = {"input": "Who?", "tools": [tool], "reasoning": {"effort": "low"}, "model": "m"}
    chat = as_chat(TextRequest(Api.RESPONSES, body)).body
    function = {"name": "read", "parameters": {"type": "object"}, "strict": True}
    assert chat == {
        "model": "m",
        "messages": [USER],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "reasoning_effort": "low",
    }


def test_an_answer_that_is_not_complete_is_gone_on_from() -> None:
    item = {"type": "message", "role": "assistant", "status": "in_progress", "content": "I"}
    chat = as_chat(TextRequest(Api.RESPONSES, {"input": [USER, item]})).body
    assert (chat["add_generation_prompt"], chat["continue_final_message"]) == (False, True)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (VLLM, {"previous_response_id": "resp_1"}),
        (VLLM, {"conversation": "conv_1"}),
        (VLLM, {"prompt": {"id": "pmpt_1"}}),
        (VLLM, {"tools": [{"type": "web_search"}]}),
        (VLLM, {"input": [{"type": "item_reference", "id": "x"}]}),
        (VLLM, {"input": [{"type": "reasoning", "encrypted_content": "gAAA", "summary": []}]}),
        (SGLANG, {"input": [{"type": "reasoning", "summary": [text("S")]}]}),
        (SGLANG, {"input": [{"role": "developer", "content": "d"}]}),
        (VLLM, {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}),
        (VLLM, {"input": [5]}),
    ],
)
def test_responses_whose_rendering_a_router_can_not_know_have_no_tokens(kind: EngineKind, body: dict[str, Any]) -> None:
    with pytest.raises(CannotTokenize, match="a router can't render that as the engine does") as error:
        as_chat(TextRequest(Api.RESPONSES, {"input": "Who?", **body}, kind))
    assert error.value.why is Why.UNSUPPORTED


WRONG: tuple[Any, ...] = (5, 1.5, True, "x", [5], ["x"], [None], {"a": 1}, [{"type": "x"}], [{"function": 5}])
FIELDS = ("messages", "input", "system", "instructions", "tools", "tool_choice", "thinking", "output_config", "reasoning",
          "chat_template_kwargs", "continue_final_message", "reasoning_effort", "documents", "response_format")  # fmt: skip
OF_MESSAGES = ("role", "content", "tool_calls", "type", "arguments", "output", "summary", "status", "name")


@pytest.mark.parametrize("kind", [VLLM, SGLANG])
@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES, Api.RESPONSES])
def test_values_of_the_wrong_kind_are_no_failure_of_the_tokenizer(api: Api, kind: EngineKind) -> None:
    """Engines refuse most of them."""
    template = ChatTemplate({"default": CHATML})
    readers = (render_question, tokenize_question, question_before_media, lambda asked: template.render(as_chat(asked)))
    bodies = [{name: value} for name in FIELDS for value in WRONG]
    for last in (
        {**USER, "role": role, name: value} for role in ("user", "assistant") for name in OF_MESSAGES for value in WRONG
    ):
        bodies.append({"messages": [USER, last], "input": [USER, last]})
    for body, read in product(bodies, readers):
        with suppress(CannotTokenize, InvalidValue):
            read(TextRequest.of(api, {"messages": [USER], "input": [USER], **body}).of_engines(kind, Scope("m", "m")))
