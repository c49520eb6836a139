"""The calls for tokens to engines, whose answers are what engines compute, and requests for which there is no such call."""

from typing import Any

import pytest

from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas_router.tokens import Api, CannotTokenize, TextRequest, Why
from kvatlas_router.tokens.engine_questions import render_question, tokenize_question

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Who?"}]}
TOOLS = [{"type": "function", "function": {"name": "read"}}]
SGLANG = EngineKind.SGLANG


def asked(body: dict[str, Any], api: Api = Api.CHAT, **more: Any) -> TextRequest:
    return TextRequest(api, body, **more)


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, None),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": None}, None),
        ({"documents": [{"text": "d"}]}, {"documents": [{"text": "d"}]}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high"}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
        ({"chat_template_kwargs": {"style": "x"}, "temperature": 0, "stream": True}, {"style": "x"}),
    ],
)
def test_what_tokenize_lacks_is_given_to_the_template(fields: dict[str, Any], arguments: Any) -> None:
    question = tokenize_question(asked({**CHAT, **fields}))
    more = {} if arguments is None else {"chat_template_kwargs": arguments}
    assert (question.path, question.body) == ("/tokenize", {**CHAT, **more})


@pytest.mark.parametrize(
    "name", ["add_generation_prompt", "continue_final_message", "chat_template", "media_io_kwargs"]
)
def test_what_tokenize_has_is_passed_on(name: str) -> None:
    assert tokenize_question(asked({**CHAT, name: "given"})).body == {**CHAT, name: "given"}


@pytest.mark.parametrize(
    "request_",
    [
        asked({**CHAT, "truncate_prompt_tokens": 5}),
        asked({**CHAT, "tools": TOOLS, "tool_choice": "none"}),
        asked({**CHAT, "reasoning_effort": "low"}, scope=Scope("openai/gpt-oss-120b", "t")),
        asked({**CHAT, "response_format": {"type": "json_object"}}, scope=Scope("moonshotai/Kimi-K3", "t")),
        asked({**CHAT, "tools": TOOLS, "tool_choice": "required"}, scope=Scope("moonshotai/Kimi-K3", "t")),
        asked({**CHAT, "response_format": {"type": "json_object"}}, scope=Scope("CohereLabs/command-a-03-2025", "t")),
        asked({"prompt": "a", "suffix": "b"}, Api.COMPLETIONS),
        asked({"text": "a", "image_data": "http://x"}, Api.GENERATE, kind=SGLANG),
        asked({"token_ids": [1], "content_parts": [{}]}, Api.TOKENS),
    ],
)
def test_a_request_that_tokenize_would_answer_wrongly_is_not_asked(request_: TextRequest) -> None:
    with pytest.raises(CannotTokenize) as error:
        tokenize_question(request_)
    assert error.value.why is Why.UNSUPPORTED


@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES, Api.RESPONSES])
def test_a_conversation_is_rendered_whole_by_an_engine_that_can(api: Api) -> None:
    body = {**CHAT, "input": "Who?", "reasoning_effort": "high", "stream": True, "tool_choice": "none", "n": 2}
    question = render_question(asked(body, api))
    assert question is not None and question.path == f"{api}/render"
    kept = {name: value for name, value in body.items() if name != "stream"}
    assert question.body == {**kept, "mm_payload": "none", "return_mm_kwargs": False}
    assert render_question(asked(body, api, kind=SGLANG)) is None


def test_a_completion_is_rendered_only_if_it_is_more_than_a_text() -> None:
    assert render_question(asked({"prompt": "a"}, Api.COMPLETIONS)) is None
    question = render_question(asked({"prompt": ["a", "b"], "suffix": "c"}, Api.COMPLETIONS))
    assert question is not None and (question.path, question.body["prompt"]) == ("/v1/completions/render", "a")


def test_an_answer_that_only_its_engine_has_is_not_rendered() -> None:
    with pytest.raises(CannotTokenize, match="previous_response_id"):
        render_question(asked({"input": "Who?", "previous_response_id": "resp_1"}, Api.RESPONSES))


def test_sglang_reads_a_chat_as_its_chats_but_for_fields_that_only_tokenize_has() -> None:
    body = {**CHAT, "reasoning_effort": "low", "tools": TOOLS, "tool_choice": "none", "top_k": 5}
    given = {**body, "stream": True, "add_generation_prompt": False, "add_special_tokens": True}
    assert tokenize_question(asked(given, kind=SGLANG)).body == body
    with pytest.raises(CannotTokenize, match="input_ids"):
        tokenize_question(asked({**CHAT, "input_ids": [1]}, kind=SGLANG))


def test_sglangs_own_text_is_tokenized_with_special_tokens() -> None:
    request = asked({"text": ["a", "b"], "sampling_params": {}}, Api.GENERATE, kind=SGLANG)
    assert tokenize_question(request).body == {"prompt": "a", "add_special_tokens": True}
