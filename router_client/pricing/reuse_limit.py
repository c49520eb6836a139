"""Explains why the usable tokens of a held prefix end where they do."""

from kvatlas.blocks.reuse import ReuseRule
from kvatlas.fleet.records import EngineEndpoint
from router_client.pricing.overlap import HeldPrefix
from router_client.pricing.pool import Pool
from router_client.prompt import Prompt

MOST_SIZES = 16
"""Maximum number of block sizes that a text lists."""


def why_usable_ends(
    held: HeldPrefix, usable_tokens: int, rule: ReuseRule, prompt: Prompt, endpoint: EngineEndpoint
) -> str:
    """The reason in a few words; empty if all held tokens are usable, or if nothing is held and the request does not
    explain why."""
    if not held.tokens:
        return why_not_found(prompt, endpoint)
    if usable_tokens >= held.tokens:
        return ""
    readable = prompt.reading.readable_tokens(endpoint.kind)
    limit = rule.limit_tokens(prompt.input_tokens, readable)
    if readable is not None and readable <= usable_tokens:
        return f"the request lets the engine read {readable} tokens from its cache"
    size = endpoint.block_size or 1
    unit = max(rule.alignment_tokens, size)
    if usable_tokens >= limit - limit % unit:
        return "the prompt's last token is always computed"
    if held.reach_tokens is not None:
        if held.reach_tokens:
            return "after that, no group other than full attention holds what it needs to resume"
        return "at no point do the groups other than full attention hold what they need to resume"
    if rule.dropped_blocks:
        return f"EAGLE drops {rule.dropped_blocks} block{'s' if rule.dropped_blocks > 1 else ''}"
    return f"reuse is cut to multiples of {unit} tokens"


def why_not_found(prompt: Prompt, endpoint: EngineEndpoint) -> str:
    """Why the worker can't hold any block that the prompt names, in a few words; empty if it can."""
    chain = prompt.scope.chain
    if chain != endpoint.chain:
        what = "the prompt's tokens" if prompt.tokens is not None else f"the request's block hashes of chain {chain}"
        return f"its blocks are keyed by chain {endpoint.chain}: {what} find none"
    if prompt.tokens is None and prompt.hashes and endpoint.block_size not in (None, prompt.block_size):
        return f"its blocks have {endpoint.block_size} tokens, the request's block hashes have {prompt.block_size}"
    return ""


def describe_pool_mismatch(prompt: Prompt, pool: Pool) -> str:
    """Why no worker of the pool can hold a block that the prompt names, in one line; empty if one can."""
    if not pool.chains:
        return ""  # no worker has announced blocks
    if prompt.scope.chain not in pool.chains:
        chains = " and ".join(sorted(pool.chains))
        return f"no worker's blocks are keyed by chain {prompt.scope.chain}, as the request's are; they use {chains}"
    sizes = pool.chains[prompt.scope.chain]
    if prompt.tokens is None and prompt.hashes and prompt.block_size not in sizes:
        listed = " and ".join(map(str, sorted(sizes)))
        return f"the request's block hashes have {prompt.block_size} tokens each; the workers' blocks have {listed}"
    return ""


def describe_rare_shapes(pool: Pool) -> str:
    """Which of the pool's workers are left out of every lookup, in one line; empty if none is."""
    looked_up = pool.looked_up_shapes
    rare = sorted(set(pool.block_shapes) - set(looked_up))
    if not rare:
        return ""
    workers = sum(len(pool.block_shapes[shape]) for shape in rare)
    sizes = ", ".join(map(str, sorted({shape.block_size for shape in rare})[:MOST_SIZES]))
    return (
        f"the workers' blocks have {len(pool.block_shapes)} shapes, and prompts are looked up in the {len(looked_up)} most "
        f"common ones: {workers} workers with other blocks (of {sizes} tokens) count as if they held nothing"
    )


def describe_bound(endpoint: EngineEndpoint, rule: ReuseRule) -> str:
    """Why the worker's usable tokens are an upper bound, and the share that was reused according to answers; empty if
    they are exact."""
    if endpoint.upper_bound and rule.share < 1:
        return f"{endpoint.upper_bound}; answers had {rule.share:.0%} of it"
    return endpoint.upper_bound
