"""Records what vLLM's own KV cache manager publishes and reuses, in the format of `tests/data/hybrid-recordings`.

It runs under a Python that has vLLM and needs nothing of this project: `python record.py FOLDER < configs.jsonl`. No model, no
GPU: requests are admitted, prefilled in chunks, decoded and freed as the scheduler does it, by the KV cache manager alone.

A config: {"name", "groups", "pool", "retention", "eagle", "lookahead", "fork", "asks", "seed"}, and perhaps "images", "dcp"
and "mixed".
A group is KIND[:SIZE][@BLOCK][=][!] with the kinds full, mla, swa, chunked and mamba, `=` if each rank of decode context
parallelism has all of it, and `!` if it contains draft layers. `fork`: null (requests continue where an earlier one ended),
"anywhere", or "blocks" (they fork at a block's end). `images`: there are a few images in the prompts, all with the same
placeholder token. `dcp`: ranks that share each block of full attention. `mixed`: some requests have what they find in the
cache reported (`kv_cache_report_mode: "full"`), some don't read it (`prompt_logprobs`), and the cache is reset now and then.
"""

import base64
import gzip
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import vllm
from vllm.distributed.kv_events import KVEventBatch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_dcp_kv_block_size,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

CHUNK_TOKENS = 1_024
"""Tokens computed in one step."""
PLACEHOLDER = 151_655
"""The placeholder token of all images, from Qwen2-VL."""

Media = tuple[str, int, int]
"""An image's hash, and the offset and number of its tokens."""


