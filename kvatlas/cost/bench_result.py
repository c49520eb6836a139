"""Results of `vllm bench serve --save-result --save-detailed`, read as observed requests.

The file lists each request's start, times and lengths (vLLM 0.33, `vllm/benchmarks/serve.py`), so the engine's load at the
start of a request can be computed from the other requests. It does not list cached tokens, so either the prompts must share
nothing, or the engine must run without prefix caching.
"""

from collections.abc import Iterator
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvatlas.cost.calibration import ObservedRequest
from kvatlas.errors import InvalidValue
from kvatlas.validation import describe_invalid

_Instant = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, lt=3_600, allow_inf_nan=False)]
_Tokens = Annotated[int, Field(ge=0, le=1 << 24)]


class BenchResult(BaseModel):
    """Lists with one entry per request, in seconds and tokens. `start_times`: all on one clock; `itls`: the times between the
    parts of an answer; `errors`: empty for requests that were answered."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    input_lens: list[_Tokens]
    output_lens: list[_Tokens]
    start_times: list[_Instant]
    ttfts: list[_Seconds]
    itls: list[list[_Seconds]]
    errors: list[str | None] = []

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        sizes = {len(self.input_lens), len(self.output_lens), len(self.start_times), len(self.ttfts), len(self.itls)}
        if len(sizes) > 1:
            raise ValueError(
                f"its lists have {' and '.join(map(str, sorted(sizes)))} entries; expected one for each request"
            )
        return self

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Parse a file. Raises InvalidValue, naming the field; SGLang's results have no `start_times`."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise InvalidValue(describe_invalid(error, "the benchmark's result")) from error

    def requests(self) -> Iterator[ObservedRequest]:
        """The answered requests in the order in which they started, each with the load that the others caused. Raises
        InvalidValue for figures that no engine can have, such as an answer that takes many hours."""
        running: list[_Request] = []
        for one in sorted(self._answered()):
            running = [other for other in running if other.end > one.start]
            begun = [other for other in running if other.first <= one.start]
            try:
                yield ObservedRequest(
                    prompt_tokens=one.prompt_tokens,
                    output_tokens=one.output_tokens,
                    queued_tokens=sum(other.prompt_tokens for other in running if other.first > one.start),
                    running_requests=len(begun),
                    kv_tokens=sum(other.kv_tokens(one.start) for other in begun),
                    ttft_ms=(one.first - one.start) * 1e3 or None,
                    tpot_ms=1e3 * (one.end - one.first) / max(1, one.output_tokens - 1) or None,
                )
            except ValidationError as error:
                raise InvalidValue(f"request at {one.start:.3f} s: {describe_invalid(error, 'it')}") from error
            running.append(one)

    def _answered(self) -> Iterator["_Request"]:
        lists = zip(self.start_times, self.ttfts, self.itls, self.input_lens, self.output_lens, strict=True)
        for i, (start, ttft, itls, prompt_tokens, output_tokens) in enumerate(lists):
            if prompt_tokens and ttft and not (i < len(self.errors) and self.errors[i]):
                first = start + ttft
                yield _Request(start, first, first + sum(itls), prompt_tokens, output_tokens)


class _Request(NamedTuple):
    start: float
    first: float
    end: float
    prompt_tokens: int
    output_tokens: int

    def kv_tokens(self, now: float) -> int:
        """The number of tokens that the request has computed by `now`, a time between its first token and its end."""
        return self.prompt_tokens + round(self.output_tokens * (now - self.first) / (self.end - self.first))
