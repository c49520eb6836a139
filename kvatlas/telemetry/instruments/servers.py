"""Instruments for the servers that use the router library: the proxy and the endpoint picker."""

from kvatlas.telemetry.instruments.instrument import Instrument, Kind, by, counter, gauge, histogram, single

# ---------------------------------------------------------------- proxy: kvatlas_router.proxy.counters.ProxyCounters

PROXY_ENDS = counter("proxy.ends", "{request}", "Requests ended, by how")
PROXY_RETRIES = counter("proxy.retries", "{attempt}", "Attempts moved to another worker, by reason")
PROXY_WAIT = histogram("proxy.overhead", "s", "From a request's arrival until it is sent to an engine, by attempt")
GENAI_TTFT = Instrument(
    "gen_ai.server.time_to_first_token",
    "s",
    "From a request's arrival to the first token of its streamed answer",
    Kind.HISTOGRAM,
)
GENAI_TIME = Instrument(
    "gen_ai.server.request.duration", "s", "From a request's arrival to the end of its complete answer", Kind.HISTOGRAM
)
PROXY_HELD = counter("proxy.held", "{booking}", "Bookings made over HTTP, by change")

PROXY_APART = counter(
    "proxy.apart", "{attempt}", "Attempts with a prefill worker of their own: sent, and failed by that worker"
)
PROXY_FETCHING = counter("proxy.fetching", "{attempt}", "Attempts whose engine was sent to fetch KV from another one")
PROXY_RESUMED = counter("proxy.continued", "{stream}", "Streams that another worker continued after their engine died")
PROXY_NOT_CONTINUED = counter(
    "proxy.not_continued",
    "{stream}",
    "Streams that ended with their engine's error, by the reason why no other worker continued them",
)
_NOT_CONTINUED = (
    "sampled",
    "choices",
    "beams",
    "echo",
    "guided",
    "audio",
    "penalties",
    "template",
    "tokens",
    "object",
    "reasoning",
    "tool_call",
    "long",
    "unreadable",
    "diverged",
    "same_token",
    "refused",
    "no_worker",
)
PROXY_BUDGET = counter(
    "proxy.retries.budget", "{attempt}", "Further attempts, by whether the retry budget allowed them"
)
PROXY_QUEUED = counter("proxy.queued", "{request}", "Requests for which every engine was full, by outcome")

PROXY = {
    **by(
        PROXY_ENDS,
        "end",
        answered="answered",
        refused_by_engine="refused",
        gave_up="gave_up",
        gone="client_gone",
        broken="engine_gone",
        cut="stopped",
        shed="shed",
    ),
    **by(PROXY_RETRIES, "reason", refused="refused", unreachable="unreachable"),
    **by(PROXY_APART, "event", apart="sent", apart_failed="failed"),
    **single(PROXY_FETCHING, "fetching"),
    **single(PROXY_RESUMED, "continued.resumed"),
    **by(PROXY_NOT_CONTINUED, "reason", **{f"continued.{why}": why for why in _NOT_CONTINUED}),
    **by(PROXY_BUDGET, "outcome", retried="allowed", retries_denied="denied"),
    **single(PROXY_WAIT, "overhead"),
    **single(GENAI_TTFT, "ttft"),
    **single(GENAI_TIME, "request_time"),
    **by(PROXY_QUEUED, "outcome", queued="served", queue_full="refused"),
    **by(
        PROXY_HELD, "change", held="booked", held_done="done", held_expired="expired", done_elsewhere="done_elsewhere"
    ),
}

# ---------------------------------------------------------------- proxy_load: kvatlas_router.proxy.exchange.Exchange

PROXY_IN_FLIGHT = gauge("proxy.in_flight", "{request}", "Requests that run in this router")
PROXY_IN_FLIGHT_TOKENS = gauge(
    "proxy.in_flight.tokens", "{token}", "Prompt tokens of the requests that run in this router"
)
PROXY_WAITING = gauge("proxy.waiting", "{request}", "Requests that wait in this router for an engine with room")
PROXY_POOL_WAITING = gauge(
    "proxy.pool.waiting", "{request}", "Waiting requests of all routers, in pools in which some wait here"
)

PROXY_LOAD = {
    **single(PROXY_IN_FLIGHT, "in_flight"),
    **single(PROXY_IN_FLIGHT_TOKENS, "in_flight_tokens"),
    **single(PROXY_WAITING, "waiting"),
    **single(PROXY_POOL_WAITING, "pool_waiting"),
}

# ---------------------------------------------------------------- gateway: kvatlas_router.gateway.counters.GatewayCounters

GATEWAY_PICKS = counter(
    "gateway.picks", "{request}", "Requests by the basis of their endpoint's choice, or why none was chosen"
)
GATEWAY_QUEUED = counter("gateway.queued", "{request}", "Requests that waited for an engine with room")
GATEWAY_ENDS = counter("gateway.ends", "{request}", "How requests with an endpoint ended")
GATEWAY_SERVED_ELSEWHERE = counter("gateway.served_elsewhere", "{request}", "Requests answered by a fallback")
GATEWAY_STREAM_ERRORS = counter(
    "gateway.streams.unusable", "{stream}", "Streams that could not be processed, by reason"
)
GATEWAY_NO_ADDRESS = counter(
    "gateway.workers.no_address", "{worker}", "Times that a worker's address was one that no gateway can use"
)
GATEWAY_PICK_TIME = histogram("gateway.pick.duration", "s", "From reading a request to its decision")

