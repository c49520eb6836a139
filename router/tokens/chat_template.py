"""Chat templates as `transformers` and vLLM apply them: sandboxed Jinja over a conversation's messages."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvatlas.errors import SettingsError
from kvatlas.fleet.records import EngineKind
from kvatlas_router.tokens.chat_form import rendered_by_model, template_arguments
from kvatlas_router.tokens.template_input import MEDIA_MARK, sglang_message, sglang_tools, vllm_message, vllm_tools
from kvatlas_router.tokens.text_request import TextRequest, is_media
from kvatlas_router.tokens.tokenizer import CannotTokenize, Why

_ENGINES_OWN = ("truncate_prompt_tokens", "input_ids")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class ChatTemplate:
    """A tokenizer's named templates: `tool_use` for requests with tools, `default` for all others."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens`: `bos_token` and so on, for templates that use them. Raises SettingsError for an invalid
        template."""
        self._special = dict(special_tokens or {})
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in templates.items()}
            self._wants_parts = {
                name: _loops_over_content(environment.parse(source)) for name, source in templates.items()
            }
        except jinja2.TemplateError as error:
            raise SettingsError(f"chat template: {error}") from error
        if not self._templates:
            raise SettingsError("no chat template; expected at least one")

    def render(self, request: TextRequest) -> str:
        """A chat's text; with images or other media, only the text before the first one. Raises CannotTokenize for any
        other content, or if the template refuses the chat."""
        body, sglang = request.body, request.kind is EngineKind.SGLANG
        arguments = body.get("chat_template_kwargs")
        arguments = arguments if isinstance(arguments, dict) else {}
        if body.get("chat_template") or arguments.get("chat_template"):
            raise CannotTokenize(Why.UNSUPPORTED, "the request has its own chat template")
        if (field := next((name for name in _ENGINES_OWN if body.get(name)), None)) is not None:
            raise CannotTokenize(Why.UNSUPPORTED, f"{field} is for the engine's own tokenizer")
        tools = sglang_tools(body) if sglang else vllm_tools(body)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            name = next(iter(self._templates))
        show = sglang_message if sglang else vllm_message
        texts = [_texts(message) for message in request.messages]
        messages = [
            show(message, text, parts=self._wants_parts[name])
            for message, text in zip(request.messages, texts, strict=True)
        ]
        goes_on = body.get("continue_final_message") is True
        values: dict[str, Any] = {**self._special, "tools": tools, "documents": None}
        if sglang:
            if messages[-1].get("role") == "assistant":
                raise CannotTokenize(Why.UNSUPPORTED, "SGLang continues the last answer in its own way")
            if body.get("reasoning_effort") is not None:
                raise CannotTokenize(Why.UNSUPPORTED, "reasoning_effort: its effect in SGLang depends on the model")
            values |= {**arguments, "add_generation_prompt": True}
        else:
            if (field := rendered_by_model(request)) is not None:
                raise CannotTokenize(Why.UNSUPPORTED, f"{field}: the engine renders this model in its own way")
            prompts = body.get("add_generation_prompt", True) is not False and not goes_on
            values |= {**arguments, **template_arguments(body), "add_generation_prompt": prompts}
        values["messages"] = messages
        try:
            text = self._templates[name].render(values)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise CannotTokenize(Why.FAILED, f"chat template: {' '.join(str(error).split())}") from error
        if request.media_items:
            before, found, _ = text.partition(MEDIA_MARK)
            if not found:
                raise CannotTokenize(Why.UNSUPPORTED, "chat template: the images are not in its text")
            return before
        return _up_to_final(text, messages[-1]) if goes_on else text


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    parts = [] if content is None else content if isinstance(content, list) else [content]
    return [_text(part) for part in parts]


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if is_media(part):
        return MEDIA_MARK
    kind = str(part.get("type")) if isinstance(part, dict) else type(part).__name__
    text = part.get(_TEXT_PARTS.get(kind, "")) if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise CannotTokenize(Why.UNSUPPORTED, f"a message has content of type {kind!r}; expected text")
    return text


def _up_to_final(text: str, message: Mapping[str, Any]) -> str:
    """The text up to the end of the last message, for an answer that continues that message."""
    content = message["content"]
    final = content if isinstance(content, str) else (content[-1]["text"] if content else "")
    at = text.rfind(final.strip())
    if at < 0:
        raise CannotTokenize(Why.FAILED, "chat template: the last message is not in its text")
    whole = final.lstrip()
    return text[: at + len(whole)] if text.startswith(whole, at) else text[: at + len(final.strip())]


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - as engines do
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here, only its content matters."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _loops_over_content(template: jinja2.nodes.Template) -> bool:
    """True if the template itself loops over a message's parts, so that it must get them as a list, as in vLLM."""
    names = {
        assignment.target.name
        for assignment in template.find_all(jinja2.nodes.Assign)
        if isinstance(assignment.target, jinja2.nodes.Name) and _is_content(assignment.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, jinja2.nodes.Name) and loop.iter.name in names)
        for loop in template.find_all(jinja2.nodes.For)
    )


def _is_content(node: jinja2.nodes.Node) -> bool:
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, jinja2.nodes.Getitem)
        and isinstance(node.arg, jinja2.nodes.Const)
        and node.arg.value == "content"
    )
