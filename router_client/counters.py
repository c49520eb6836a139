"""The counters of a router client."""

from dataclasses import dataclass, field
from functools import partial

from kvatlas.telemetry.distribution import TOKENS, Distribution


@dataclass(slots=True)
class RouterCounters:
    """Plain integers since the client was created; a client from `RouterClient.open` exports them as metrics.

    `routed`: choices, including those made `by_load` or `by_prefix_hash` without the index, and those that `followed` another
    policy (`agreed`: cost would have chosen the same worker). `no_workers`: requests refused with NoWorkers. `index_failures`,
    `booking_failures`, `fleet_failures`: calls to the store that were not answered in time. `open_index`, `open_fleet`,
    `open_booking`, `open_connections`: choices that failed open, by what they lacked (`open_fleet`: based on the last-read pool
    records). `booked`, `released`: reservations in the store; `lapsed`: how often this router's lease had expired by the time
    it was renewed. `decision_time`, `lookup_time`, `booking_time`: seconds taken by each choice, and by its calls to the
    store. `required_blocks`, `overlap_blocks`: blocks of the routed prompts, and those of them that the chosen worker held;
    `resident_tokens`: tokens in the latter, of which the worker's engine would reuse `usable_tokens`. `predicted_tokens`:
    tokens that it was predicted to hold. `learned`: finished requests that contributed to rates; `said_nothing`: those that
    did not. `pairs`: choices with a prefill worker. `no_room`, `over_slo`: choices of a worker that had no room, or would miss
    the SLO. `found_more`, `found_fewer`: cached tokens that engines found beyond, or short of, the prediction.
    `prompt_tokens`: the prompt tokens of answers that report cached tokens. `saved_tokens`, `saved_s`: cached tokens, and the
    time that computing them would have taken.
    """

    routed: int = 0
    no_workers: int = 0
    by_load: int = 0
    by_prefix_hash: int = 0
    followed: int = 0
    agreed: int = 0
    index_failures: int = 0
    booking_failures: int = 0
    fleet_failures: int = 0
    open_index: int = 0
    open_fleet: int = 0
    open_booking: int = 0
    open_connections: int = 0
    booked: int = 0
    released: int = 0
    lapsed: int = 0
    decision_time: Distribution = field(default_factory=Distribution)
    lookup_time: Distribution = field(default_factory=Distribution)
    booking_time: Distribution = field(default_factory=Distribution)
    required_blocks: int = 0
    overlap_blocks: int = 0
    resident_tokens: int = 0
    usable_tokens: int = 0
    predicted_tokens: int = 0
    learned: int = 0
    said_nothing: int = 0
    pairs: int = 0
    no_room: int = 0
    over_slo: int = 0
    found_more: Distribution = field(default_factory=partial(Distribution, TOKENS))
    found_fewer: Distribution = field(default_factory=partial(Distribution, TOKENS))
    prompt_tokens: int = 0
    saved_tokens: int = 0
    saved_s: float = 0.0
