"""Compares workers of one model, to find what prevents them, or requests, from sharing blocks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvatlas.fleet.records import EngineEndpoint, FleetRecord, Heartbeat, Role
from kvatlas_cli.doctor.finding import Finding, Level, join_names


def judge_pools(pools: Mapping[str, Sequence[FleetRecord]]) -> Iterator[Finding]:
    """`pools`: by their displayed name."""
    tokenizers: dict[str, set[str]] = defaultdict(set)
    for name, records in pools.items():
        endpoints = [record.endpoint for record in records if not record.endpoint.is_store]
        for endpoint in endpoints:
            tokenizers[endpoint.model_id].add(endpoint.tokenizer_id)
        sizes = sorted({endpoint.block_size for endpoint in endpoints if endpoint.block_size})
        if len(sizes) > 1:
            line = f"{name} has blocks of {', '.join(map(str, sizes))} tokens"
            advice = "this works, but each prompt is hashed once for each size; use one size to save that"
            yield Finding("pools.block_sizes", Level.INFO, line, advice)
        roles = {endpoint.role for endpoint in endpoints}
        if roles and Role.BOTH not in roles and len(roles) == 1:
            line = f"{name} has only {next(iter(roles)).value} workers"
            yield Finding("pools.roles", Level.WARNING, line, "requests need both roles: start workers with the other")
        yield from _judge_chains(name, endpoints)
    for model_id, ids in tokenizers.items():
        if len(ids) > 1:
            line = f"model {model_id} is served with {len(ids)} tokenizer ids ({join_names(ids)}): their pools share nothing"
            yield Finding(
                "pools.tokenizers",
                Level.WARNING,
                line,
                "if it is one tokenizer, give all publishers the same --tokenizer-id",
            )


def judge_served_names(heard: Iterable[Heartbeat]) -> Iterator[Finding]:
    """Find workers that are published under a model name that their engines don't serve."""
    heartbeats = list(heard)
    publishers: dict[str, list[str]] = defaultdict(list)
    for one in heartbeats:
        publishers[one.endpoint.model_id].append(one.worker_id)
    astray: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for one in heartbeats:
        if one.served_names:
            astray[one.endpoint.model_id, one.served_names].append(one.worker_id)
    for (model_id, served), ids in sorted(astray.items()):
        line = f"{join_names(ids)}: --model-id is {model_id}, but the engine serves {' or '.join(served)}"
        others = [id for name in served for id in publishers.get(name, ())]
        if others:
            line += f", as {join_names(others)} publish it: these pools share nothing"
            yield Finding("pools.models", Level.ERROR, line, f"set --model-id {served[0]}")
        else:
            advice = f"requests find its blocks only by the name {model_id}; for the engine's name set --model-id {served[0]}"
            yield Finding("pools.models", Level.WARNING, line, advice)


def _judge_chains(name: str, endpoints: Sequence[EngineEndpoint]) -> Iterator[Finding]:
    chains: dict[str, list[str]] = defaultdict(list)
    for endpoint in endpoints:
        if endpoint.events and endpoint.block_size is not None:
            chains[endpoint.chain].append(endpoint.id)
    if len(chains) > 1:
        parts = "; ".join(f"{chain}: {join_names(ids)}" for chain, ids in sorted(chains.items()))
        line = f"{name} has workers whose blocks are keyed by different hash chains ({parts}): a request finds only one chain's"
        advice = "let all engines report token ids with their blocks, or give those that don't their own --model-id"
        yield Finding("pools.chains", Level.WARNING, line, advice)