def spec_of(described: str) -> tuple[KVCacheSpec, bool]:
    """(spec, has draft layers) of one group."""
    drafts, replicated = described.endswith("!"), "=" in described
    kind, _, block = described.rstrip("=!").partition("@")
    kind, _, size = kind.partition(":")
    block_size = int(block or 16)
    heads: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    if replicated:
        heads["dcp_sharded"] = False
    match kind:
        case "full":
            return FullAttentionSpec(block_size, **heads), drafts
        case "mla":
            return MLAAttentionSpec(block_size, **heads), drafts
        case "swa":
            return SlidingWindowSpec(block_size, sliding_window=int(size), **heads), drafts
        case "chunked":
            return ChunkedLocalAttentionSpec(block_size, attention_chunk_size=int(size), **heads), drafts
        case "mamba":
            shapes, dtypes = ((8, 8),), (torch.float16,)
            return MambaSpec(block_size, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align"), drafts
    raise ValueError(f"group {described!r}; expected full, mla, swa, chunked or mamba")


class Engine:
    """Uses the KV cache manager as a scheduler does, for one request at a time and a few that keep decoding meanwhile."""

    def __init__(self, config: dict[str, Any]) -> None:
        groups = []
        for i, described in enumerate(config["groups"]):
            spec, drafts = spec_of(described)
            groups.append(KVCacheGroupSpec([f"layer{i}"], spec, is_eagle_group=drafts))
        dcp = config.get("dcp", 1)
        sizes = [resolve_dcp_kv_block_size(group.kv_cache_spec, dcp) for group in groups]
        self.block_size = math.lcm(*sizes)
        self.hash_block_size = math.gcd(*sizes)
        self.lookahead = config["lookahead"]
        self.has_mamba = any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
        self.drops = config["eagle"] and not self.lookahead
        self.hasher = get_request_block_hasher(self.hash_block_size, sha256_cbor, self.lookahead)
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=config["pool"],
                kv_cache_tensors=[],
                kv_cache_groups=groups,
                prefix_cache_retention_interval=config["retention"],
            ),
            max_model_len=1 << 20,
            scheduler_block_size=self.block_size,
            hash_block_size=self.hash_block_size,
            max_in_flight_tokens=CHUNK_TOKENS,
            use_eagle=self.drops,
            num_hash_lookahead_tokens=self.lookahead,
            enable_kv_cache_events=True,
            dcp_world_size=dcp,
        )
        self.running: list[Request] = []
        self.made = 0

    def admit(
        self, tokens: list[int], media: list[Media], out: "Recording", params: SamplingParams
    ) -> tuple[Request, int]:
        """Admit a new request. Returns it, and the number of its tokens that are reused."""
        self.made += 1
        request = Request(
            f"request-{self.made}",
            tokens,
            params,
            None,
            mm_features=[
                MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
                for name, offset, length in media
            ],
            block_hasher=self.hasher,
        )
        self.manager.new_step_starts()
        blocks, hit, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        new: Any = blocks
        computed = hit
        while computed < len(tokens):
            end = self._chunk_end(request, computed, len(tokens))
            self.manager.new_step_starts()
            while self.manager.allocate_slots(request, end - computed, computed if new else 0, new) is None:
                self._free_oldest(out)
            computed = request.num_computed_tokens = end
            new = None
            out.batch(self.manager.take_events())
        self.running.append(request)
        return request, hit

    def _chunk_end(self, request: Request, start: int, length: int) -> int:
        """Chunks of mamba models end where a state is to be cached: see `Scheduler._mamba_block_aligned_split`."""
        end = min(start + CHUNK_TOKENS, length)
        if not self.has_mamba:
            return end
        size = self.block_size
        last = (length - 1) // size * size - (size if self.drops else 0)
        stops = [last, request.shared_prefix_boundary // size * size]
        if end < length:
            stops.append(end // size * size)
        return min((stop for stop in stops if start < stop < end), default=end)

    def decode(self, request: Request, tokens: list[int], out: "Recording") -> None:
        for token in tokens:
            request.append_output_token_ids(token)
            self.manager.new_step_starts()
            while self.manager.allocate_slots(request, 1) is None:
                self._free_oldest(out)
                if request not in self.running:
                    return
            request.num_computed_tokens += 1
        out.batch(self.manager.take_events())

    def _free_oldest(self, out: "Recording") -> None:
        if not self.running:
            raise RuntimeError("the pool is too small for one request")
        self.manager.free(self.running.pop(0))
        out.batch(self.manager.take_events())

    def reset(self, out: "Recording") -> None:
        self.free_all_but(0, out)
        if not self.manager.reset_prefix_cache():
            raise RuntimeError("blocks are in use")
        out.batch(self.manager.take_events())

    def free_all_but(self, count: int, out: "Recording") -> None:
        while len(self.running) > count:
            self._free_oldest(out)


class Recording:
    """The lines of one file."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.lines = [head]
        self.path = path
        self.seq = 0

    def batch(self, events: list[Any]) -> None:
        if events:
            payload = msgspec.msgpack.encode(KVEventBatch(float(self.seq), events, data_parallel_rank=0))
            self.lines.append({"batch": base64.b64encode(payload).decode(), "seq": self.seq})
            self.seq += 1

    def ask(
        self, at: int, like: int | None, first: int, more: list[int], media: list[Media], skip: bool, hit: int
    ) -> None:
        """Record a prompt that was asked before the batches from line `at` on."""
        ask: dict[str, Any] = {"like": like, "first": first, "more": more, "adapter": None, "skip": skip}
        if media:
            ask["media"] = media
        self.lines.insert(at, {"ask": ask, "hit": hit, "far": 0})

    def write(self) -> None:
        with gzip.open(self.path, "wt") as file:
            file.writelines(json.dumps(line) + "\n" for line in self.lines)


def _common(a: list[int], b: list[int]) -> int:
    """Number of leading tokens that two prompts share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def record(config: dict[str, Any], folder: Path) -> None:
    """Record sessions that come back with what they had and more, some of them forking, while a few others keep decoding."""
    chance = random.Random(json.dumps(config, sort_keys=True))
    engine = Engine(config)
    head = {"config": config, "engine": f"vllm {vllm.__version__}", "block_size": engine.hash_block_size}
    out = Recording(folder / f"{config['name']}.jsonl.gz", head)
    asked: list[list[int]] = []
    histories: list[tuple[int, list[int], list[Media]]] = []  # (ask, its prompt and output, its images)

    def fresh(low: int, high: int) -> list[int]:
        return [chance.randrange(150_000) for _ in range(chance.randint(low, high))]

    def with_images(tokens: list[int], start: int) -> list[Media]:
        """Put some images after `start`, in order."""
        media = []
        for _ in range(chance.randint(0, 2) if config.get("images") else 0):
            start = chance.randint(start, len(tokens))
            length = chance.randint(10, 150)
            tokens[start:start] = [PLACEHOLDER] * length
            media.append((f"{chance.randrange(4):064x}", start, length))
            start += length
        return media

    system = fresh(200, 900)
    for number in range(config["asks"]):
        like: int | None = None
        media: list[Media] = []
        if number and chance.random() < 0.85:
            like, history, seen = chance.choice(histories[-12:])
            if config["fork"] is None or chance.random() < 0.4:
                first = len(history)
            else:
                first = chance.randint(1, len(history))
                if config["fork"] == "blocks":
                    first -= first % engine.block_size
            tokens = history[:first] + fresh(1, 300)
            media = [one for one in seen if one[1] + one[2] <= first] + with_images(tokens, first)
        else:
            tokens = (system if chance.random() < 0.5 else []) + fresh(20, 2_500)
            media = with_images(tokens, 0)
        if len(tokens) > 5_000:
            tokens, like, media = fresh(100, 1_500), None, []
        if chance.random() < 0.1 and len(tokens) > 2 * engine.block_size:
            del tokens[len(tokens) // engine.block_size * engine.block_size :]  # a prompt of whole blocks
            media = [one for one in media if one[1] + one[2] <= len(tokens)]
        shared = _common(tokens, asked[like]) if like is not None else 0
        before = len(out.lines)
        params = SamplingParams(max_tokens=10_000)
        if config.get("mixed"):
            if chance.random() < 0.02:
                engine.reset(out)
                before = len(out.lines)
            mode = chance.choice(("full", "incremental", "skip"))
            params = SamplingParams(
                max_tokens=10_000,
                prompt_logprobs=1 if mode == "skip" else None,
                extra_args={"kv_cache_report_mode": mode},
            )
        request, hit = engine.admit(tokens, media, out, params)
        skips = request.skip_reading_prefix_cache
        out.ask(before, like if shared else None, shared, tokens[shared:], media, bool(skips), hit)
        asked.append(tokens)
        output = fresh(1, 120)
        engine.decode(request, output, out)
        histories.append((len(asked) - 1, tokens + output, media))
        engine.free_all_but(chance.randint(0, 3), out)
    out.write()


if __name__ == "__main__":
    init_none_hash(sha256_cbor)
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for line in sys.stdin:
        record(json.loads(line), target)
