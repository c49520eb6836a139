"""Converts requests in Anthropic's Messages API to chats, as vLLM 0.33 and SGLang 0.5.23 do (both:
`entrypoints/anthropic/serving.py`)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvatlas.fleet.records import EngineKind
from kvatlas_router.tokens.tokenizer import CannotTokenize, Why

_BILLING = "x-anthropic-billing-header"
"""vLLM drops blocks of the system prompt that begin with this, since they differ in every request."""
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_messages(body: Mapping[str, Any], kind: EngineKind) -> dict[str, Any]:
    """The chat for a messages request. Raises CannotTokenize for anything that a router can't render as the engine
    does."""
    sglang = kind is EngineKind.SGLANG
    messages: list[dict[str, Any]] = []
    if system := _system_text(body.get("system"), sglang=sglang):
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        messages += _turns(message, sglang=sglang)
    if not messages:
        raise _unknown("messages without content")
    return {"messages": messages, **_tools(body, sglang=sglang), **_effort(body, sglang=sglang)}


def _system_text(system: Any, *, sglang: bool) -> str:
    if system is None or isinstance(system, str):
        return "" if sglang and not (system or "").strip() else system or ""
    texts = [block["text"] for block in _blocks(system) if block.get("type") == "text" and block.get("text")]
    if sglang:
        return "\n".join(texts)
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _turns(message: Any, *, sglang: bool) -> Iterator[dict[str, Any]]:
    """The chat messages made from one message, in the engine's order."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise _unknown(f"a message of role {role!r:.40} among the others")  # where it goes depends on the chat template
    content = message.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in _blocks(content):
        match block.get("type"):
            case "text" if isinstance(text := block.get("text"), str):
                if text or sglang:
                    parts.append({"type": "text", "text": text})
            case "image":
                parts.append(_image(block.get("source")))
            case "tool_use":
                calls.append(_call(block))
            case "tool_result" if role == "user":
                if sglang and parts:
                    yield {"role": role, "content": _content(parts)}
                    parts = []
                yield from _result(block, sglang=sglang)
            case "thinking" if isinstance(thought := block.get("thinking"), str) and not sglang:
                thoughts.append(thought)
            case "redacted_thinking" if not sglang:
                pass
            case other:
                raise _unknown(f"a block of type {other!r:.40}")
    turn: dict[str, Any] = {"role": role}
    if thoughts:
        turn["reasoning"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    if parts:
        turn["content"] = _content(parts)
    if role == "assistant" and sglang and not parts and not calls:
        turn["content"] = ""
    if role == "assistant" or parts:
        yield turn


def _content(parts: list[dict[str, Any]]) -> Any:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(block.get("id"), str):
        raise _unknown("a tool call without an id")  # the engine invents one
    function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
    return {"id": block["id"], "type": "function", "function": function}


def _result(block: Mapping[str, Any], *, sglang: bool) -> Iterator[dict[str, Any]]:
    """A tool's result as a separate message. vLLM puts its images after it, in a user message."""
    content = block.get("content")
    answer = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    if content is None or isinstance(content, str):
        yield {**answer, "content": content or ""}
        return
    parts: list[dict[str, Any]] = []
    for part in _blocks(content):
        match part.get("type"):
            case "text" if isinstance(text := part.get("text"), str):
                if text or not sglang:
                    parts.append({"type": "text", "text": text})
            case "image":
                parts.append(_image(part.get("source")))
            case other:
                raise _unknown(f"a tool's result of type {other!r:.40}")
    if sglang:
        yield {**answer, "content": _content(parts) if parts else ""}
        return
    yield {**answer, "content": "\n".join(part["text"] for part in parts if part["type"] == "text")}
    if images := [part for part in parts if part["type"] != "text"]:
        yield {"role": "user", "content": images}


def _image(source: Any) -> dict[str, Any]:
    if not isinstance(source, dict):
        raise _unknown("an image without a source")
    url = source.get("url") or f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tools(body: Mapping[str, Any], *, sglang: bool) -> dict[str, Any]:
    asked = body.get("tool_choice")
    kind = asked.get("type") if isinstance(asked, dict) else None
    if (tools := body.get("tools")) is None:
        return {"tool_choice": "none"} if kind == "none" else {}
    described = [_tool(tool, sglang=sglang) for tool in _blocks(tools)]
    if not described:
        return {}
    choice: Any = _TOOL_CHOICES.get(str(kind or "auto"))
    if kind == "tool":
        choice = {"type": "function", "function": {"name": asked.get("name") if isinstance(asked, dict) else None}}
    return {"tools": described, "tool_choice": choice}


def _tool(tool: Mapping[str, Any], *, sglang: bool) -> dict[str, Any]:
    if not isinstance(tool.get("input_schema"), dict):
        raise _unknown(f"a tool of type {tool.get('type')!r:.40}")  # one of Anthropic's own tools
    description = tool.get("description")
    said = {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
    function = {"name": tool.get("name"), "description": description, "parameters": tool["input_schema"]}
    if not sglang:
        return {"type": "function", "function": function | said}
    # SGLang always sets these fields, and passes every field that is set to the template
    function |= {"description": description or "", "strict": False} | said
    return {"type": "function", "function": function, "defer_loading": said.get("defer_loading")}


def _effort(body: Mapping[str, Any], *, sglang: bool) -> dict[str, Any]:
    """The fields about thinking and the output's format."""
    thinking, config = body.get("thinking"), body.get("output_config")
    mode = thinking.get("type") if isinstance(thinking, dict) else None
    if mode is not None and (sglang or mode == "disabled"):
        raise _unknown(f"thinking of type {mode!r:.40}")  # how it is rendered depends on the model
    fields: dict[str, Any] = {}
    if isinstance(config, dict) and config.get("effort") is not None:
        fields["reasoning_effort"] = "max" if sglang and config["effort"] == "xhigh" else config["effort"]
    if isinstance(config, dict) and config.get("format") is not None:
        fields["response_format"] = config["format"]
    if not sglang and body.get("chat_template_kwargs") is not None:
        fields["chat_template_kwargs"] = body["chat_template_kwargs"]
    return fields


def _blocks(content: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise _unknown("content that is not a list of objects")
    return content


def _unknown(what: str) -> CannotTokenize:
    return CannotTokenize(Why.UNSUPPORTED, f"{what}; a router can't render that as the engine does")
