"""Chats with images: all their tokens come from an engine that renders them, otherwise only those before the first image."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from kvatlas.blocks.media import MediaItem
from kvatlas.identity import Scope
from kvatlas_router.tokens import (
    Api,
    BudgetedTokenizer,
    CannotTokenize,
    PromptTokens,
    TextRequest,
    TokenizerBudget,
    Why,
)
from kvatlas_router.tokens.chat_template import ChatTemplate
from kvatlas_router.tokens.engine_tokenizer import EngineTokenizer
from kvatlas_router.tokens.local_tokenizer import LocalTokenizer
from kvatlas_router.tokens.prompt_reader import MEDIA_TOKENS, PromptReader
from router_client.chain_cache import ChainCache
from tests.router.tokens.small_model import CHATML, trained
from tests.router.upstream.nearby_engines import engine_client

pytestmark = pytest.mark.anyio

RENDER, TOKENIZE = "/v1/chat/completions/render", "/tokenize"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SYSTEM = {"role": "system", "content": "The cache holds blocks."}
ASKED: list[dict[str, Any]] = [
    SYSTEM,
    {"role": "user", "content": [{"type": "text", "text": "Which block "}, IMAGE, {"type": "text", "text": " is it?"}]},
]
NAME = "9f" * 32

RENDERED = {
    "request_id": "chatcmpl-8b531287d157e760",
    "token_ids": [*range(1, 6), *[151655] * 20, *range(6, 13)],
    "token_offsets": None,
    "features": {
        "mm_hashes": {"image": [NAME]},
        "mm_placeholders": {"image": [{"offset": 5, "length": 20}]},
        "kwargs_data": None,
        "mm_metadata": None,
    },
    "content_parts": None,
    "sampling_params": {"stop": [], "stop_token_ids": [], "max_tokens": 5, "bad_words": []},
    "model": "m",
    "output_mode": "tokens",
    "stream": False,
    "cache_salt": None,
    "priority": 0,
}
"""vLLM 0.33's own GenerateRequest, as JSON."""


@dataclass
class Engine:
    """Answers POSTs with (status, body) by path; other paths get a 404. `asked`: what it was sent."""

    url: str
    answers: Mapping[str, tuple[int, Any]]
    asked: list[tuple[str, Any]] = field(default_factory=list)


@contextmanager
def engine(answers: Mapping[str, tuple[int, Any]]) -> Iterator[Engine]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            served.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
            status, body = answers.get(self.path, (404, {}))
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served = Engine(f"http://127.0.0.1:{server.server_port}", answers)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def chat(messages: Sequence[dict[str, Any]], **more: Any) -> TextRequest:
    return TextRequest(Api.CHAT, {"model": "m", "messages": messages, **more})


def of(*engines: Engine) -> Any:
    async def urls(_: TextRequest) -> Sequence[str]:
        return [one.url for one in engines]

    return urls


async def test_an_engine_that_renders_chats_gives_all_tokens_and_the_hashes_of_the_images() -> None:
    async with engine_client() as client:
        with engine({RENDER: (200, RENDERED)}) as one:
            found = await EngineTokenizer(client, of(one)).token_ids(chat(ASKED, stream=True, temperature=0))
        assert found == PromptTokens(RENDERED["token_ids"], [MediaItem(NAME, 5, 20)])  # type: ignore[arg-type]
        [(path, body)] = one.asked
        assert path == RENDER and body["messages"] == ASKED and "stream" not in body
        assert (body["mm_payload"], body["return_mm_kwargs"]) == ("none", False), "no tensors in the answer"


