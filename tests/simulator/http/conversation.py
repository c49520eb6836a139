"""One conversation with tools, and its text by the engine's chat template."""

from typing import Any

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "a block?"}]},
]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
TEXT = "<|system|>\nBe brief.<|end|>\n<|user|>\nWhat is\na block?<|end|>\n<|assistant|>\n"
