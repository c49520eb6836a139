"""Why the usable tokens of a held prefix end where they do: for people who look at an overlap."""

from kvatlas.blocks.reuse import ReuseRule
from kvatlas.fleet.records import EngineEndpoint
from router_client.pricing.overlap import HeldPrefix
from router_client.prompt import Prompt


def why_usable_ends(
    held: HeldPrefix, usable_tokens: int, rule: ReuseRule, prompt: Prompt, endpoint: EngineEndpoint
) -> str:
    """In a few words; empty if all that is held is usable."""
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
            return "behind that, no group besides full attention holds what it needs to resume"
        return "the groups besides full attention hold nowhere what they need to resume"
    if rule.dropped_blocks:
        return f"EAGLE drops {rule.dropped_blocks} block{'s' if rule.dropped_blocks > 1 else ''}"
    return f"reuse is cut to multiples of {unit} tokens"


def describe_bound(endpoint: EngineEndpoint, rule: ReuseRule) -> str:
    """Why the worker's usable tokens are an upper bound, and what answers taught of it; empty if they are none."""
    if endpoint.upper_bound and rule.share < 1:
        return f"{endpoint.upper_bound}; answers had {rule.share:.0%} of it"
    return endpoint.upper_bound
