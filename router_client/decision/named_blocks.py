"""Names the blocks to fetch, for connectors that ask for them by the source's own hashes (`kv.fetch`)."""

from dataclasses import replace
from typing import Protocol

from kvatlas.blocks.hashing import HASH_BYTES, unpack_hashes
from kvatlas.fleet.records import KvConnector
from kvatlas.identity import Scope
from router_client.pricing.pool import Pool
from router_client.prompt import Prompt
from router_client.prompt_chain import PromptChain
from router_client.results import Choice

BY_HASHES = frozenset({KvConnector.KVCR})


class EngineHashSource(Protocol):
    """Knows the hashes that engines themselves use; `kvatlas.block_lookup.hash_client.EngineHashes` is one."""

    def is_ready(self) -> bool:
        """True if it can be asked now."""

    async def ask(self, worker_id: str, scope: Scope, sequence_hashes: list[int]) -> list[int]:
        """The hashes of a chain's first blocks, as far as the worker's engine holds them without a gap; empty if they are
        unknown."""


class NamedBlocks:
    """Finds blocks' names for one router. `hashes=None`: no blocks can be named."""

    def __init__(self, hashes: EngineHashSource | None) -> None:
        self._hashes = hashes

    def narrow(self, prompt: Prompt, pool: Pool) -> Prompt:
        """The prompt without the connectors whose blocks can't be named now, so no fetch by them is priced."""
        if not prompt.fetch_by & pool.connectors & BY_HASHES or (self._hashes is not None and self._hashes.is_ready()):
            return prompt
        return replace(prompt, fetch_by=prompt.fetch_by - BY_HASHES)

    async def name(self, prompt: Prompt, choice: Choice) -> Choice:
        """The choice with the source's own hashes for what is to be fetched. If they are unknown, nothing is
        fetched."""
        fetch = choice.fetch
        if fetch is None or not fetch.needs_hashes or self._hashes is None:
            return choice
        source, size = fetch.source, fetch.source.block_size or 1
        blocks = -(-(choice.result.usable_tokens + fetch.tokens) // size)
        chain = PromptChain(prompt, size, source.lookahead_tokens).all_hashes()[: blocks * HASH_BYTES]
        found = await self._hashes.ask(source.id, prompt.scope, unpack_hashes(chain))
        return replace(choice, fetch=replace(fetch, block_hashes=found) if found else None)
