"""Statistics of a router client's choices and their answers."""

import logging
import time

from kvatlas.cost.protocol import Plan
from kvatlas.predictions.usage_counts import AnswerUse, User
from kvatlas.request import SelectionResult
from kvatlas.reservations.room_and_slo import MISSES_SLO, NO_ROOM
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.telemetry import sampled_context
from router_client.basis import Basis
from router_client.counters import RouterCounters
from router_client.decision.history import DecisionHistory, PastDecision
from router_client.learning.bound_shares import BoundShares
from router_client.learning.fetches import Fetches
from router_client.learning.output_lengths import OutputLengths
from router_client.learning.prediction_accuracy import PredictionAccuracy
from router_client.learning.timings import Timings
from router_client.learning.token_counts import Usage
from router_client.learning.usage_reports import AnswerUsage
from router_client.pricing.pool import Pool
from router_client.prompt import Prompt
from router_client.request_feed import RequestFeed, describe_request
from router_client.results import Choice, fell_open_for_want_of


class ChoiceStatistics:
    """Counts choices, compares predictions with answers, and publishes both to `feed`; `history` holds the choices of
    the last few minutes.

    `output_lengths=None`: output lengths are not learned.
    """

    def __init__(self, bounds: BoundShares, fetches: Fetches, output_lengths: OutputLengths | None) -> None:
        self.counters = RouterCounters()
        self.answers = PredictionAccuracy()
        self.feed = RequestFeed()
        self.history = DecisionHistory()
        self.usage: AnswerUsage | None = None
        """Counts usage by tenant; None: it is not counted."""
        self._bounds = bounds
        self._fetches = fetches
        self._output_lengths = output_lengths
        self._log = RateLimitedLog(logging.getLogger("router_client"))

    def count_choice(self, choice: Choice, started_ns: int) -> None:
        """Count a choice. `started_ns`: when it started, as given by `time.perf_counter_ns`."""
        counters, result = self.counters, choice.result
        counters.routed += 1
        self._count_fall(choice)
        counters.by_load += choice.basis is Basis.LOAD
        counters.by_prefix_hash += choice.basis is Basis.PREFIX_HASH
        counters.followed += choice.would_be is not None
        counters.agreed += choice.would_be == choice.worker_id
        counters.required_blocks += result.required_blocks
        counters.overlap_blocks += result.overlap_blocks
        counters.resident_tokens += result.resident_tokens
        counters.usable_tokens += result.usable_tokens
        counters.predicted_tokens += result.predicted_tokens
        if result.over:
            counters.no_room += bool(result.over & NO_ROOM)
            counters.over_slo += bool(result.over & MISSES_SLO)
        counters.decision_time.add((time.perf_counter_ns() - started_ns) / 1e9, span=sampled_context())

    def remember(self, prompt: Prompt, choice: Choice) -> None:
        """Add a choice that was made and booked for this prompt to the history."""
        decision = PastDecision(
            time.time_ns() // 1_000,
            choice.worker_id,
            prompt.scope.model_id,
            prompt.input_tokens,
            choice.predicted_cached_tokens,
            choice.ttft_us,
            choice.mode,
            choice.why,
        )
        self.history.record(decision, without_index=choice.basis in (Basis.LOAD, Basis.PREFIX_HASH))

    def _count_fall(self, choice: Choice) -> None:
        """Count a choice that failed open under its cause, and log it now and then."""
        if (cause := fell_open_for_want_of(choice)) is None:
            return
        self.counters.open_connections += cause == "connections"
        self.counters.open_index += cause == "index"
        self.counters.open_fleet += cause == "fleet"
        self.counters.open_booking += cause == "booking"
        self._log.report(cause, f"chosen without the store: {choice.why}; choices continue with what this router knows")

    def record_answer(
        self,
        prompt: Prompt,
        pool: Pool,
        result: SelectionResult,
        basis: Basis | None,
        chosen_us: int,
        usage: Usage,
        timings: Timings | None,
        whole: Usage | None = None,
    ) -> None:
        """Record the answer to a request. `basis=None`: its usage can't be compared with the prediction. `chosen_us`:
        Unix time in microseconds. `whole`: see `Choice.done`."""
        if self.feed.followed:
            self.feed.publish(describe_request(prompt, result, usage, timings, chosen_us))
        if self._output_lengths is not None:
            self._output_lengths.record(prompt, (whole or usage).completion_tokens)
        if basis is not None:
            endpoint = pool.records[result.worker_id].endpoint
            self.answers.record(prompt, result, endpoint, basis, usage)
            self._bounds.record(prompt, result, endpoint, usage)
            self._fetches.record(prompt.scope.pool_id, result, usage)
            self._count_savings(prompt, pool, result, usage, whole or usage)

    def _count_savings(self, prompt: Prompt, pool: Pool, result: SelectionResult, usage: Usage, whole: Usage) -> None:
        if (cached := usage.cached_tokens) is None:
            return
        self.history.record_answer(result.worker_id, usage.prompt_tokens, cached)
        counters, predicted = self.counters, result.cached_tokens
        if cached != predicted:
            (counters.found_more if cached > predicted else counters.found_fewer).add(abs(cached - predicted))
        cached = min(cached, whole.prompt_tokens) if whole.cached_tokens is None else whole.cached_tokens
        prices = pool.profile.prices(Plan(result.worker_id, whole.prompt_tokens, 0))
        counters.prompt_tokens += whole.prompt_tokens
        counters.saved_tokens += cached
        saved_us = (prices.token_us + prices.token_squared_us * cached) * cached
        counters.saved_s += saved_us / 1e6
        if self.usage is not None:
            use = AnswerUse(1, whole.prompt_tokens, cached, round(saved_us))
            self.usage.count(User(prompt.scope, prompt.program), use)
