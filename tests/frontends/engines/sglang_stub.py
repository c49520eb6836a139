"""All of SGLang except the model: HTTP server, tokenizer manager, scheduler, radix cache, sampler and event publisher are
SGLang's. The model's pass is left out, and its logits name the script's next token.

    PYTHONPATH=tests/frontends/engines/absent:. python -m tests.frontends.engines.sglang_stub --model-path MODEL ...
"""

import sys
import time
from typing import Any

import torch
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers import scheduler
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput
from sglang.srt.server_args import prepare_server_args

from tests.frontends.engines.script import Script, Scripts

LIKELY = 60.0
_computed_forward = ModelRunner.forward
_computed_generation = TpModelWorker.forward_batch_generation


class _Answers:
    """The logits of each batch: the script's next token comes first, then whatever ends a structure soonest."""

    def __init__(self, model: str) -> None:
        self._scripts = Scripts(model)
        self._order = [
            self._scripts.end,
            *(self._scripts.id_of(text) or 0 for text in ("}", "]", '"', "0", ":", "{", "[")),
        ]
        self._read: dict[str, Script] = {}
        self.wanted: list[int] = []

    def read(self, batch: Any) -> None:
        self._read = {request.rid: self._script(request) for request in batch.reqs}
        if any(script.fails for script in self._read.values()):
            raise RuntimeError("the stub was asked to fail")
        time.sleep(max((script.slow_s for script in self._read.values()), default=0.0))
        self.wanted = [self._next(self._read[request.rid], len(request.output_ids)) for request in batch.reqs]

    def _script(self, request: Any) -> Script:
        return self._read.get(request.rid) or self._scripts.of(list(request.origin_input_ids))

    def _next(self, script: Script, said: int) -> int:
        return script.token_ids[said] if said < len(script.token_ids) else self._scripts.end

    def logits(self, vocabulary: int) -> torch.Tensor:
        logits = torch.zeros(len(self.wanted), vocabulary)
        for place, token in enumerate(self._order):
            logits[:, token] = LIKELY / 2 - place
        for row, token in enumerate(self.wanted):
            logits[row, token] = LIKELY
        return logits


def run_scheduler(server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's scheduler process, without the model's pass."""
    answers = _Answers(server_args.model_path)

    def generation(self: TpModelWorker, batch: Any, *rest: Any, **named: Any) -> Any:
        answers.read(batch)
        return _computed_generation(self, batch, *rest, **named)

    def forward(self: ModelRunner, forward_batch: Any, *rest: Any, **named: Any) -> Any:
        logits = answers.logits(self.model_config.vocab_size)
        if forward_batch.return_logprob:
            output = _computed_forward(self, forward_batch, *rest, **named)  # the prompt's own logprobs
            output.logits_output.next_token_logits = logits
            return output
        return ModelRunnerOutput(LogitsProcessorOutput(logits), can_run_graph=False)

    TpModelWorker.forward_batch_generation = generation
    ModelRunner.forward = forward
    return scheduler.run_scheduler_process(server_args, *args, **kwargs)


if __name__ == "__main__":
    launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=run_scheduler)
