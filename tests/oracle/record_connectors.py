"""Records what vLLM's own engine core publishes and reuses with an offloading connector, while it is reset and put to sleep.

It runs under a Python that has vLLM and needs nothing of this project: `python record_connectors.py FOLDER < configs.jsonl`.
The scheduler, KV cache manager, connector's scheduler side, `sleep`, `pause_scheduler` and `reset_prefix_cache` are vLLM's.
The executor computes nothing, and its workers report each copy between device and host a few steps late.

A config: {"name", "connector", "extra", "groups", "pool", "asks", "seed"}. `connector`: vLLM's class, or null; `extra`: its
`kv_connector_extra_config`; `groups`: as in `record.py`; `pool`: blocks of the device. The format of a recording is that of
`record.py`; `far` of a prompt's reused tokens came from the connector.
"""

import base64
import gzip
import json
import os
import random
import sys
import tempfile
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import msgspec
import vllm
from record import spec_of
from vllm.config import KVTransferConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata

MODEL_TOKENS = 2_560
MOST_LATE = 3
"""Maximum number of steps that a copy takes."""
HOST_SHARE = 2
"""The host has this many times the device's blocks, unless the config says otherwise."""


class Copies:
    """The worker side of either connector: jobs, and the steps until each is reported."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._loads: dict[int, tuple[int, list[str]]] = {}
        self._stores: dict[int, int] = {}
        self._is_simple = False

    def step(self, meta: Any) -> KVConnectorOutput | None:
        """One step's output, with the jobs that are due."""
        flushed: set[int] = set()
        if isinstance(meta, OffloadingConnectorMetadata):
            flushed = set(meta.jobs_to_flush or ())
            for job, transfer in meta.load_jobs.items():
                self._loads[job] = (0 if transfer.sync else self._late(), [] if transfer.sync else [transfer.req_id])
            self._stores |= {job: self._late() for job in meta.store_jobs}
        elif isinstance(meta, SimpleCPUOffloadMetadata):
            self._is_simple = True
            if meta.load_event >= 0:
                self._loads[meta.load_event] = (self._late(), list(meta.load_event_to_reqs[meta.load_event]))
            if meta.store_event >= 0:
                self._stores[meta.store_event] = self._late()
            if meta.need_flush:
                flushed = set(self._stores)
        loaded = [job for job, (late, _) in self._loads.items() if not late or job in flushed]
        stored = [job for job, late in self._stores.items() if not late or job in flushed]
        received = {one for job in loaded for one in self._loads.pop(job)[1]}
        for job in stored:
            del self._stores[job]
        self._loads = {job: (late - 1, requests) for job, (late, requests) in self._loads.items()}
        self._stores = {job: late - 1 for job, late in self._stores.items()}
        if not loaded and not stored:
            return None
        done: Any = SimpleCPUOffloadWorkerMetadata(dict.fromkeys(stored, 1))
        if not self._is_simple:
            done = OffloadingWorkerMetadata(dict.fromkeys((*loaded, *stored), 1))
        return KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=done)

    def _late(self) -> int:
        return self._chance.randint(0, MOST_LATE)


class StubExecutor(Executor):  # type: ignore[misc]
    """One worker that computes nothing: each request gets one token per step once its prompt is computed."""

    config: dict[str, Any]
    chance: random.Random

    def _init_executor(self) -> None:
        self._copies = Copies(self.chance)
        self._computed: dict[str, int] = {}
        self._wanted: dict[str, int] = {}

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **_: Any) -> Any:
        blocks = self.config["pool"] * HOST_SHARE
        answers: dict[Any, Any] = {
            "get_kv_cache_spec": {f"layer{i}": spec_of(one)[0] for i, one in enumerate(self.config["groups"])},
            "get_supported_kv_cache_layouts": ["NHD"],
            "determine_available_memory": 1 << 40,
            "get_supported_tasks": ("generate",),
            "get_simple_cpu_offload_num_cpu_blocks": self.config["extra"].get("num_cpu_blocks", blocks),
        }
        return [answers.get(method)]

    def compile_or_warm_up_model(self) -> None:
        pass

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
            self._wanted[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids or ())
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._computed[request_id] = computed
        scheduled = scheduler_output.num_scheduled_tokens
        sampled = []
        for request_id, count in scheduled.items():
            self._computed[request_id] += count
            is_done = self._computed[request_id] >= self._wanted[request_id]
            self._wanted[request_id] += is_done and self._computed[request_id] >= self._wanted[request_id]
            sampled.append([self.chance.randrange(500)] if is_done else [])
        output = ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={request_id: place for place, request_id in enumerate(scheduled)},
            sampled_token_ids=sampled,
            kv_connector_output=self._copies.step(scheduler_output.kv_connector_metadata),
        )
        done: Future[ModelRunnerOutput] = Future()
        done.set_result(output)
        return done if non_block else output


class Publisher:
    """Takes the batches that the scheduler publishes."""

    def __init__(self, lines: list[Any]) -> None:
        self._lines = lines
        self._seq = 0

    def publish(self, batch: Any) -> None:
        batch.data_parallel_rank = 0
        self._lines.append({"batch": base64.b64encode(msgspec.msgpack.encode(batch)).decode(), "seq": self._seq})
        self._seq += 1

    def shutdown(self) -> None:
        pass


