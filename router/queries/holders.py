"""Looks a prompt up for one tenant: how much of its start each worker holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.blocks.reuse import ReuseRules
from kvatlas.fleet.records import EngineEndpoint, FleetRecord
from router_client.fleet_cache import FleetCache, FleetReader
from router_client.pricing.overlap import HeldPrefix, OverlapIndex, look_up_overlap
from router_client.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Match:
    """A worker or shared store that holds the start of a prompt."""

    record: FleetRecord
    held: HeldPrefix

    @property
    def endpoint(self) -> EngineEndpoint:
        return self.record.endpoint

    @property
    def block_size(self) -> int:
        return self.endpoint.block_size or 0

    @property
    def instance(self) -> str:
        """The engine of which the worker is a rank; without ranks, the worker itself."""
        return self.instance_of(self.endpoint)

    @staticmethod
    def instance_of(endpoint: EngineEndpoint) -> str:
        rank = endpoint.dp_rank
        return endpoint.id if rank is None else endpoint.id.removesuffix(f"-dp{rank}")

    @property
    def rank(self) -> int:
        return self.endpoint.dp_rank or 0


class HolderQueries:
    """Reads a pool's records at most every 200 ms, and the index at each query."""

    def __init__(self, index: OverlapIndex, fleet: FleetReader) -> None:
        self._index = index
        self._fleet = FleetCache(fleet)
        self._rules = ReuseRules()

    async def workers(self, pool_id: str, tenant_id: str) -> Sequence[FleetRecord]:
        """The workers that may see this tenant's prompts, sorted by id. Raises Unreachable."""
        records = (await self._fleet.read_pool(pool_id)).records
        return [record for _, record in sorted(records.items()) if record.may_see(tenant_id)]

    async def find(self, prompt: Prompt) -> Sequence[Match]:
        """The prompt's holders, those with the most tokens first. Raises Unreachable, or InvalidValue for out-of-range
        token ids."""
        pool = await self._fleet.read_pool(prompt.scope.pool_id)
        found = await look_up_overlap(self._index, prompt, pool.looked_up_shapes)
        tenant_id = prompt.scope.tenant_id
        matches = [
            Match(record, found.held[id])
            for id, record in pool.records.items()
            if id in found.held and found.held[id].tokens and record.may_see(tenant_id)
        ]
        return sorted(matches, key=lambda match: (-match.held.tokens, match.endpoint.id))

    def usable_tokens(self, prompt: Prompt, matches: Sequence[Match]) -> dict[str, int]:
        """How many tokens each worker's engine would not compute again, according to the engine's own rule."""
        return {
            match.endpoint.id: match.held.usable_tokens(
                self._rules.of(match.endpoint), prompt, match.endpoint.kind, match.block_size or 1
            )
            for match in matches
        }

    async def close(self) -> None:
        """End all running reads."""
        await self._fleet.close()
