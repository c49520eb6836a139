"""The requests: a small chat, and one with a hundred messages and a dozen tools."""

import json
import random
from typing import Any

from benchmarks.proxies.engine import MODEL

_WORDS = (
    "the",
    "cache",
    "of",
    "a",
    "worker",
    "holds",
    "blocks",
    "that",
    "no",
    "other",
    "one",
    "has",
    "computed",
    "before",
)


def small(**more: Any) -> bytes:
    """A system prompt and a question."""
    text = random.Random(7)
    messages = [_message("system", _words(text, 50)), _message("user", "How do I change my address?")]
    return _chat(messages, **more)


def with_tools() -> bytes:
    """100 messages, a third of them calls of 12 tools: 60 kB."""
    text = random.Random(7)
    parameters = {f"arg{n}": {"type": "string", "description": _words(text, 10)} for n in range(5)}
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{n}",
                "description": _words(text, 30),
                "parameters": {"type": "object", "properties": parameters},
            },
        }
        for n in range(12)
    ]
    messages = [_message("system", _words(text, 50))]
    for n in range(33):
        function = {"name": f"tool_{n % 12}", "arguments": json.dumps({"arg0": _words(text, 4)})}
        call = {"id": f"call_{n}", "type": "function", "function": function}
        messages.append(_message("user", _words(text, 50)))
        messages.append({**_message("assistant", ""), "tool_calls": [call]})
        messages.append({**_message("tool", _words(text, 80)), "tool_call_id": f"call_{n}"})
    return _chat(messages, tools=tools)


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _words(text: random.Random, count: int) -> str:
    return " ".join(text.choice(_WORDS) for _ in range(count))


def _chat(messages: list[dict[str, Any]], **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 16, **more}).encode()
