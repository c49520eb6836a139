"""Sends one request with a real client, in its own Python, and prints what the user gets.

    python -m tests.frontends.clients CLIENT URL MODEL

It needs nothing of this project.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

SAYS = "Three workers hold it."
TEXT = f"Who holds this prefix? [[say {SAYS}]]"
CHAT: Any = [{"role": "user", "content": TEXT}]
TOOL_TEXT = 'The weather? [[say <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>]]'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def _openai(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def _anthropic(url: str) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def openai_chat(url: str, model: str) -> str:
    return str(_openai(url).chat.completions.create(model=model, messages=CHAT).choices[0].message.content)


def openai_chat_stream(url: str, model: str) -> str:
    stream = _openai(url).chat.completions.create(model=model, messages=CHAT, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def openai_completion(url: str, model: str) -> str:
    return str(_openai(url).completions.create(model=model, prompt=TEXT, max_tokens=40).choices[0].text)


def openai_tools(url: str, model: str) -> str:
    tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    asked = [{"role": "user", "content": TOOL_TEXT}]
    stream = _openai(url).chat.completions.create(model=model, messages=asked, tools=[tool], stream=True)
    calls = [call for chunk in stream if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    return "".join((call.function.name or "") + (call.function.arguments or "") for call in calls)


def openai_responses(url: str, model: str) -> str:
    return str(_openai(url).responses.create(model=model, input=TEXT, store=False).output_text)


def openai_responses_stream(url: str, model: str) -> str:
    with _openai(url).responses.stream(model=model, input=TEXT, store=False) as stream:
        return str(stream.get_final_response().output_text)


def openai_models(url: str, model: str) -> str:
    return " ".join(sorted(card.id for card in _openai(url).models.list()))


def anthropic_messages(url: str, model: str) -> str:
    return str(_anthropic(url).messages.create(model=model, messages=CHAT, max_tokens=40).content[0].text)


def anthropic_messages_stream(url: str, model: str) -> str:
    with _anthropic(url).messages.stream(model=model, messages=CHAT, max_tokens=40) as stream:
        return str(stream.get_final_text())


def anthropic_refused(url: str, model: str) -> str:
    """Refused by the router, which knows no such model."""
    import anthropic

    try:
        _anthropic(url).messages.create(model=f"no {model}", messages=CHAT, max_tokens=40)
    except anthropic.APIStatusError as error:
        return f"{error.status_code} {error.type}"
    return "no error"


def anthropic_tools(url: str, model: str) -> str:
    tool = {"name": "weather", "input_schema": PARAMETERS}
    asked = [{"role": "user", "content": TOOL_TEXT}]
    message = _anthropic(url).messages.create(model=model, messages=asked, max_tokens=60, tools=[tool])
    return " ".join(f"{part.name} {part.input['city']}" for part in message.content if part.type == "tool_use")


def litellm_chat_stream(url: str, model: str) -> str:
    import litellm

    stream = litellm.completion(
        f"hosted_vllm/{model}", messages=CHAT, api_base=f"{url}/v1", api_key="none", stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def langchain_openai_stream(url: str, model: str) -> str:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_retries=0)
    return "".join(str(chunk.content) for chunk in chat.stream(TEXT))


def langchain_anthropic(url: str, model: str) -> str:
    from langchain_anthropic import ChatAnthropic

    chat: Any = ChatAnthropic(model_name=model, base_url=url, api_key="none", max_retries=0)
    return str(chat.invoke(TEXT).text)


def aiohttp_stream(url: str, model: str) -> str:
    return asyncio.run(_aiohttp_stream(url, model))


async def _aiohttp_stream(url: str, model: str) -> str:
    import json

    import aiohttp

    said = ""
    async with aiohttp.ClientSession() as session:
        body = {"model": model, "messages": CHAT, "stream": True}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    said += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    return said


CLIENTS: dict[str, Callable[[str, str], str]] = {
    function.__name__: function
    for function in (
        openai_chat,
        openai_chat_stream,
        openai_completion,
        openai_tools,
        openai_responses,
        openai_responses_stream,
        openai_models,
        anthropic_messages,
        anthropic_messages_stream,
        anthropic_refused,
        anthropic_tools,
        litellm_chat_stream,
        langchain_openai_stream,
        langchain_anthropic,
        aiohttp_stream,
    )
}

if __name__ == "__main__":
    print(CLIENTS[sys.argv[1]](*sys.argv[2:]))
