"""Answers of the other APIs, complete or streamed, in the format of vLLM 0.33 (`/generate`: SGLang 0.5.23)."""

from collections.abc import Iterator
from typing import Any

from kvatlas_router.tokens import Api
from kvatlas_simulator.engine.generation_request import GeneratedToken
from kvatlas_simulator.engine.tokenizer import decode
from kvatlas_simulator.http.completion_response import (
    DONE,
    Answer,
    ChatResponse,
    CompletionResponse,
    server_sent_event,
)


class MessagesResponse(CompletionResponse):
    """Anthropic's message, which counts cached tokens separately."""

    id_prefix = "msg"

    def _whole(self, choices: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        content = [{"type": "text", "text": decode(answer.token_ids[0])}]
        return self._message(content, self._usage(answer), "max_tokens")

    def _events(self, token: GeneratedToken, answer: Answer, *, begins: bool, first: bool) -> Iterator[bytes]:
        if begins:
            message = self._message([], {**self._usage(answer), "output_tokens": 0}, None)
            yield _named("message_start", message=message)
            yield _named("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield _named("content_block_delta", index=0, delta={"type": "text_delta", "text": decode([token.token_id])})

    def _end_events(self, answer: Answer) -> Iterator[bytes]:
        yield _named("content_block_stop", index=0)
        delta = {"stop_reason": "max_tokens", "stop_sequence": None}
        yield _named("message_delta", delta=delta, usage=self._usage(answer))
        yield _named("message_stop")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any], stop: str | None) -> dict[str, Any]:
        return {
            "id": self._completion_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._model,
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(self, answer: Answer) -> dict[str, Any]:
        return {
            "input_tokens": len(self._request.prompt) - answer.cached_tokens,
            "output_tokens": sum(map(len, answer.token_ids)),
            "cache_read_input_tokens": answer.cached_tokens,
        }


class ResponsesResponse(CompletionResponse):
    """OpenAI's response."""

    id_prefix = "resp"

    def _whole(self, choices: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        return self._response(answer, _status(answer))

    def _events(self, token: GeneratedToken, answer: Answer, *, begins: bool, first: bool) -> Iterator[bytes]:
        if begins:
            begun = self._response(None, "in_progress")
            yield self._numbered("response.created", response=begun)
            yield self._numbered("response.in_progress", response=begun)
            yield self._numbered("response.output_item.added", output_index=0, item=self._item([], "in_progress"))
            part = {**self._part(""), "logprobs": []}
            yield self._numbered("response.content_part.added", **self._place, part=part)
        delta = decode([token.token_id])
        yield self._numbered("response.output_text.delta", **self._place, delta=delta, logprobs=[])

    def _end_events(self, answer: Answer) -> Iterator[bytes]:
        text, status = decode(answer.token_ids[0]), _status(answer)
        yield self._numbered("response.output_text.done", **self._place, text=text, logprobs=[])
        yield self._numbered("response.content_part.done", **self._place, part=self._part(text))
        item = self._item([self._part(text)], status)
        yield self._numbered("response.output_item.done", output_index=0, item=item)
        yield self._numbered(f"response.{status}", response=self._response(answer, status))

    def _numbered(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        named = {**fields, "sequence_number": self._number, "type": kind}
        return server_sent_event(dict(sorted(named.items())), kind)

    _number = -1

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._completion_id.replace("resp", "msg", 1), "output_index": 0, "content_index": 0}

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    def _item(self, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        said = {"content": content, "role": "assistant", "status": status, "type": "message"}
        return {"id": self._place["item_id"], **said}

    def _response(self, answer: Answer | None, status: str) -> dict[str, Any]:
        usage = None
        if answer is not None:
            prompt, output = len(self._request.prompt), sum(map(len, answer.token_ids))
            usage = {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + output,
            }
        return {
            "id": self._completion_id,
            "object": "response",
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "status": status,
            "output": [] if answer is None else [self._item([self._part(decode(answer.token_ids[0]))], status)],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        }


def _status(answer: Answer) -> str:
    return "incomplete" if "length" in answer.finish_reasons else "completed"


class GenerateResponse(CompletionResponse):
    """SGLang's own format: each event has the whole text so far, and the request's metadata."""

    id_prefix = "gen"

    def _whole(self, choices: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        return self._output(answer, "length")

    def _events(self, token: GeneratedToken, answer: Answer, *, begins: bool, first: bool) -> Iterator[bytes]:
        yield server_sent_event(self._output(answer, token.finish_reason))

    def _end_events(self, answer: Answer) -> Iterator[bytes]:
        yield DONE

    def _output(self, answer: Answer, finish: str | None) -> dict[str, Any]:
        output = answer.token_ids[0]
        reason = None if finish is None else {"type": finish, "length": len(output)}
        return {
            "text": decode(output),
            "output_ids": list(output),
            "meta_info": {
                "id": self._completion_id,
                "finish_reason": reason,
                "prompt_tokens": len(self._request.prompt),
                "completion_tokens": len(output),
                "cached_tokens": answer.cached_tokens,
            },
        }


class TokensResponse(CompletionResponse):
    """vLLM's answer as token ids."""

    id_prefix = "generate-tokens"

    def _whole(self, choices: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        listed = [
            {"index": i, "logprobs": None, "finish_reason": "length", "token_ids": list(ids)}
            for i, ids in enumerate(answer.token_ids)
        ]
        return self._output(listed, answer.usage())

    def _events(self, token: GeneratedToken, answer: Answer, *, begins: bool, first: bool) -> Iterator[bytes]:
        choice = {"index": token.choice, "finish_reason": token.finish_reason, "token_ids": [token.token_id]}
        yield server_sent_event(self._output([choice], None))

    def _end_events(self, answer: Answer) -> Iterator[bytes]:
        if self._body.include_usage:
            yield server_sent_event(self._output([], answer.usage()))
        yield DONE

    def _output(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {"request_id": self._completion_id, "output_mode": "tokens", "choices": choices, "usage": usage}


RESPONSES: dict[Api, type[CompletionResponse]] = {
    Api.COMPLETIONS: CompletionResponse,
    Api.CHAT: ChatResponse,
    Api.MESSAGES: MessagesResponse,
    Api.RESPONSES: ResponsesResponse,
    Api.GENERATE: GenerateResponse,
    Api.TOKENS: TokensResponse,
}


def _named(event: str, **fields: Any) -> bytes:
    return server_sent_event({"type": event, **fields}, event)
