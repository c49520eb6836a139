"""Answers in all formats in which vLLM 0.33 and SGLang 0.5.23 report cached tokens, and the same ones without these counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class CountedAnswer:
    """`path`: of the call; `prompt`: the rest of its body. `counted`: the engine's whole answer, or its stream. `uncounted`:
    what a client gets if it may not see what others asked."""

    path: str
    prompt: Mapping[str, object]
    counted: bytes
    uncounted: bytes

    @property
    def streamed(self) -> bool:
        return not self.counted.startswith((b"{", b"["))


_CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
_SAID = rb"say \"usage\": {\"cached_tokens\": 4} \\"
_CALL = b'{"usage":{"cached_tokens":7},"cache":{"cached_tokens":7}}'
"""A model's text, and a tool's arguments: these are not the engine's counts."""
DONE = b"data: [DONE]\n\n"


def _part(path: str, prompt: Mapping[str, object], text: bytes, before: bytes, after: bytes) -> CountedAnswer:
    """`text`: the answer with a mark where the counts are."""
    return CountedAnswer(path, prompt, text.replace(b"@", before), text.replace(b"@", after))


def _choice(form: bytes) -> bytes:
    return b'{"index":0,"text":"%s","message":{"content":"%s"},"delta":{"content":"%s"},%s}' % (
        _SAID,
        _SAID,
        _SAID,
        form,
    )


_END = b'"finish_reason":"stop"'
_OPEN = b'"finish_reason":null'
_USAGE = b'"prompt_tokens":9,"completion_tokens":2,"total_tokens":11'
_RESPONSE = (
    b'{"id":"resp_1","object":"response","prompt_cache_key":"mine","tools":[{"parameters":' + _CALL + b"}],"
    b'"metadata":{"cached":"7"},"output":[{"text":"'
    + _SAID
    + b'"}],"usage":{"input_tokens":9,"input_tokens_details":{@},'
    b'"output_tokens":2,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":11}}'
)
_RESPONSES = (
    (
        b'"cached_tokens":4,"cache_write_tokens":5,"input_tokens_per_turn":[9],"cached_tokens_per_turn":[4]',
        b'"cached_tokens":null,"cache_write_tokens":null,"input_tokens_per_turn":[9],"cached_tokens_per_turn":null',
    ),
    (b'"cached_tokens": 4', b'"cached_tokens": null'),
)
_MESSAGE = (
    b'{"id":"msg_1","type":"message","role":"assistant","content":[{"type":"text","text":"' + _SAID + b'"},'
    b'{"type":"tool_use","id":"t","name":"f","input":' + _CALL + b'}],"stop_reason":"end_turn","usage":{@}}'
)
_MESSAGES = (
    (
        b'"input_tokens":3,"output_tokens":2,"cache_creation_input_tokens":2,"cache_read_input_tokens":4',
        b'"input_tokens":9,"output_tokens":2',
    ),
    (
        b'"cache_read_input_tokens": 4, "cache_creation_input_tokens": null, "input_tokens": 5, "output_tokens": 2',
        b'"input_tokens": 9, "output_tokens": 2',
    ),
    (b'"input_tokens":9,"output_tokens":2', b'"input_tokens":9,"output_tokens":2'),
)
_DETAILS = (
    (b'"prompt_tokens_details":{"cached_tokens":4}', b'"prompt_tokens_details":{"cached_tokens":null}'),
    (
        b'"prompt_tokens_details": {"cached_tokens": 4, "created_cache_tokens": 5, "multimodal_tokens": null}',
        b'"prompt_tokens_details": {"multimodal_tokens": null}',
    ),
    (
        b'"reasoning_tokens":0,"prompt_tokens_details":{"image_tokens":1,"cached_tokens":4,"created_cache_tokens":5}',
        b'"reasoning_tokens":0,"prompt_tokens_details":{"image_tokens":1}',
    ),
    (b'"prompt_tokens_details":null', b'"prompt_tokens_details":null'),
)
_EXTENSION = (
    b'"sglext":{"cached_tokens_details":{"device":3,"host":1,"storage_backend":"}]\\""},"input_ids":[1,2]}',
    b'"sglext":{"input_ids":[1,2]}',
)
_META = (
    b'"meta_info":{"id":"a","prompt_tokens":9,"output_token_logprobs":[[-0.1,5,"cache"]],"cached_tokens":4,'
    b'"cached_tokens_details":{"device":3,"host":1},"completion_tokens":2,"finish_reason":%s,"cached_tokens":4}',
    b'"meta_info":{"id":"a","prompt_tokens":9,"output_token_logprobs":[[-0.1,5,"cache"]],'
    b'"completion_tokens":2,"finish_reason":%s}',
)


def _generated(finish: bytes) -> tuple[bytes, bytes]:
    form = b'{"text":"' + _SAID + b'","output_ids":[1,2],'
    counted, uncounted = (form + meta % finish + b"}" for meta in _META)
    return counted, uncounted


def _events(*datas: bytes, named: bool = False) -> bytes:
    name = b"event: message_delta\n" if named else b""
    return b"".join(name + b"data: " + data + b"\n\n" for data in datas)


def _answers() -> list[CountedAnswer]:
    answers: list[CountedAnswer] = []
    for path, prompt in (("/v1/chat/completions", _CHAT), ("/v1/completions", {"prompt": "Hi"})):
        for details in (*_DETAILS, _EXTENSION):
            inner, outer = (b"", b"," + b"@") if details is _EXTENSION else (b",@", b"")
            usage = b'"usage":{' + _USAGE + inner + b"}" + outer
            whole = b'{"id":"a","choices":[' + _choice(_END) + b"]," + usage + b"}"
            first = b'{"id":"a","choices":[' + _choice(_OPEN) + b"]," + usage + b"}"
            last = b'{"id":"a","choices":[],' + usage + b"}"
            answers.append(_part(path, prompt, whole, *details))
            answers.append(_part(path, prompt, _events(first, whole, last) + DONE, *details))
    for details in _RESPONSES:
        created = b'{"type":"response.created","response":{"id":"resp_1","usage":null}}'
        said = b'{"type":"response.output_text.delta","delta":"' + _SAID + b'"}'
        completed = b'{"type":"response.completed","response":' + _RESPONSE + b"}"
        answers.append(_part("/v1/responses", {"input": "Hi"}, _RESPONSE, *details))
        answers.append(_part("/v1/responses", {"input": "Hi"}, _events(created, said, completed), *details))
    for details in _MESSAGES:
        start = b'{"type":"message_start","message":' + _MESSAGE + b"}"
        said = b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"' + _SAID + b'"}}'
        delta = b'{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{@}}'
        stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
        stream = _events(start) + _events(said) + _events(delta, named=True) + stop
        answers.append(_part("/v1/messages", {**_CHAT, "max_tokens": 2}, _MESSAGE, *details))
        answers.append(_part("/v1/messages", {**_CHAT, "max_tokens": 2}, stream, *details))
    end = b'{"type":"stop"}'
    counted, uncounted = _generated(end)
    answers.append(CountedAnswer("/generate", {"text": "Hi"}, counted, uncounted))
    first_counted, first_uncounted = _generated(b"null")
    answers.append(
        CountedAnswer(
            "/generate",
            {"text": "Hi"},
            _events(first_counted, counted) + DONE,
            _events(first_uncounted, uncounted) + DONE,
        )
    )
    return answers


ANSWERS: Final = _answers()
