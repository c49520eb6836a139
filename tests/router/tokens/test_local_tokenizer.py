"""A Hugging Face tokenizer and its chat template in this process."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.errors import SettingsError
from kvatlas.fleet.records import EngineKind
from kvatlas_router.tokens import Api, CannotTokenize, TextRequest, Why
from kvatlas_router.tokens.chat_template import ChatTemplate
from kvatlas_router.tokens.local_tokenizer import LocalTokenizer, _alternatives
from kvatlas_simulator.http.chat_template import CHAT_TEMPLATE, render
from tests.router.tokens.small_model import CHATML, save_simulators, trained

WORDS = st.sampled_from(["The cache ", "holds", " blocks\n", "?", "  ", "é", "<|im", "_start|>", "<s>", "<|im_end|>"])
TEXTS = st.lists(WORDS, max_size=8).map("".join)
CHATS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXTS}),
    min_size=1,
    max_size=6,
)
PLAIN = trained()


def chat(messages: list[dict[str, Any]], **more: Any) -> TextRequest:
    return TextRequest(Api.CHAT, {"messages": messages, **more})


def local(template: str = CHATML, **more: Any) -> LocalTokenizer:
    return LocalTokenizer(trained(), ChatTemplate({"default": template}), **more)


@given(CHATS)
def test_a_chat_in_pieces_has_the_tokens_of_the_whole_text(messages: list[dict[str, Any]]) -> None:
    text = ChatTemplate({"default": CHATML}).render(chat(messages))
    assert list(SHARED.encode(chat(messages))) == PLAIN.encode(text, add_special_tokens=False).ids


SHARED = local()


def test_a_growing_conversation_costs_only_what_is_new() -> None:
    tokenizer = local()
    messages = [{"role": "system", "content": "The cache holds blocks. " * 200}, {"role": "user", "content": "Who?"}]
    tokenizer.encode(chat(messages))
    hits, misses = tokenizer.memo.hits, tokenizer.memo.misses
    messages += [{"role": "assistant", "content": "A worker."}, {"role": "user", "content": "Which?"}]
    tokenizer.encode(chat(messages))
    assert tokenizer.memo.hits - hits >= 3 and tokenizer.memo.misses - misses <= 3


def test_the_piece_memo_is_bounded() -> None:
    tokenizer = local(memo_bytes=20_000)
    for i in range(100):
        tokenizer.encode(chat([{"role": "user", "content": f"question {i} " * 20}]))
    assert 0 < tokenizer.memo.bytes <= 20_000
    tokenizer.encode(chat([{"role": "user", "content": "long " * 10_000}]))
    assert tokenizer.memo.bytes <= 20_000


def test_completions_have_the_tokenizers_special_tokens_and_chats_only_the_templates() -> None:
    tokenizer = local()
    text = "The cache holds blocks"
    plain = PLAIN.encode(text, add_special_tokens=False).ids
    assert list(tokenizer.encode(TextRequest(Api.COMPLETIONS, {"prompt": text}))) == [0, *plain]
    without = TextRequest(Api.COMPLETIONS, {"prompt": text, "add_special_tokens": False})
    assert list(tokenizer.encode(without)) == plain
    asked = tokenizer.encode(chat([{"role": "user", "content": text}], add_special_tokens=True))
    assert asked[0] == 0 and list(asked[1:]) == list(tokenizer.encode(chat([{"role": "user", "content": text}])))


def test_a_template_gets_tools_documents_and_the_requests_own_arguments() -> None:
    template = ChatTemplate(
        {
            "default": "{{ bos_token }}{% if enable_thinking %}think {% endif %}{{ messages[0].content }}",
            "tool_use": "{{ tools | tojson }}{{ messages[0].tool_calls[0].function.arguments.city }}",
        },
        {"bos_token": "<s>"},
    )
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(chat(messages)) == "<s>hi"
    assert template.render(chat(messages, chat_template_kwargs={"enable_thinking": True})) == "<s>think hi"
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    asked = chat(
        [{"role": "assistant", "content": None, "tool_calls": [call]}], tools=[{"function": {"name": "wéather"}}]
    )
    described = '[{"type": "function", "function": {"name": "wéather", "description": null, "parameters": null}}]'
    assert template.render(asked) == f"{described}Zürich"


def test_sglang_gives_its_template_what_its_chats_have() -> None:
    source = "{{ tools | length if tools else 0 }} {% for m in messages %}{{ m.content }};{% endfor %}"
    source += "{{ add_generation_prompt }}"
    template = ChatTemplate({"default": source})
    tools = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": parts}], "tools": tools}

    def rendered(**more: Any) -> str:
        return template.render(TextRequest(Api.CHAT, {**body, **more}, EngineKind.SGLANG))

    assert rendered(add_generation_prompt=False) == "2 a b;True"
    assert rendered(tool_choice="none") == "0 a b;True"
    assert rendered(tool_choice={"type": "function", "function": {"name": "read"}}) == "1 a b;True"
    for more in ({"reasoning_effort": "low"}, {"messages": [{"role": "assistant", "content": "I"}]}):
        with pytest.raises(CannotTokenize) as error:
            rendered(**more)
        assert error.value.why is Why.UNSUPPORTED


def test_vllm_leaves_out_what_it_does_not_know_and_a_line_that_differs_each_time() -> None:
    template = ChatTemplate(
        {"default": "{% for m in messages %}{{ m.content }}|{{ m.reasoning_content }}|{% endfor %}"}
    )
    billing = {"role": "system", "content": "x-anthropic-billing-header: 1f\nBe brief."}
    said = {"role": "assistant", "content": "Yes.", "reasoning": "Hm.", "reasoning_content": "Ho."}
    assert template.render(chat([billing, said])) == "Be brief.||Yes.|Hm.|"


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000])
def test_tool_call_arguments_that_are_not_json_are_an_error(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    template = ChatTemplate({"default": "{{ messages[0].tool_calls }}"})
    with pytest.raises(CannotTokenize, match="tool call arguments are .*; expected JSON"):
        template.render(chat([{"role": "assistant", "content": None, "tool_calls": [call]}]))


def test_content_is_text_or_parts_as_the_template_loops_over_it() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    as_text = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    assert as_text.render(chat([{"role": "user", "content": parts}])) == "a\nb"
    loops = "{% for m in messages %}{% for p in m['content'] %}<{{ p.text }}>{% endfor %}{% endfor %}"
    walking = ChatTemplate({"default": loops})
    assert walking.render(chat([{"role": "user", "content": parts}])) == "<a><b>"
    assert walking.render(chat([{"role": "user", "content": "one"}])) == "<one>"


def test_continuing_the_final_message_ends_the_text_with_it() -> None:
    template = ChatTemplate({"default": CHATML})
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two,"}]
    assert template.render(chat(messages, continue_final_message=True)).endswith("<|im_start|>assistant\none, two,")


def test_a_template_may_mark_generations_and_break_out_of_loops() -> None:
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    source += "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert ChatTemplate({"default": source}).render(chat(messages)) == "a"


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), Why.UNSUPPORTED),
        (chat([{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]), Why.UNSUPPORTED),
        (chat([{"role": "user", "content": "a"}], chat_template="{{ 1 }}"), Why.UNSUPPORTED),
        (chat([{"role": "nobody", "content": "a"}]), Why.FAILED),
    ],
)
def test_a_request_with_more_than_text_has_no_tokens(request_: TextRequest, why: Why) -> None:
    refusing = "{% if messages[0].role == 'nobody' %}{{ raise_exception('unknown role') }}{% endif %}" + CHATML
    with pytest.raises(CannotTokenize) as error:
        local(refusing).encode(request_)
    assert error.value.why is why and "\n" not in str(error.value)


def test_a_models_folder_is_read(tmp_path: Path) -> None:
    tokenizer = LocalTokenizer.from_folder(save_simulators(tmp_path))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Zürich?"}]
    assert bytes(list(tokenizer.encode(chat(messages)))) == render(messages).encode()
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    assert bytes(list(tokenizer.encode(chat(messages, tools=tools)))) == render(messages, tools).encode()
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE + "!")
    assert bytes(list(LocalTokenizer.from_folder(tmp_path).encode(chat(messages)))).endswith(b"<|assistant|>\n!")


def test_a_wrong_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tokenizer\.json: no such file"):
        LocalTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SettingsError, match=r"tokenizer\.json: "):
        LocalTokenizer.from_folder(tmp_path)
    save_simulators(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(SettingsError, match=r"tokenizer_config\.json: chat template"):
        LocalTokenizer.from_folder(tmp_path)


@given(st.lists(st.text("ab<|.*", min_size=1, max_size=6), min_size=1, max_size=12), st.text("ab<|.*", max_size=60))
def test_special_tokens_are_found_as_by_trying_each_of_them(tokens: list[str], text: str) -> None:
    each = re.compile("|".join(map(re.escape, sorted(set(tokens), key=len, reverse=True))))
    found = re.compile(_alternatives(set(tokens))).finditer(text)
    assert [one.span() for one in found] == [one.span() for one in each.finditer(text)]
