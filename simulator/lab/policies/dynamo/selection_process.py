"""Dynamo's `SelectionService` over stdin and stdout: a standalone file, run by the Python that has `ai-dynamo-runtime`.

It uses only the standard library and what that package installs. The first line is {workers: {number: event socket},
block_tokens}; the answer is {ready: true}. Each later line is a list of calls, in order:

- ["choose", id, contents, tokens, mark, engines]: the answer is the engine's number. `contents`: one token id per block,
  which stands for `block_tokens` tokens. The choice first waits for the events of these engines, until they hold a block of
  `mark`.
- ["prefilled", id], ["finished", id].
- ["set_up", engine, up]: an engine starts or stops taking requests.
"""

import asyncio
import json
import sys
from itertools import repeat

from dynamo.llm import SelectionService

POOL = {"model_name": "lab-model"}
EVENTS_S = 30.0


class _Selection:
    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._service = SelectionService()

    async def add_worker(self, number: int, events: str) -> None:
        worker = {"worker_id": number, "endpoint": f"http://w{number}", "kv_events_endpoint": events}
        await self._service.upsert_worker({**POOL, **worker, "block_size": self._block_tokens})

    async def choose(self, id: str, contents: list[int], tokens: int, mark: list[int], engines: list[int]) -> int:
        await self._wait_for(mark, engines)
        token_ids = [content for content in contents for _ in repeat(None, self._block_tokens)][:tokens]
        answer = await self._service.select_and_reserve({**POOL, "token_ids": token_ids, "selection_id": id})
        return int(answer["worker_id"])

    async def set_up(self, number: int, up: bool) -> None:
        status = "ready" if up else "draining"
        await self._service.patch_worker(number, {"status": status})

    async def prefilled(self, id: str) -> None:
        await self._service.prefill_complete(id)

    async def finished(self, id: str) -> None:
        await self._service.free_reservation(id)

    async def _wait_for(self, mark: list[int], engines: list[int]) -> None:
        missing = set(engines)
        async with asyncio.timeout(EVENTS_S):
            while missing:
                answer = await self._service.overlap_scores({**POOL, "token_ids": mark})
                missing -= {row["worker_id"] for row in answer["workers"] if row["device_blocks"]}
                if missing:
                    await asyncio.sleep(0)


async def _main() -> None:
    fleet = json.loads(sys.stdin.readline())
    selection = _Selection(fleet["block_tokens"])
    for number, events in fleet["workers"].items():
        await selection.add_worker(int(number), events)
    print(json.dumps({"ready": True}), flush=True)
    while line := sys.stdin.readline():  # nothing else has to run in the meantime: the service has its own threads
        for name, *args in json.loads(line):
            answer = await getattr(selection, name)(*args)
            if answer is not None:
                print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
