"""Results of `route_pd`: the worker that computes the answer, and the prefill worker if that is a different one."""

import asyncio
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from kvatlas.dataclass import dataclass
from kvatlas.reservations.room_and_slo import NOTHING, Over
from router_client.learning.timings import Timings
from router_client.learning.token_counts import Usage
from router_client.pricing.prefill_decode import PairRanking
from router_client.pricing.slo import Advice
from router_client.results import Choice, ChoiceData, describe_difference


@dataclass(frozen=True, slots=True)
class PairChoiceData:
    """Common fields of `PairChoice` and `SyncPairChoice`. `prefill=None`: `decode` computes both prompt and answer.

    Both are booked together and released together. Moving the KV from one to the other is up to the caller and the engines:
    send to `prefill.url` and `decode.url`, each with its `headers`. Costs and times are for both together.
    """

    decode: ChoiceData
    prefill: ChoiceData | None
    ranking: PairRanking = field(compare=False, repr=False)

    @property
    def worker_id(self) -> str:
        """The worker that answers."""
        return self.decode.worker_id

    @property
    def url(self) -> str:
        """The address of the worker that answers."""
        return self.decode.url

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers for a request to the worker that answers."""
        return self.decode.headers

    @property
    def mode(self) -> str:
        """The basis of the choice, as text."""
        return self.decode.mode

    @property
    def score_us(self) -> int:
        """The cost of both workers together."""
        return self.decode.score_us + (self.prefill.score_us if self.prefill is not None else 0)

    @property
    def ttft_us(self) -> int | None:
        """Time to the first token, which includes the prompt and the transfer; None if the profile does not predict
        it."""
        parts = [choice.cost.ttft_us for choice in self._choices]
        return None if None in parts else sum(part for part in parts if part is not None)

    @property
    def predicted_cached_tokens(self) -> int:
        """The prompt tokens that the engine computing the prompt should report as cached."""
        return (self.prefill or self.decode).predicted_cached_tokens

    @property
    def unconfirmed_tokens(self) -> int:
        """The cached tokens among them that no event has confirmed."""
        return (self.prefill or self.decode).unconfirmed_tokens

    @property
    def over(self) -> Over:
        """Limits that one of the workers exceeds, and parts of the SLO that are missed."""
        over = NOTHING
        for choice in self._choices:
            over |= choice.result.over
        ttft_us = self.ttft_us
        return over | Over.TTFT if ttft_us is not None and ttft_us > self._slo_ttft_us else over

    @property
    def advice(self) -> Advice:
        """GO: send the request. Otherwise even the best pair is full or misses the SLO: hold the request back or refuse
        it."""
        if not self.over:
            return Advice.GO
        late = (self.ttft_us or 0) > self.decode.ranking.shed_factor * self._slo_ttft_us
        return Advice.SHED if late else Advice.QUEUE

    @property
    def retry_after_s(self) -> int:
        """Seconds after which to retry a refused request."""
        return max(1, -int((self._slo_ttft_us - (self.ttft_us or 0)) // 1_000_000))

    def explain(self) -> str:
        """The cost of each worker, term by term, and the cheapest alternative: without a separate prefill if there is one,
        otherwise with one."""
        other = self.ranking.alternative
        if self.prefill is None:
            lines = [f"no separate prefill: {_explain_indented(self.decode)}"]
            if other is not None:
                difference = describe_difference(other.score_us - self.score_us)
                lines.append(f"  with one, {difference}: {other.explain()}")
        else:
            lines = [f"{self.score_us} us together"]
            lines += [f"  prefill: {_explain_indented(self.prefill)}", f"  decode: {_explain_indented(self.decode)}"]
            if other is not None:
                difference = describe_difference(other.score_us - self.score_us)
                lines.append(f"  without a separate prefill, {difference}: {other.explain()}")
        return "\n".join(lines)

    def explanation(self, most: int | None = None) -> dict[str, Any]:
        """The explanation as plain data, with at most `most` candidates of each kind."""
        return {
            "score_us": self.score_us,
            "ttft_us": self.ttft_us,
            "advice": self.advice.value,
            "prefill": None if self.prefill is None else self.prefill.explanation(most),
            "decode": self.decode.explanation(most),
            "otherwise": None if (other := self.ranking.alternative) is None else other.explanation(),
        }

    @property
    def _choices(self) -> tuple[ChoiceData, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def _slo_ttft_us(self) -> float:
        return self.decode.ranking.slo.ttft_ms * 1_000


@dataclass(frozen=True, slots=True)
class PairChoice(PairChoiceData):
    """A choice of `RouterClient`."""

    decode: Choice
    prefill: Choice | None

    async def first_token(self) -> None:
        """Report the first token: the prefill worker is free again."""
        if self.prefill is not None:
            await self.prefill.done()
        await self.decode.first_token()

    async def done(
        self,
        status: int = 200,
        usage: Usage | None = None,
        timings: Timings | None = None,
        whole: Usage | None = None,
    ) -> None:
        """Report the end of the request; see `Choice.done`. Exiting the block of `route_pd` does the same."""
        if self.prefill is not None:
            await asyncio.gather(self.prefill.done(status), self.decode.done(status, usage, timings, whole))
        else:
            await self.decode.done(status, usage, timings, whole)


def _explain_indented(choice: ChoiceData) -> str:
    return choice.explain().replace("\n", "\n  ")