GATEWAY = {
    **by(
        GATEWAY_PICKS,
        "by",
        by_prompt="prompt",
        by_load="load",
        unpublished="unpublished",
        invalid="invalid",
        refused="refused",
        shed="shed",
        queue_full="queue_full",
        late="late",
        undecided="undecided",
    ),
    **single(GATEWAY_QUEUED, "queued"),
    **by(GATEWAY_ENDS, "end", answered="answered", failed="failed", left="left", gone="gone"),
    **single(GATEWAY_SERVED_ELSEWHERE, "served_elsewhere"),
    **by(GATEWAY_STREAM_ERRORS, "reason", out_of_order="out_of_order", observed="observed"),
    **single(GATEWAY_NO_ADDRESS, "no_address"),
    **single(GATEWAY_PICK_TIME, "pick_time"),
}

# ---------------------------------------------------------------- gateway_load: kvatlas_router.gateway.counters.GatewayGauges

GATEWAY_IN_FLIGHT = gauge("gateway.in_flight", "{request}", "Requests with an endpoint whose end is not known yet")
GATEWAY_WAITING = gauge("gateway.waiting", "{request}", "Requests that wait in this picker for an engine with room")
GATEWAY_POOL_WAITING = gauge(
    "gateway.pool.waiting", "{request}", "Waiting requests of all routers, in pools in which some wait here"
)

GATEWAY_LOAD = {
    **single(GATEWAY_IN_FLIGHT, "in_flight"),
    **single(GATEWAY_WAITING, "waiting"),
    **single(GATEWAY_POOL_WAITING, "pool_waiting"),
}

# ---------------------------------------------------------------- ejections: kvatlas_router.ejection.monitor.EjectionCounters

ENGINE_ANSWERS = counter("ejection.answers", "{answer}", "Engines' answers, by what they say about their worker")
EJECTIONS = counter("ejection.changes", "{worker}", "Workers ejected because they fail, and readmitted")

EJECTED_NOW = gauge("ejection.workers", "{worker}", "Workers that get no requests because they fail")

EJECTED = single(EJECTED_NOW, "ejected_workers")
"""Fields of kvatlas_router.ejection.monitor.EjectionMonitor."""
EJECTION = {
    **by(ENGINE_ANSWERS, "verdict", good="good", bad="bad"),
    **by(EJECTIONS, "change", ejections="ejected", readmissions="readmitted"),
}

# ---------------------------------------------------------------- progress: kvatlas_router.progress.monitor.ProgressCounters

STALLS = counter(
    "progress.changes", "{worker}", "Engines with work found to make no progress, and to make progress again"
)
PROGRESS_PROBES = counter("progress.probes", "{request}", "Small requests sent to engines that may be stalled")
MOVED = counter("progress.moved", "{request}", "Requests moved from a stalled engine to another before any byte")
STALLED_NOW = gauge("progress.stalled", "{worker}", "1 for a worker whose engine makes no progress though it has work")

STALLED = single(STALLED_NOW, "stalled")
"""An engine of kvatlas_router.progress.monitor, with its worker's name."""
PROGRESS = {
    **by(STALLS, "change", stalls="stalled", returns="returned"),
    **single(PROGRESS_PROBES, "probes"),
    **single(MOVED, "moved"),
}

# ---------------------------------------------------------------- tokens: kvatlas_router.tokens.counters.TokenCounters

TOKENIZED = counter("tokens.requests", "{request}", "Requests, by how their token ids were found or why not")
TOKENIZE_TIME = histogram("tokens.duration", "s", "Waiting for a prompt's token ids")

TOKENS = {
    **by(
        TOKENIZED,
        "outcome",
        tokenized="tokenized",
        given="given",
        late="late",
        busy="busy",
        unsupported="unsupported",
        failed="failed",
        no_engine="no_engine",
    ),
    **single(TOKENIZE_TIME, "reading_time"),
}

# ---------------------------------------------------------------- index server: kvatlas_router.queries.counters.QueryCounters

QUESTIONS = counter("index_server.questions", "{question}", "Queries to the index server, by outcome")
QUESTION_TIME = histogram("index_server.duration", "s", "Answering a query to the index server")
CHANGES_SENT = counter("index_server.changes", "{change}", "Changes sent to clients that keep a copy of the index")
FOLLOWERS = gauge("index_server.followers", "{follower}", "Connected clients that keep a copy of the index")

QUERIES = {
    **by(QUESTIONS, "outcome", answered="answered", refused="refused", failed="failed"),
    **single(QUESTION_TIME, "answer_time"),
    **single(CHANGES_SENT, "changes"),
}
FOLLOWING = single(FOLLOWERS, "followers")

# ---------------------------------------------------------------- tenancy: kvatlas_router.tenancy.counters.TenancyCounters

TENANCY_REQUESTS = counter(
    "tenancy.requests", "{request}", "Requests to a router with a file of clients, by what they prove and their limits"
)

TENANCY = by(
    TENANCY_REQUESTS,
    "outcome",
    proven="proven",
    unproven="unproven",
    foreign="foreign_tenant",
    over_requests="over_requests",
    over_tokens="over_tokens",
    too_long="too_long",
)
