"""The simulated engine's chat template, in code and as Jinja. It turns a conversation into one text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

CHAT_TEMPLATE = (
    "{% if reasoning_effort %}<|effort|>\n{{ reasoning_effort }}<|end|>\n{% endif %}"
    "{% if documents %}<|documents|>\n{{ documents | tojson }}<|end|>\n{% endif %}"
    "{% if tools %}<|tools|>\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<|call|>{{ call.function | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% if thinking %}<think>\n{% endif %}{% endif %}"
)
"""The Jinja form of `render`, as in a tokenizer's configuration; for messages whose content is text."""

_END = "<|end|>\n"


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    reasoning_effort: str | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = False,
) -> str:
    """The text of a conversation. As in vLLM, the text parts of a message are joined by newlines, and tools have the fields
    and the order that vLLM's own description of them has. `continue_final_message`: the last message is not complete.
    `thinking`: the template begins the answer's reasoning, as those of DeepSeek-R1 and Qwen3-Thinking do."""
    parts = [f"<|effort|>\n{reasoning_effort}<|end|>\n"] if reasoning_effort else []
    parts += [f"<|documents|>\n{_to_json(documents)}<|end|>\n"] if documents else []
    parts += [f"<|tools|>\n{_to_json([_described(tool) for tool in tools])}<|end|>\n"] if tools else []
    for message in messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        calls = "".join(f"<|call|>{_to_json(_decoded(call))}" for call in message.get("tool_calls") or ())
        parts.append(f"<|{message['role']}|>\n{text}{calls}{_END}")
    if continue_final_message:
        return "".join(parts).removesuffix(_END)
    if add_generation_prompt:
        parts.append("<|assistant|>\n" + ("<think>\n" if thinking else ""))
    return "".join(parts)


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    described = {name: function.get(name) for name in ("name", "description", "parameters")}
    optional = {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    return {"type": "function", "function": described | optional}


def _decoded(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**function, "arguments": json.loads(function.get("arguments") or "{}")}


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
