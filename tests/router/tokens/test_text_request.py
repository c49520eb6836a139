"""The body of a completion or a chat, as far as a router reads it."""

from typing import Any

import pytest

from kvatlas.blocks.media import MediaItem
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineKind
from kvatlas_router.tokens import Api, TextRequest
from router_client.prompt import OutputLimits


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"prompt": ""}', b'{"prompt": 5}', b'{"prompt": [{}]}', b'{"prompt": []}', b"\xff"]
)
def test_a_body_without_a_prompt_is_refused_in_one_line(body: bytes) -> None:
    with pytest.raises(InvalidValue) as error:
        TextRequest.parse(Api.COMPLETIONS, body)
    assert "\n" not in str(error.value)


def test_a_router_reads_prompts_tokens_and_options_from_a_body() -> None:
    several = TextRequest.parse(Api.COMPLETIONS, b'{"prompt": [[1, 2], [3]], "max_tokens": 9, "model": "m"}')
    assert (several.prompts, several.token_ids, several.output_tokens, several.model) == (2, [1, 2], 9, "m")
    chat = TextRequest.parse(
        Api.CHAT, b'{"messages": [{"content": "abc"}], "stream": true, "stream_options": {"include_usage": true}}'
    )
    assert (chat.prompts, chat.streamed, chat.wants_usage, chat.letters, chat.token_ids) == (1, True, True, 3, None)


@pytest.mark.parametrize(
    ("api", "fields", "vllm", "sglang"),
    [
        (Api.CHAT, {}, None, None),
        (Api.CHAT, {"prompt_logprobs": 0}, 0, None),
        (Api.CHAT, {"prompt_logprobs": 1, "skip_reading_prefix_cache": False}, None, None),
        (Api.CHAT, {"skip_reading_prefix_cache": True}, 0, None),
        (Api.CHAT, {"logprobs": True}, None, None),
        (Api.COMPLETIONS, {"echo": True}, None, None),
        (Api.COMPLETIONS, {"echo": True, "logprobs": 0}, 0, 0),
        (Api.COMPLETIONS, {"return_logprob": True, "logprob_start_len": 40}, None, 40),
        (Api.COMPLETIONS, {"return_logprob": True, "logprob_start_len": -1}, None, None),
        (Api.COMPLETIONS, {"logprob_start_len": 40}, None, None),
        (
            Api.COMPLETIONS,
            {"skip_reading_prefix_cache": "yes", "logprob_start_len": "x", "return_logprob": True},
            None,
            None,
        ),
    ],
)
def test_a_request_says_how_much_of_the_cache_it_lets_its_engine_read(
    api: Api, fields: dict[str, Any], vllm: int | None, sglang: int | None
) -> None:
    reading = TextRequest(api, {"prompt": "a", "messages": [{}], **fields}).cache_reading
    assert reading.readable_tokens(EngineKind.VLLM) == vllm
    assert reading.readable_tokens(EngineKind.SGLANG) == sglang


@pytest.mark.parametrize(
    ("api", "body", "limits"),
    [
        (Api.MESSAGES, {"max_tokens": 7}, OutputLimits(0, 7)),
        (Api.RESPONSES, {"max_output_tokens": 7, "ignore_eos": True}, OutputLimits(7, 7)),
        (Api.GENERATE, {"sampling_params": {"max_new_tokens": 7, "min_new_tokens": 3}}, OutputLimits(3, 7)),
        (Api.TOKENS, {"sampling_params": {"max_tokens": 7, "ignore_eos": True}, "max_tokens": 9}, OutputLimits(7, 7)),
        (Api.TOKENS, {"sampling_params": 5}, OutputLimits(0, None)),
        (Api.CHAT, {"max_tokens": 7, "max_completion_tokens": 3}, OutputLimits(0, 7)),
        (Api.COMPLETIONS, {"max_tokens": 7, "max_completion_tokens": 3, "max_new_tokens": 1}, OutputLimits(0, 7)),
        (Api.MESSAGES, {"max_completion_tokens": 3}, OutputLimits(0, None)),
        (Api.GENERATE, {"sampling_params": [{"max_new_tokens": 3}, {"max_new_tokens": 7}, 5]}, OutputLimits(0, 7)),
        (Api.GENERATE, {"sampling_params": []}, OutputLimits(0, None)),
        (Api.COMPLETIONS, {"max_tokens": "7", "min_tokens": 3.0}, OutputLimits(3, 7)),
        (Api.COMPLETIONS, {"max_tokens": "many", "min_tokens": float("inf")}, OutputLimits(0, None)),
    ],
)
def test_each_api_says_in_its_own_words_how_long_its_answer_may_be(api: Api, body: Any, limits: OutputLimits) -> None:
    assert TextRequest(api, body).output_limits == limits


@pytest.mark.parametrize(
    ("value", "is_true"),
    [(True, True), (1, True), (1.0, True), ("True", True), ("yes", True), ("off", False), (0, False), (None, False)],
)
def test_flags_are_read_as_engines_read_them(value: object, is_true: bool) -> None:
    request = TextRequest(Api.CHAT, {"stream": value, "stream_options": {"include_usage": value}})
    assert (request.streamed, request.wants_usage) == (is_true, is_true)


def test_token_ids_are_read_from_the_field_of_each_api() -> None:
    features = {"mm_hashes": {"image": ["9f"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}
    given = TextRequest.of(Api.TOKENS, {"token_ids": [1, 5, 5, 2], "features": features})
    assert (given.token_ids, given.media) == ([1, 5, 5, 2], [MediaItem("9f", 1, 2)])
    batch = TextRequest.of(Api.GENERATE, {"input_ids": [[1, 2], [3]], "text": None, "lora_path": "sql"})
    assert (batch.token_ids, batch.prompts, batch.model) == ([1, 2], 2, "sql")
    assert (given.other_prompts_tokens, batch.other_prompts_tokens) == (0, 1)
    mixed = TextRequest.of(Api.COMPLETIONS, {"prompt": ["a" * 40, "b" * 40, [1, 2], 5], "n": "3"})
    assert (mixed.other_prompts_tokens, mixed.all_choices) == (12, 12)
    assert TextRequest.of(Api.GENERATE, {"input_ids": [1], "image_data": "http://x"}).token_ids is None


def test_the_length_of_a_conversation_counts_all_of_its_texts() -> None:
    result = {"type": "tool_result", "content": [{"type": "text", "text": "abc"}, {"type": "image", "source": {}}]}
    request = TextRequest(Api.MESSAGES, {"system": "ab", "messages": [{"role": "user", "content": [result]}]})
    assert (request.letters, request.media_items) == (5, 1)
    items = [{"role": "user", "content": "abcd"}, {"type": "function_call_output", "output": "ab"}, 5]
    assert TextRequest(Api.RESPONSES, {"instructions": "a", "input": items}).letters == 7
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "abcd"}}], "content": "ab"}
    chat = TextRequest(Api.CHAT, {"messages": [call], "tools": [{"function": {"description": "a" * 1_000}}]})
    assert 1_006 < chat.letters < 1_100


@pytest.mark.parametrize("name", ["prompt_cache_key", "session_id"])
def test_a_session_is_named_in_the_body_but_not_by_any_text(name: str) -> None:
    for key, session in (("s1", "s1"), ("x" * 257, None), ("a\nb", None), ("", None), (5, None)):
        assert TextRequest(Api.RESPONSES, {name: key}).session_id == session
