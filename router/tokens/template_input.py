"""Messages and tools as engines pass them to a chat template: vLLM 0.33 (`renderers/chat_utils`) and SGLang 0.5.23
(`entrypoints/openai/serving_chat.py`)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvatlas_router.tokens.tokenizer import CannotTokenize, Why

MEDIA_MARK = "\ue000media\ue000"
"""Marks the place of an image in a rendered text."""
_BILLING = "x-anthropic-billing-header"
_TOOL_FIELDS = ("name", "description", "parameters")
_OPTIONAL_TOOL_FIELDS = ("strict", "defer_loading")


def vllm_message(message: Mapping[str, Any], texts: Sequence[str], *, parts: bool) -> dict[str, Any]:
    """A message with the fields that vLLM knows: texts are joined by line breaks and follow the images; with `parts`, a list in
    the original order."""
    role = message.get("role")
    if role == "system":
        texts = [kept for text in texts if (kept := _without_billing(text)) is not None]
    if not parts or role == "tool":
        texts = sorted(texts, key=lambda text: text is not MEDIA_MARK)
    listed = parts and role != "tool"
    shown: dict[str, Any] = {"role": role, "content": _parts(texts) if listed else "\n".join(texts)}
    if role == "assistant":
        if calls := _calls(message):
            shown["tool_calls"] = calls
        if (reasoning := message.get("reasoning")) is not None:
            shown |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if role == "tool" and "tool_call_id" in message:
        shown["tool_call_id"] = message["tool_call_id"]
    if role == "developer":
        shown["tools"] = message.get("tools")
    return shown | {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}


def sglang_message(message: Mapping[str, Any], texts: Sequence[str], *, parts: bool) -> dict[str, Any]:
    """A message with all its fields: texts are joined by spaces; with `parts`, a list in the original order."""
    shown = {name: value for name, value in message.items() if value is not None}
    is_list = isinstance(message.get("content"), list)
    shown["content"] = _parts(texts) if parts and is_list else " ".join(texts)
    if calls := _calls(message):
        shown["tool_calls"] = calls
    return shown


def vllm_tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools with the fields that vLLM knows, in its order. Raises CannotTokenize if the result depends on the
    engine's settings."""
    if not (tools := _listed(body.get("tools"))):
        return None
    if body.get("tool_choice") == "none":
        raise CannotTokenize(
            Why.UNSUPPORTED, "tool_choice none: whether the tools are rendered depends on the engine's settings"
        )
    return [_vllm_tool(tool) for tool in tools]


def sglang_tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools as described by the client; none, or only the required one, if `tool_choice` says so."""
    tools, choice = _listed(body.get("tools")), body.get("tool_choice")
    if not tools or choice == "none":
        return None
    if not isinstance(choice, dict):
        return tools
    name = _function(choice).get("name")
    return [tool for tool in tools if _function(tool).get("name") == name] or None


def _listed(tools: Any) -> list[Any]:
    if tools is not None and not isinstance(tools, list):
        raise CannotTokenize(Why.UNSUPPORTED, f"tools are {tools!r:.80}; expected a list")
    return tools or []


def _vllm_tool(tool: Any) -> dict[str, Any]:
    function = _function(tool)
    described = {name: function.get(name) for name in _TOOL_FIELDS}
    optional = {name: function[name] for name in _OPTIONAL_TOOL_FIELDS if function.get(name) is not None}
    return {"type": "function", "function": described | optional}


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise CannotTokenize(Why.UNSUPPORTED, f"tool is {tool!r:.80}; expected one with a function")
    return function


def _parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _without_billing(text: str) -> str | None:
    """The text without the billing line, which differs in each request of Claude Code and which vLLM drops. None if nothing is
    left."""
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2] or None


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    return [_call(call) for call in calls] if isinstance(calls, list) else []


def _call(call: Any) -> Any:
    """A tool call with its arguments as an object, since templates print them as JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        decoded = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError) as error:
        line = f"tool call arguments are {arguments!r:.80}; expected JSON"
        raise CannotTokenize(Why.UNSUPPORTED, line) from error
    return {**call, "function": {**function, "arguments": decoded}}
