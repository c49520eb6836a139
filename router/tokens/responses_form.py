"""Converts requests in OpenAI's Responses API to chats, as vLLM 0.33 (`entrypoints/openai/responses/utils.py`) and SGLang
0.5.23 (`entrypoints/openai/serving_responses.py`) do."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvatlas.fleet.records import EngineKind
from kvatlas_router.tokens.tokenizer import CannotTokenize, Why

_REMEMBERED = ("previous_response_id", "conversation", "prompt", "previous_input_messages")
"""Fields that refer to content that only the engine has, or to a prompt in another form."""
_TEXTS = ("input_text", "output_text", "text")


def chat_of_responses(body: Mapping[str, Any], kind: EngineKind) -> dict[str, Any]:
    """The chat for a responses request. Raises CannotTokenize for anything that a router can't render as the engine
    does."""
    sglang = kind is EngineKind.SGLANG
    if (remembered := next((name for name in _REMEMBERED if body.get(name)), None)) is not None:
        raise _unknown(remembered)
    messages: list[dict[str, Any]] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    asked = body["input"]
    for item in [{"role": "user", "content": asked}] if isinstance(asked, str) else asked:
        _add(messages, item, sglang=sglang)
    chat: dict[str, Any] = {"messages": messages, **_tools(body, sglang=sglang)}
    if isinstance(asked, list) and isinstance(asked[-1], dict) and asked[-1].get("status") in _UNFINISHED:
        if sglang or asked[-1].get("type", "message") != "message":
            raise _unknown("an item that is not complete")
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(reasoning := body.get("reasoning"), dict):
        effort = reasoning.get("effort", "medium" if sglang else None)
        chat |= {} if effort is None else {"reasoning_effort": effort}
    if body.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    return chat


_UNFINISHED = ("in_progress", "incomplete")


def _add(messages: list[dict[str, Any]], item: Any, *, sglang: bool) -> None:
    """Add an item. An assistant's reasoning, text and calls are separate items but one message of the chat."""
    kind = item.get("type") if isinstance(item, dict) else type(item).__name__
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match kind:
        case None | "message":
            _add_message(messages, item, last, sglang=sglang)
        case "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            if item.get("namespace") or not isinstance(item.get("arguments"), str):
                raise _unknown("a call in a namespace, or without arguments")
            if last is None:
                messages.append({"role": "assistant", "tool_calls": [call]})
            else:
                last.setdefault("tool_calls", []).append(call)
        case "function_call_output":
            if not isinstance(output := item.get("output"), str):
                raise _unknown("a call's output that is not text")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        case "reasoning" if not sglang and not item.get("encrypted_content"):
            text = _first_text(item.get("content") or item.get("summary"))
            if last is None or last.get("reasoning") is not None:
                messages.append({"role": "assistant", "reasoning": text})
            else:
                last["reasoning"] = text
        case _:
            raise _unknown(f"an item of type {kind!r:.40}")


def _add_message(
    messages: list[dict[str, Any]], item: Mapping[str, Any], last: dict[str, Any] | None, *, sglang: bool
) -> None:
    role, content = item.get("role"), item.get("content")
    if role == "assistant":
        if isinstance(content, list) and len(content) > 1:
            raise _unknown("an answer of several parts")
        text = content if isinstance(content, str) else _first_text(content)
        if last is None or (last.get("content") is not None and not sglang):
            messages.append({"role": role, "content": text})
        elif sglang and (last.get("content") is not None or item.get("phase") is not None):
            raise _unknown("answers that follow each other")
        else:
            last["content"] = text
        return
    if role not in ("user", "system", "developer") or (sglang and role != "user"):
        raise _unknown(f"a message of role {role!r:.40}")  # where it goes depends on the chat template
    messages.append({"role": role, "content": content if isinstance(content, str) else _parts(content)})


def _parts(content: Any) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXTS and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            raise _unknown(f"content of type {kind!r:.40}")
    if not parts:
        raise _unknown("a message without content")
    return parts


def _first_text(content: Any) -> str:
    first = content[0] if isinstance(content, Sequence) and content else None
    if not isinstance(first, dict) or not isinstance(first.get("text"), str):
        raise _unknown("an answer without text")
    return str(first["text"])


def _tools(body: Mapping[str, Any], *, sglang: bool) -> dict[str, Any]:
    tools = []
    if not isinstance(asked := body.get("tools") or [], list):
        raise _unknown("tools that are not a list")
    for tool in asked:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise _unknown("a tool that is not a function")  # a tool that is built into the engine
        function = {name: tool[name] for name in tool if name != "type"}
        if sglang:  # it always sets these fields, and passes every field that is set to the template
            if tool.get("description") is None:
                raise _unknown("a tool without a description")
            function = {name: tool.get(name) for name in ("name", "description", "parameters")}
            function["strict"] = tool.get("strict", False)
        tools.append({"type": "function", "function": function})
    if not tools:
        return {}
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise _unknown(f"tool_choice of type {choice.get('type')!r:.40}")
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return {"tools": tools, "tool_choice": choice}


def _unknown(what: str) -> CannotTokenize:
    return CannotTokenize(Why.UNSUPPORTED, f"{what}; a router can't render that as the engine does")
