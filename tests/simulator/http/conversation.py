"""One conversation with tools, and the text that the engine's chat template makes of it."""

from typing import Any

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "a block?"}]},
]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
TEXT = "<|system|>\nBe brief.<|end|>\n<|user|>\nWhat is\na block?<|end|>\n<|assistant|>\n"
