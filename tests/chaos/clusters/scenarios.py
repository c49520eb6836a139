"""A fleet on clusters: three NATS servers, three Valkey primaries with a replica each; and every scenario by name."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.chaos.clusters.nats_cluster import NATS_SCENARIOS, SERVERS, nats_cluster
from tests.chaos.clusters.store_cluster import store_cluster
from tests.chaos.clusters.store_scenarios import STORE_SCENARIOS
from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.scenarios import Scenario
from tests.end_to_end.processes import ROOT

CLUSTER_SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario for scenario in (*STORE_SCENARIOS, *NATS_SCENARIOS)
}


@asynccontextmanager
async def fleet_on_clusters(
    folder: Path,
    *,
    engines: int,
    indexers: int,
    seed: int,
    hybrids: int = 0,
    indexer_arguments: Sequence[str],
    tree: Path = ROOT,
) -> AsyncIterator[Fleet]:
    """See `running_fleet`."""
    async with nats_cluster(folder) as nats, store_cluster() as cluster:
        arguments = (*indexer_arguments, "--stream-replicas", str(SERVERS))
        async with running_fleet(
            folder,
            engines=engines,
            indexers=indexers,
            seed=seed,
            hybrids=hybrids,
            indexer_arguments=arguments,
            nats=nats,
            cluster=cluster,
            tree=tree,
        ) as fleet:
            yield fleet
