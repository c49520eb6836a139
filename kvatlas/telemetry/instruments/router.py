"""Instruments for the router library: decisions, learned rates, predictions, and the router's copy of the index."""

from kvatlas.telemetry.instruments.instrument import by, counter, gauge, histogram, single

# ---------------------------------------------------------------- router: router_client.counters.RouterCounters

DECISIONS = counter("router.decisions", "{decision}", "Routing decisions, by outcome")
DECISION_TIME = histogram("router.decision.duration", "s", "Decisions, including everything they wait for")
STEP_TIME = histogram("router.decision.step.duration", "s", "Calls to the store that a decision waits for, by step")
PREDICTION_ERROR = histogram(
    "router.prediction.error",
    "{token}",
    "Difference between an engine's cached prompt tokens and the prediction, by direction; only answers that differ",
)
ANSWERED_TOKENS = counter(
    "router.prompt.tokens", "{token}", "Prompt tokens of answers whose engines report how many of them were cached"
)
SAVED_TOKENS = counter("router.saved.tokens", "{token}", "Prompt tokens that engines did not compute, as they report")
SAVED_TIME = counter("router.saved.time", "s", "Engine time that computing these tokens would have taken")
PROMPT_BLOCKS = counter(
    "router.blocks", "{block}", "Blocks of the routed prompts, and those that the chosen worker held"
)
HELD_TOKENS = counter(
    "router.held.tokens",
    "{token}",
    "Tokens of routed prompts that the chosen worker held, those its engine would reuse, and those that it was computing",
)
WITHOUT_INDEX = counter(
    "router.decisions.without_index", "{decision}", "Decisions made without the index, by what replaced it"
)
FELL_OPEN = counter("router.decisions.open", "{decision}", "Decisions that failed open, by what did not answer in time")
SHADOWED = counter(
    "router.decisions.shadow", "{decision}", "Decisions that followed another policy, and how many of them agreed"
)
ROUTER_FAILURES = counter("router.store.failures", "{call}", "Calls that the store did not answer in time, by part")
RESERVATIONS = counter(
    "router.reservations",
    "{reservation}",
    "Reservations booked and released, and router leases that lapsed with all their reservations",
)
PAIRS = counter("router.decisions.pairs", "{decision}", "Decisions with a separate prefill worker")
OVER_LIMITS = counter(
    "router.decisions.over_limits",
    "{decision}",
    "Decisions for a worker that has no room or would miss the SLO, by limit",
)
LEARNED = counter(
    "router.learned", "{request}", "Finished requests, by whether their worker's rates were learned from them"
)

ROUTER = {
    **by(DECISIONS, "outcome", routed="routed", no_workers="no_workers"),
    **by(WITHOUT_INDEX, "instead", by_load="load", by_prefix_hash="prefix_hash"),
    **by(SHADOWED, "outcome", followed="followed", agreed="agreed"),
    **by(ROUTER_FAILURES, "part", index_failures="index", booking_failures="reservations", fleet_failures="fleet"),
    **by(
        FELL_OPEN,
        "cause",
        open_index="index",
        open_fleet="fleet",
        open_booking="booking",
        open_connections="connections",
    ),
    **by(RESERVATIONS, "change", booked="booked", released="released", lapsed="lease_lapsed"),
    **single(PAIRS, "pairs"),
    **by(OVER_LIMITS, "limit", no_room="room", over_slo="slo"),
    **by(LEARNED, "outcome", learned="learned", said_nothing="nothing"),
    **single(DECISION_TIME, "decision_time"),
    **by(STEP_TIME, "step", lookup_time="lookup", booking_time="booking"),
    **by(PREDICTION_ERROR, "direction", found_more="more", found_fewer="fewer"),
    **single(ANSWERED_TOKENS, "prompt_tokens"),
    **single(SAVED_TOKENS, "saved_tokens"),
    **single(SAVED_TIME, "saved_s"),
    **by(PROMPT_BLOCKS, "what", required_blocks="required", overlap_blocks="held"),
    **by(HELD_TOKENS, "what", resident_tokens="resident", usable_tokens="usable", predicted_tokens="predicted"),
}

# ---------------------------------------------------------------- rates: kvatlas.cost.learned_rates.LearnedRates

PREFILL_RATE = gauge("router.rates.prefill", "s", "Learned time to compute one prompt token")
STEP_RATE = gauge(
    "router.rates.step", "s", "Learned base time of a decode step, without the share of each running request"
)
RATE_ERROR = gauge("router.rates.error", "1", "Recent relative error of the expected times")

RATES = {
    **single(PREFILL_RATE, "rates.prefill_us_per_token", 1e-6),
    **single(STEP_RATE, "rates.tpot_base_us", 1e-6),
    **by(RATE_ERROR, "of", first_error="first token", next_error="next token"),
}

# ------------------------------------------------ index_replica: kvatlas.index.local_copy.counters.ReplicaCounters

COPY_ANSWERS = counter(
    "index_replica.answers", "{lookup}", "Lookups of a router with a replica of the index, by who answered and why"
)
COPY_MISMATCHES = counter(
    "index_replica.mismatches", "{worker}", "Workers whose blocks in a replica of the index were not those of the index"
)
COPY_CURRENT = gauge(
    "index_replica.current", "{copy}", "1 while the replica of the index answers, 0 while the store does"
)

INDEX_REPLICA = {
    **by(
        COPY_ANSWERS,
        "by",
        answered="replica",
        while_loading="store_while_loading",
        while_stale="store_while_stale",
        while_large="store_while_too_large",
    ),
    **single(COPY_MISMATCHES, "mismatches"),
}
INDEX_REPLICA_NOW = {
    **single(COPY_CURRENT, "current"),
}
"""Fields of kvatlas.index.local_copy.local_copy.IndexReplica."""

# ---------------------------------------------------------------- answers: kvatlas.predictions.accuracy.AnswerCounts

PROMPTS_COMPARED = counter("tokens.prompts", "{request}", "Prompt lengths that engines report, compared with ours")
CACHED_COMPARED = counter(
    "tokens.cached", "{request}", "Answers, by how their cached tokens compare with the prediction"
)
PREDICTED_TOKENS = counter(
    "tokens.predicted", "{token}", "Prompt tokens predicted to be cached, if the engine reports them"
)
CACHED_TOKENS = counter("tokens.found", "{token}", "Prompt tokens that engines report as cached")

ANSWERS = {
    **by(PROMPTS_COMPARED, "outcome", prompts_equal="equal", prompts_differ="different"),
    **by(
        CACHED_COMPARED,
        "outcome",
        cached_equal="equal",
        cached_other_tokens="other_tokens",
        cached_without_index="without_index",
        cached_bounded="bounded",
        cached_newer="newer",
        cached_unconfirmed="unconfirmed",
        cached_evicted="evicted",
        cached_untold="untold",
    ),
    **single(PREDICTED_TOKENS, "predicted_tokens"),
    **single(CACHED_TOKENS, "cached_tokens"),
}
