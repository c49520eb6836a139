"""Answers in the formats that other routers expect. All counts are numbers of tokens from the prompt's start."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvatlas_router.queries.holders import Match
from kvatlas_router.queries.media import MediaTokens, on_each_medium, through_each_medium
from router_client.pricing.overlap import HeldPrefix


def mooncake_answer(tenant: str, matches: Iterable[Match]) -> dict[str, Any]:
    """The answer by tenant and instance: the longest part of the prompt's start that is held on any media, on each
    single medium, and by each rank."""
    instances: dict[str, dict[str, Any]] = {}
    for match in matches:
        media = on_each_medium(match.held.runs)
        one = instances.setdefault(match.instance, {"longest_matched": 0, "GPU": 0, "DP": {}, "CPU": 0, "DISK": 0})
        one["longest_matched"] = max(one["longest_matched"], match.held.tokens)
        one["DP"][str(match.rank)] = match.held.tokens
        _raise(one, media, ("GPU", "CPU", "DISK"))
    return {tenant: instances}


def dynamo_answer(matches: Sequence[Match]) -> dict[str, Any]:
    """The answer in Dynamo's format. `scores` and `dp`: tokens on the GPU, by rank. `cpu` and `disk` include nearer
    media."""
    scores: dict[str, dict[str, int]] = {}
    instances: dict[str, dict[str, Any]] = {}
    on_gpu: list[int] = []
    for match in matches:
        media = through_each_medium(match.held.runs)
        rank = str(match.rank)
        one = instances.setdefault(match.instance, {"longest_matched": 0, "gpu": 0, "dp": {}, "cpu": 0, "disk": 0})
        one["dp"][rank] = media.gpu
        _raise(one, media, ("gpu", "cpu", "disk"))
        one["longest_matched"] = max(one["longest_matched"], match.held.tokens)
        if media.gpu:
            scores.setdefault(match.instance, {})[rank] = media.gpu
            on_gpu.append(media.gpu // match.block_size)
    return {"scores": scores, "frequencies": _frequencies(on_gpu), "instances": instances}


def own_answer(matches: Sequence[Match], usable: Mapping[str, int], most: int) -> list[dict[str, Any]]:
    """Workers and shared stores, those with the most tokens first. `usable`: how many tokens each one's engine
    would not compute again."""
    return [_own(match, usable.get(match.endpoint.id, 0)) for match in matches[:most]]


def _own(match: Match, usable: int) -> dict[str, Any]:
    endpoint = match.endpoint
    return {
        "worker": endpoint.id,
        "instance": match.instance,
        "dp_rank": endpoint.dp_rank,
        "kind": endpoint.kind.value,
        "url": endpoint.url,
        "routable": match.record.routable,
        "block_size": match.block_size,
        "resident_tokens": match.held.tokens,
        "usable_tokens": usable,
        "runs": _runs(match.held),
    }


def _runs(held: HeldPrefix) -> list[dict[str, Any]]:
    return [{"tokens": run.tokens, "tiers": [tier.label for tier in run.tiers]} for run in held.runs]


def _raise(one: dict[str, Any], media: MediaTokens, names: Sequence[str]) -> None:
    """Raise an instance's counts to those of its best rank so far."""
    for name, tokens in zip(names, media, strict=True):
        one[name] = max(one[name], tokens)


def _frequencies(blocks: Sequence[int]) -> list[int]:
    """The number of ranks that hold each leading block, up to the last held block."""
    ends = Counter(blocks)
    holding, found = len(blocks), []
    for block in range(max(blocks, default=0)):
        holding -= ends[block]
        found.append(holding)
    return found
