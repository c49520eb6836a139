"""Records what vLLM's own scheduler computes in each step: chunked prompts, reused prefixes, preemptions and priorities.

It runs under a Python that has vLLM and needs nothing of this project: `python record_schedules.py FOLDER < configs.jsonl`.
Engine core, scheduler and KV cache manager are vLLM's; the executor computes nothing.

A config: {"name", "groups", "pool", "budget", "sequences", "policy", "requests", "seed"}. `groups`: as in `record.py`; `pool`:
blocks of the device, one of which vLLM never uses; `budget` and `sequences`: the most of a step; `policy`: "fcfs" or
"priority".

A recording is one JSON object: "config", "engine", "block_size", "requests" and "steps". A request: "at" (the step before
which it arrives), "prompt" (pieces, each a number and a length), "answer" (its length), "priority", "hit" (how many of its
tokens were cached when it was first scheduled). A step: "computed" (pairs of a request and its tokens computed by then, in the
scheduler's order) and "preempted". The token at place `i` of piece `n` is `n * PIECE + i`; a request's answer is piece
`ANSWERS` + its number.
"""

import gzip
import json
import os
import random
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm
from record_connectors import StubExecutor, model_folder
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

MODEL_TOKENS = 1_200
PIECE = 10_000
ANSWERS = 100_000
PREFIXES = 6
MOST_ANSWER = 120


class Executor(StubExecutor):  # type: ignore[misc]
    """Samples the tokens of the requests' answers."""

    generated: dict[str, int]
    """By request, the tokens sampled so far."""

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        output: ModelRunnerOutput = super().execute_model(scheduler_output)
        for request_id, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if sampled:
                at = self.generated.get(request_id, 0)
                sampled[:] = [(ANSWERS + int(request_id)) * PIECE + at]
                self.generated[request_id] = at + 1
        done: Future[ModelRunnerOutput] = Future()
        done.set_result(output)
        return done if non_block else output


def engine_core(config: dict[str, Any], model: Path) -> EngineCore:
    args = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=16,
        num_gpu_blocks_override=config["pool"],
        max_model_len=MODEL_TOKENS,
        max_num_batched_tokens=config["budget"],
        max_num_seqs=config["sequences"],
        scheduling_policy=config["policy"],
        async_scheduling=False,
        disable_hybrid_kv_cache_manager=False,
    )
    executor = type(
        "Stub", (Executor,), {"config": {"extra": {}, **config}, "chance": random.Random(0), "generated": {}}
    )
    return EngineCore(args.create_engine_config(), executor, log_stats=True)


class Prompts:
    """Prompts that share prefixes, and some that go on after an earlier answer."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._prefixes = [[number, chance.randint(1, 500)] for number in range(PREFIXES)]
        self._whole: list[list[list[int]]] = []
        """By request: the pieces of its prompt and answer."""

    def next(self, answer: int) -> list[list[int]]:
        number = len(self._whole)
        own = [1_000 + number, self._chance.randint(1, 400)]
        earlier = self._chance.choice(self._whole) if self._whole and self._chance.random() < 0.4 else []
        if not earlier or sum(length for _, length in earlier) > MODEL_TOKENS // 3:
            earlier = [self._chance.choice(self._prefixes)] if self._chance.random() < 0.7 else []
        prompt = [*earlier, own]
        self._whole.append([*prompt, [ANSWERS + number, answer]])
        return prompt


def tokens_of(pieces: list[list[int]]) -> list[int]:
    return [number * PIECE + at for number, length in pieces for at in range(length)]


def record(config: dict[str, Any], folder: Path, model: Path) -> None:
    chance = random.Random(json.dumps(config, sort_keys=True))
    core = engine_core(config, model)
    scheduler = core.scheduler
    requests: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    found: list[PrefillStats] = []
    preempted: list[int] = []
    schedule, preempt = scheduler.schedule, scheduler._preempt_request
    live: dict[str, Request] = {}

    def noted_preemption(request: Request, *args: Any, **more: Any) -> None:
        preempted.append(int(request.request_id))
        preempt(request, *args, **more)

    def noted(*args: Any) -> SchedulerOutput:
        output = schedule(*args)
        computed = [[int(one), live[one].num_computed_tokens] for one in output.num_scheduled_tokens]
        if computed or preempted:  # otherwise it only reports ended requests
            steps.append({"computed": computed, "preempted": list(preempted)})
        preempted.clear()
        return output

    scheduler.schedule, scheduler._preempt_request = noted, noted_preemption
    prompts = Prompts(chance)

    def arrive() -> None:
        number, answer = len(requests), chance.randint(1, MOST_ANSWER)
        pieces, priority = prompts.next(answer), chance.randint(0, 3) if config["policy"] == "priority" else 0
        request = Request(
            str(number),
            tokens_of(pieces),
            SamplingParams(max_tokens=answer, ignore_eos=True),
            None,
            arrival_time=float(number),
            priority=priority,
            block_hasher=core.request_block_hasher,
        )
        live[request.request_id] = request
        found.append(request.prefill_stats)
        core.add_request(request)
        requests.append({"at": len(steps), "prompt": pieces, "answer": answer, "priority": priority})

    while len(requests) < config["requests"]:
        if not scheduler.has_unfinished_requests():
            arrive()  # one alone: the simulated engines begin at once
        elif chance.random() < 0.15:
            for _ in range(chance.randint(1, 5)):
                arrive()
        for _ in range(chance.choice((1, 1, 3, 20))):
            core.step()
    while scheduler.has_requests():
        core.step()
    for request, stats in zip(requests, found, strict=True):
        request["hit"] = stats.num_cached_tokens
    recording = {
        "config": config,
        "engine": f"vllm {vllm.__version__}",
        "block_size": scheduler.block_size,
        "requests": requests,
        "steps": steps,
    }
    with gzip.open(folder / f"{config['name']}.json.gz", "wt") as file:
        json.dump(recording, file, separators=(",", ":"))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        written = model_folder(Path(place))
        for line in sys.stdin:
            record(json.loads(line), target, written)
