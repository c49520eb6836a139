"""A router process of the peer: `python -m benchmarks.peer.dynamo.choices_process WORKERS HOLDERS SILENT HOLDING`.

HOLDING: a JSON object that maps worker numbers to their engines' event sockets; SILENT: the socket of all others. The process
is ready when its index holds what the engines published. A turn is `latency` or `rate`, and `tokens` or `hashes`.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import uvloop
from dynamo.llm import SelectionService, compute_block_hash_for_seq

from benchmarks.child_processes import take_turns
from benchmarks.peer.dynamo.queries import MODEL, signed
from benchmarks.peer.prompts import BLOCK_SIZE, PromptSource
from benchmarks.peer.turns import count_choices, time_choices

POOL = {"model_name": MODEL}
FILLED_S = 30


async def _main(workers: int, holders: int, silent: str, holding: Mapping[str, str]) -> None:
    source = PromptSource(workers, holders)
    service = SelectionService()
    for number in range(workers):
        worker = {"worker_id": number, "endpoint": f"http://w{number:03}", "block_size": BLOCK_SIZE}
        await service.upsert_worker({**POOL, **worker, "kv_events_endpoint": holding.get(str(number), silent)})
    await _wait_until_filled(service, source)
    numbers = count()

    async def book(prompt: dict[str, Any]) -> str:
        selection_id = f"request-{next(numbers)}"
        await service.select_and_reserve({**POOL, **prompt, "selection_id": selection_id})
        return selection_id

    async def finish(selection_id: str) -> None:
        await service.prefill_complete(selection_id)
        await service.free_reservation(selection_id)

    async def hashed(tokens: list[int]) -> dict[str, Any]:
        selection_id = f"hashes-{next(numbers)}"
        # the service also requires its own sequence hashes, and returns them with a reservation
        answer = await service.select_and_reserve({**POOL, "token_ids": tokens, "selection_id": selection_id})
        await service.free_reservation(selection_id)
        local_hashes = [signed(value) for value in compute_block_hash_for_seq(tokens, BLOCK_SIZE)]
        return {"block_hashes": local_hashes, "sequence_hashes": answer["sequence_hashes"], "isl_tokens": len(tokens)}

    async def turn(line: str) -> Sequence[str]:
        what, given = line.split()
        amount = 330 if what == "latency" else 512
        tokens = [prompt for prompt, _ in zip(source, range(amount), strict=False)]
        prompts = [{"token_ids": ids} if given == "tokens" else await hashed(ids) for ids in tokens]
        return [await (time_choices if what == "latency" else count_choices)(iter(prompts), book, finish)]

    await take_turns(turn)


async def _wait_until_filled(service: SelectionService, source: PromptSource) -> None:
    async with asyncio.timeout(FILLED_S):
        for prefix, depths in zip(source.prefixes, source.depths, strict=True):
            while await _depths(service, prefix) != depths:
                await asyncio.sleep(0.05)


async def _depths(service: SelectionService, tokens: list[int]) -> dict[int, int]:
    answer = await service.overlap_scores({**POOL, "token_ids": tokens})
    return {row["worker_id"]: row["device_blocks"] for row in answer["workers"] if row["device_blocks"]}


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])))
