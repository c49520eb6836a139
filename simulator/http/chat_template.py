"""How the mock engine tells a conversation as one text: a fixed chat template, in code and as Jinja."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content or '' }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""The same as `render`, as a tokenizer's configuration would carry it; content is text."""


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text of a conversation. Text parts of one message are joined by line ends, as vLLM does."""
    parts = [f"<|tools|>\n{json.dumps(tools, ensure_ascii=False)}<|end|>\n"] if tools else []
    for message in messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        parts.append(f"<|{message['role']}|>\n{text}<|end|>\n")
    if add_generation_prompt:
        parts.append("<|assistant|>\n")
    return "".join(parts)