@pytest.mark.parametrize("status", [403, 404, 405, 501])
async def test_an_engine_that_does_not_is_asked_for_the_messages_before_the_first_image(status: int) -> None:
    async with engine_client() as client:
        with engine({RENDER: (status, {}), TOKENIZE: (200, {"tokens": [1, 2, 3]})}) as one:
            tokenizer = EngineTokenizer(client, of(one))
            for _ in range(2):
                assert await tokenizer.token_ids(chat(ASKED)) == PromptTokens([1, 2, 3], cut=True)
            with pytest.raises(CannotTokenize, match="first message has images") as error:
                await tokenizer.token_ids(chat(ASKED[1:]))
            assert error.value.why is Why.UNSUPPORTED
        assert [path for path, _ in one.asked] == [RENDER, TOKENIZE, TOKENIZE], (
            "it is not asked to render again at once"
        )
        assert one.asked[1][1] == {"model": "m", "messages": [SYSTEM], "add_generation_prompt": False}


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        [],
        {"token_ids": [1]},
        {**RENDERED, "features": {"mm_hashes": {"image": [NAME]}, "mm_placeholders": {"image": []}}},
        {
            **RENDERED,
            "features": {"mm_hashes": {"image": [NAME]}, "mm_placeholders": {"image": [{"offset": -1, "length": 1}]}},
        },
        {**RENDERED, "features": {"mm_hashes": [NAME], "mm_placeholders": {}}},
    ],
)
async def test_a_rendered_chat_of_another_form_counts_as_none(body: Any) -> None:
    async with engine_client() as client:
        with engine({RENDER: (200, body), TOKENIZE: (200, {"tokens": [7, 8]})}) as one:
            tokenizer = EngineTokenizer(client, of(one))
            for _ in range(2):
                assert await tokenizer.token_ids(chat(ASKED)) == PromptTokens([7, 8], cut=True)
        assert [path for path, _ in one.asked] == [RENDER, TOKENIZE, TOKENIZE]


PARTS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}" + (
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PARTS, "<|im_start|>system\nThe cache holds blocks.<|im_end|>\n<|im_start|>user\nWhich block "),
        (CHATML, "<|im_start|>system\nThe cache holds blocks.<|im_end|>\n<|im_start|>user\n"),
    ],
)
def test_a_local_tokenizer_has_the_text_before_the_first_image(template: str, text: str) -> None:
    """A template without parts gets the images before a message's text, as in vLLM."""
    assert ChatTemplate({"default": template}).render(chat(ASKED)) == text
    tokenizer = LocalTokenizer(trained(), ChatTemplate({"default": template}))
    found = tokenizer.prompt_tokens(chat(ASKED))
    assert found.cut and not found.media
    assert list(found.ids) == trained().encode(text, add_special_tokens=False).ids
    with pytest.raises(CannotTokenize, match="expected text"):
        tokenizer.encode(chat(ASKED))


def test_a_template_that_leaves_the_images_out_tells_no_tokens() -> None:
    tokenizer = LocalTokenizer(trained(), ChatTemplate({"default": "{{ messages[0].content }}"}))
    with pytest.raises(CannotTokenize, match="the images are not in its text") as error:
        tokenizer.encode(chat(ASKED))
    assert error.value.why is Why.UNSUPPORTED


@pytest.mark.parametrize(
    ("part", "items"),
    [
        (IMAGE, 1),
        ({"image_url": "http://a"}, 1),
        ({"type": "input_audio", "input_audio": {}}, 1),
        ({"type": "video_url", "video_url": {}}, 1),
        ({"type": "text", "text": "image"}, 0),
        ({"type": "thinking"}, 0),
        ("image", 0),
    ],
)
def test_which_parts_of_a_message_are_media(part: Any, items: int) -> None:
    assert chat([{"role": "user", "content": [part]}, SYSTEM, "x"]).media_items == items  # type: ignore[list-item]


class Fixed:
    """A caller's own tokenizer."""

    def __init__(self, tokens: PromptTokens) -> None:
        self.tokens = tokens

    async def token_ids(self, request: TextRequest) -> PromptTokens:
        return self.tokens


@pytest.mark.parametrize("salt", [None, "acme"])
async def test_a_prompt_has_its_images_or_ends_before_the_first_with_its_length_a_guess(salt: str | None) -> None:
    request, scope = chat(ASKED, cache_salt=salt), Scope("m", "m")
    media = [MediaItem(NAME, 5, 20)]
    budget = TokenizerBudget(deadline_ms=20_000)
    whole = BudgetedTokenizer(Fixed(PromptTokens([1, 2, 3], media)), budget)
    read = await PromptReader(whole, ChainCache()).read(request, scope)
    assert (read.prompt_tokens, read.prompt.media, read.prompt.is_whole) == (3, media, True)
    assert read.prompt.extra_keys == (None if salt is None else ((salt,),))
    cut = BudgetedTokenizer(Fixed(PromptTokens([1, 2, 3], cut=True)), budget)
    read = await PromptReader(cut, ChainCache()).read(request, scope)
    assert (read.prompt_tokens, read.untokenized, list(read.prompt.tokens or ())) == (None, "media", [1, 2, 3])
    assert read.prompt.input_tokens > MEDIA_TOKENS and not read.prompt.is_whole
    with pytest.raises(CannotTokenize, match="more than text"):
        await cut.token_ids(request)
