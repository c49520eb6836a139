"""Metrics under the names that common dashboards of endpoint pickers use, besides our own.

They are exported if OpenTelemetry metrics are on; otherwise each call does nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from router_client.learning.token_counts import Usage

MOST_NAMES = 1_000
OTHER = "other"
"""Replaces model names and tenants beyond the first MOST_NAMES, because clients choose them."""

_SECONDS = (
    0.005,
    0.025,
    0.05,
    0.1,
    0.2,
    0.4,
    0.6,
    0.8,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    8.0,
    15.0,
    30.0,
    60.0,
    120.0,
    300.0,
    900.0,
)
_PICK_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072)


@dataclass(frozen=True, slots=True)
class RequestLabels:
    """One request's labels. `model`: the client's name for it, '' if it gave none. `target`: the name sent to the engine.
    `tenant`: its fairness id."""

    model: str = ""
    target: str = ""
    tenant: str = ""
    priority: int = 0


class FieldMetrics:
    """The metrics of one process."""

    def __init__(self, pool: str, ready_endpoints: Callable[[], int]) -> None:
        """`pool`: the name of the InferencePool. `ready_endpoints`: number of its endpoints that may get requests."""
        meter = metrics.get_meter("kvatlas.gateway")
        name = "llm_d_epp_{}".format
        self._names: set[str] = set()
        self._requests = meter.create_counter(name("request"), "", "Requests.")
        self._errors = meter.create_counter(name("request_error"), "", "Requests that failed, by status.")
        self._running = meter.create_up_down_counter(name("request_running"), "", "Running requests.")
        self._duration = meter.create_histogram(
            name("request_duration"),
            "s",
            "From a request to the end of its answer.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._ttft = meter.create_histogram(
            name("request_ttft"),
            "s",
            "From a request to its first token.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._pick = meter.create_histogram(
            name("scheduler_e2e_duration"),
            "s",
            "From reading a request to its decision.",
            explicit_bucket_boundaries_advisory=_PICK_SECONDS,
        )
        tokens = {"explicit_bucket_boundaries_advisory": _TOKENS}
        self._input = meter.create_histogram(name("request_input_tokens"), "", "Prompt tokens.", **tokens)
        self._output = meter.create_histogram(name("request_output_tokens"), "", "Tokens of the answer.", **tokens)
        self._cached = meter.create_histogram(
            name("request_cached_tokens"), "", "Prompt tokens that were cached.", **tokens
        )

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            yield Observation(ready_endpoints(), {"name": pool})

        meter.create_observable_gauge(name("ready_endpoints"), [observe], "", "Endpoints that may get requests.")

    def record_pick(self, seconds: float) -> None:
        """Record the time that a decision took."""
        self._pick.record(seconds)

    def record_begin(self, labels: RequestLabels) -> Mapping[str, str]:
        """Record a picked request. Returns the attributes to pass to the other calls."""
        attributes = {
            "model_name": self._bounded(labels.model),
            "target_model_name": self._bounded(labels.target or labels.model),
            "fairness_id": self._bounded(labels.tenant),
            "priority": str(labels.priority),
        }
        self._requests.add(1, attributes)
        self._running.add(1, attributes)
        return attributes

    def record_refusal(self, status: int) -> None:
        """Record a request that got no endpoint."""
        attributes = {"model_name": "", "target_model_name": "", "fairness_id": "", "priority": "0"}
        self._requests.add(1, attributes)
        self._errors.add(1, {**attributes, "error_code": str(status)})

    def record_first_token(self, attributes: Mapping[str, str], seconds: float, *, streamed: bool) -> None:
        """Record the time to the first bytes of a successful answer."""
        self._ttft.record(seconds, {**attributes, "streaming": str(streamed).lower()})

    def record_end(self, attributes: Mapping[str, str], seconds: float, error: str, usage: Usage | None) -> None:
        """Record a request's end. `error`: its status, or what went wrong; '' for success."""
        self._running.add(-1, attributes)
        if error:
            self._errors.add(1, {**attributes, "error_code": error})
            return
        self._duration.record(seconds, attributes)
        if usage is not None:
            self._input.record(usage.prompt_tokens, attributes)
            self._output.record(usage.completion_tokens, attributes)
            if usage.cached_tokens is not None:
                self._cached.record(usage.cached_tokens, attributes)

    def _bounded(self, name: str) -> str:
        if name in self._names or not name:
            return name
        if len(self._names) >= MOST_NAMES:
            return OTHER
        self._names.add(name)
        return name