def model_folder(folder: Path) -> Path:
    """A model's folder without weights and without a tokenizer."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MODEL_TOKENS,
        "vocab_size": 512,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engine_core(config: dict[str, Any], model: Path, chance: random.Random) -> EngineCore:
    transfer = None
    if config["connector"]:
        transfer = KVTransferConfig(
            kv_connector=config["connector"], kv_role="kv_both", kv_connector_extra_config=dict(config["extra"])
        )
    args = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=16,
        num_gpu_blocks_override=config["pool"],
        max_model_len=MODEL_TOKENS,
        max_num_batched_tokens=2_048,
        async_scheduling=False,
        enable_sleep_mode=False,
        kv_transfer_config=transfer,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        disable_hybrid_kv_cache_manager=False,
    )
    executor = type("Stub", (StubExecutor,), {"config": config, "chance": chance})
    return EngineCore(args.create_engine_config(), executor, log_stats=False)


def record(config: dict[str, Any], folder: Path, model: Path) -> None:
    """Record conversations that come back, while a few others keep decoding, between resets, pauses and sleeps of every
    kind."""
    chance = random.Random(json.dumps(config, sort_keys=True))
    core = engine_core(config, model, chance)
    block_size = core.scheduler.block_size
    lines: list[Any] = [
        {
            "config": {"eagle": False, "lookahead": core.vllm_config.num_hash_lookahead_tokens, "fork": None, **config},
            "engine": f"vllm {vllm.__version__}",
            "block_size": block_size,
        }
    ]
    core.scheduler.kv_event_publisher = publisher = Publisher(lines)
    looked_up_at = _note_lookups(core, publisher, lines)
    asked: list[list[int]] = []
    histories: list[int] = []
    alive: list[Request] = []

    def fresh(low: int, high: int) -> list[int]:
        return [chance.randrange(500) for _ in range(chance.randint(low, high))]

    def steps(most: int) -> None:
        for _ in range(most):
            if core.scheduler.has_requests():
                core.step()

    def quiet() -> None:
        """Run until all requests are over, all copies reported, and all events published."""
        core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        alive.clear()
        for _ in range(MOST_LATE + 3):
            output = core.scheduler.schedule()
            core.scheduler.update_from_output(output, core.model_executor.execute_model(output))

    for number in range(config["asks"]):
        event = chance.random()
        if event < config.get("resets", 0.08):
            _disturb(core, chance)
            quiet()
        like, shared = None, 0
        tokens = fresh(20, 900)
        if number and chance.random() < 0.8:
            like = chance.choice(histories[-60:])
            shared = chance.choice((len(asked[like]), chance.randint(1, len(asked[like]))))
            tokens = asked[like][:shared] + fresh(1, 120)
            if len(tokens) > 1_800:
                tokens, like, shared = fresh(100, 900), None, 0
        params = SamplingParams(max_tokens=chance.randint(1, 60), ignore_eos=True)
        request = Request(f"request-{number}", tokens, params, None, block_hasher=core.request_block_hasher)
        core.add_request(request)
        stats = request.prefill_stats
        for _ in range(200):
            core.step()
            if request.num_computed_tokens or request.is_finished():
                break
        first = {"like": like, "first": shared, "more": tokens[shared:], "adapter": None, "skip": False}
        lines.insert(
            looked_up_at[request.request_id],
            {"ask": first, "hit": stats.num_cached_tokens, "far": stats.num_external_cached_tokens},
        )
        asked.append(tokens)
        histories.append(number)
        alive.append(request)
        steps(chance.randint(0, 40))
        alive[:] = [one for one in alive if not one.is_finished()]
        while len(alive) > 3:
            steps(1)
            alive[:] = [one for one in alive if not one.is_finished()]
    quiet()
    with gzip.open(folder / f"{config['name']}.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _note_lookups(core: EngineCore, publisher: Publisher, lines: list[Any]) -> dict[str, int]:
    """By request, the number of lines before its prompt was last looked up. Blocks that running requests evicted earlier in
    the same step are published by then, because they can no longer be found."""
    manager, looked_up_at = core.scheduler.kv_cache_manager, {}
    look_up = manager.get_computed_blocks

    def noted(request: Request, *args: Any, **more: Any) -> Any:
        if evicted := manager.take_events():
            publisher.publish(KVEventBatch(ts=0.0, events=evicted))
        looked_up_at[request.request_id] = len(lines)
        return look_up(request, *args, **more)

    manager.get_computed_blocks = noted
    return looked_up_at


def _disturb(core: EngineCore, chance: random.Random) -> None:
    """Reset, pause or sleep, as the HTTP server would ask for it. vLLM refuses some while copies are being made, but has
    cleared a part by then."""
    with suppress(RuntimeError):
        match chance.randrange(5):
            case 0:
                core.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
            case 1:
                core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            case 2:
                core.reset_prefix_cache(reset_running_requests=False, reset_connector=chance.random() < 0.5)
            case 3:
                core.pause_scheduler(mode=chance.choice(("abort", "keep")), clear_cache=chance.random() < 0.5)
            case _:
                core.sleep(chance.choice((0, 1, 2)), mode="abort")
    if core.model_executor.is_sleeping:
        core.wake_up()
    core.resume_scheduler()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        written = model_folder(Path(place))
        for line in sys.stdin:
            record(json.loads(line), target, written)
