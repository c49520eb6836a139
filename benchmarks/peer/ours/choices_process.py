"""A router process of kvatlas: `python -m benchmarks.peer.ours.choices_process REDIS_URL WORKERS HOLDERS`.

A turn is `latency` or `rate`, and `tokens` or `hashes`.
"""

import sys
from collections.abc import Sequence

import uvloop

from benchmarks.child_processes import take_turns
from benchmarks.peer.ours.pool import SCOPE
from benchmarks.peer.prompts import BLOCK_SIZE, PromptSource
from benchmarks.peer.turns import count_choices, time_choices
from kvatlas.blocks.hashing import extend_chain
from router_client import Basis, Choice, Prompt, RouterClient, RouterSettings


async def _main(url: str, workers: int, holders: int) -> None:
    source = iter(PromptSource(workers, holders))
    async with RouterClient.open(url, RouterSettings(deadline_ms=None), wait=False) as router:

        async def book(prompt: Prompt) -> Choice:
            choice = await router.reserve(prompt)
            if choice.basis is not Basis.COST:
                raise RuntimeError(f"a choice was made by {choice.basis}; expected all by cost")
            return choice

        async def finish(choice: Choice) -> None:
            await choice.first_token()
            await choice.done()

        async def turn(line: str) -> Sequence[str]:
            what, given = line.split()
            prompts = map(_by_tokens if given == "tokens" else _by_hashes, source)
            return [await (time_choices if what == "latency" else count_choices)(prompts, book, finish)]

        await take_turns(turn)


def _by_tokens(tokens: list[int]) -> Prompt:
    return Prompt.of_tokens(SCOPE, tokens)


def _by_hashes(tokens: list[int]) -> Prompt:
    return Prompt.of_hashes(SCOPE, extend_chain(tokens, BLOCK_SIZE), BLOCK_SIZE, input_tokens=len(tokens))


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
