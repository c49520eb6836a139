"""All of vLLM except the model: an executor that computes nothing. API server, scheduler, KV cache manager and event publisher
are vLLM's.

VLLM_TARGET_DEVICE=cpu vllm serve MODEL --distributed-executor-backend tests.frontends.engines.vllm_stub.StubExecutor
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput

from tests.frontends.engines.script import Script, Scripts

MEMORY_BYTES = 1 << 40


@dataclass(slots=True)
class _Request:
    prompt: list[int]
    script: Script
    sampling: SamplingParams
    computed: int = 0
    said: int = 0


class StubExecutor(Executor):  # type: ignore[misc]
    """Gives every request its script's tokens, one per step, once its prompt is computed."""

    def _init_executor(self) -> None:
        self._scripts = Scripts(self.model_config.model)
        self._order = [
            self._scripts.end,
            *(self._scripts.id_of(text) or 0 for text in ("}", "]", '"', "0", ":", "{", "[")),
        ]
        self._requests: dict[str, _Request] = {}
        self._step: SchedulerOutput | None = None

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Any = (),
        kwargs: Any = None,
        non_block: bool = False,
    ) -> Any:
        answer = [_ANSWERS[method](self)] if isinstance(method, str) and method in _ANSWERS else [None]
        return _done(answer) if non_block else answer

    def compile_or_warm_up_model(self) -> None:
        pass

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self._step = scheduler_output
        for request_id in scheduler_output.finished_req_ids:
            self._requests.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            prompt, sampling = list(new.prompt_token_ids or ()), new.sampling_params or SamplingParams()
            self._requests[new.req_id] = _Request(prompt, self._scripts.of(prompt), sampling, new.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._requests[request_id].computed = computed
        return _done(None) if non_block else None

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        step, masks = self._step, _masks(grammar_output)
        assert step is not None
        scheduled = step.num_scheduled_tokens
        self._wait(scheduled)
        sampled = [self._sample(request_id, scheduled[request_id], masks.get(request_id)) for request_id in scheduled]
        output = ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={request_id: place for place, request_id in enumerate(scheduled)},
            sampled_token_ids=sampled,
            logprobs=self._logprobs(list(scheduled), sampled),
            prompt_logprobs_dict=self._prompt_logprobs(list(scheduled)),
        )
        return _done(output) if non_block else output

    def _wait(self, scheduled: dict[str, int]) -> None:
        scripts = [self._requests[request_id].script for request_id in scheduled]
        if any(script.fails for script in scripts):
            raise RuntimeError("the stub was asked to fail")
        time.sleep(max((script.slow_s for script in scripts), default=0.0))

    def _sample(self, request_id: str, scheduled: int, mask: np.ndarray | None) -> list[int]:
        request = self._requests[request_id]
        request.computed += scheduled
        if request.computed < len(request.prompt) + request.said:
            return []
        answer = request.script.token_ids
        token = answer[request.said] if request.said < len(answer) else self._scripts.end
        if request.sampling.ignore_eos or request.said < request.sampling.min_tokens:
            token = answer[request.said % len(answer)] if answer else 0
        request.said += 1
        return [token if mask is None else self._allowed(mask, token)]

    def _allowed(self, mask: np.ndarray, wanted: int) -> int:
        """`wanted` if it is allowed, otherwise whatever ends a structure soonest."""
        for token in (wanted, *self._order):
            if mask[token // 32] >> (token % 32) & 1:
                return token
        word = int(np.flatnonzero(mask)[0])
        return word * 32 + next(bit for bit in range(32) if mask[word] >> bit & 1)

    def _logprobs(self, request_ids: list[str], sampled: list[list[int]]) -> LogprobsLists | None:
        widths = [self._requests[request_id].sampling.logprobs for request_id in request_ids]
        if all(width is None for width in widths):
            return None
        wide = max(width or 0 for width in widths) + 1
        tokens = [token for one in sampled for token in one]
        ids = np.array([[token, *_others(token, wide - 1)] for token in tokens], dtype=np.int32).reshape(
            len(tokens), wide
        )
        values = np.tile(-0.1 * np.arange(1, wide + 1, dtype=np.float32), (len(tokens), 1))
        return LogprobsLists(
            ids, values, np.ones(len(tokens), dtype=np.int32), [0, *np.cumsum([len(one) for one in sampled])]
        )

    def _prompt_logprobs(self, request_ids: list[str]) -> dict[str, LogprobsTensors | None]:
        found: dict[str, LogprobsTensors | None] = {}
        for request_id in request_ids:
            request = self._requests[request_id]
            width = request.sampling.prompt_logprobs
            if width is not None and request.said == 1:
                following = request.prompt[1:]
                ids = torch.tensor([[token, *_others(token, width)] for token in following], dtype=torch.int32)
                values = torch.full((len(following), width + 1), -0.5)
                found[request_id] = LogprobsTensors(ids, values, torch.ones(len(following), dtype=torch.int32))
        return found


_ANSWERS: dict[str, Callable[[StubExecutor], Any]] = {
    "get_kv_cache_spec": lambda stub: {
        "layer": FullAttentionSpec(
            block_size=stub.cache_config.block_size, num_kv_heads=2, head_size=32, dtype=torch.bfloat16
        )
    },
    "get_supported_kv_cache_layouts": lambda stub: ["NHD"],
    "determine_available_memory": lambda stub: MEMORY_BYTES,
    "get_supported_tasks": lambda stub: ("generate",),
    "add_lora": lambda stub: True,
    "remove_lora": lambda stub: True,
    "pin_lora": lambda stub: True,
    "list_loras": lambda stub: set(),
}


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _masks(grammar: GrammarOutput | None) -> dict[str, np.ndarray]:
    if grammar is None:
        return {}
    return {
        request_id: grammar.grammar_bitmask[place].view(np.uint32)
        for place, request_id in enumerate(grammar.structured_output_request_ids)
    }


def _others(token: int, count: int) -> list[int]:
    """`count` ids other than `token`."""
    return [(token + place) % 400 for place in range(1, count + 1)]
