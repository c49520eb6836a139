"""The simulated engine's chat template, in code and as Jinja: turns a conversation into one text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content or '' }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""The same as `render`, as in a tokenizer's configuration; for messages whose content is text."""


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text of a conversation. The text parts of one message are joined by newlines, as in vLLM."""
    parts = [f"<|tools|>\n{json.dumps(tools, ensure_ascii=False)}<|end|>\n"] if tools else []
    for message in messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        parts.append(f"<|{message['role']}|>\n{text}<|end|>\n")
    if add_generation_prompt:
        parts.append("<|assistant|>\n")
    return "".join(parts)
