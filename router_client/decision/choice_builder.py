"""Turns priced and booked candidates into a client's results: a ranking, a choice, or a choice of two workers."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from kvatlas.request import SelectionResult
from router_client.basis import Basis
from router_client.booking.reservation import Reservation
from router_client.choice_statistics import ChoiceStatistics
from router_client.decision.case import Case
from router_client.learning.rates import RateLearner
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.fetch_fields import Fetch
from router_client.pricing.pool import Pool
from router_client.pricing.prefill_decode import PairRanking
from router_client.pricing.ranking import RankedResults
from router_client.pricing.reuse_limit import describe_pool_mismatch, describe_rare_shapes
from router_client.prompt import Prompt
from router_client.results import Choice, Ranking

MOST_REMARKED = 256
"""Maximum number of different remarks about requests that are logged; each is logged once."""

_log = logging.getLogger("router_client")


class ChoiceBuilder:
    """Builds results for one router. When a request ends, `statistics` and `learner` compare its choice with the answer."""

    def __init__(self, learner: RateLearner, statistics: ChoiceStatistics, shed_factor: float) -> None:
        self._learner = learner
        self._statistics = statistics
        self._shed_factor = shed_factor
        self._remarked: set[str] = set()

    def ranking(
        self, case: Case, results: Sequence[SelectionResult], left_out: Mapping[str, str], unread: int = 0
    ) -> Ranking:
        """`left_out`, `unread`: see `Ranking`."""
        prompt, remarks, index = case.prompt, self.remarks(case.prompt, case.pool), case.lookup.source
        return Ranking(prompt.input_tokens, results, left_out, prompt.slo, self._shed_factor, unread, remarks, index)

    def chosen(self, case: Case, results: RankedResults, reservation: Reservation | None = None) -> Choice:
        """The choice of the followed policy's worker, if there is one, otherwise of the first result."""
        result, would_be = results[0], None
        if case.followed is not None:
            would_be = result.worker_id
            result = next(one for one in results if one.worker_id == case.followed)
            case = replace(case, basis=Basis.POLICY, why=f"cost would choose {would_be}")
        unread = len(case.pool.candidates) - len(results)
        ranking = self.ranking(case, results, case.pool.left_out, unread)
        return self.choice(case, ranking, result, reservation, would_be=would_be)

    def choice(
        self,
        case: Case,
        ranking: Ranking,
        result: SelectionResult,
        reservation: Reservation | None,
        *,
        would_be: str | None = None,
        learns: bool = True,
    ) -> Choice:
        """`learns`: compare the answer's usage and times with the prediction, and learn rates from them."""
        record = case.pool.records[result.worker_id]
        fetch = None
        if result.source is not None and not result.reads_store and result.source in case.pool.records:
            fetch = Fetch(case.pool.records[result.source].endpoint, result.transferred_tokens)
        return Choice(
            result.worker_id,
            record.endpoint,
            result,
            ranking,
            case.basis,
            case.why,
            would_be,
            record.trace,
            fetch,
            reservation,
            self._learner.feedback(case.prompt.scope.pool_id, ranking.results, result) if learns else None,
            partial(
                self._statistics.record_answer,
                case.prompt,
                case.pool,
                result,
                case.basis if learns else None,
                time.time_ns() // 1_000,
            ),
        )

    def pair(self, case: Case, ranking: PairRanking, reservations: Sequence[Reservation]) -> PairChoice:
        """`reservations`: for the worker that answers, then for the prefill worker; empty if nothing is booked."""
        for_decode, for_prefill = (*reservations, None, None)[:2]
        unable = case.pool.unable
        if ranking.prefill is None:
            whole = self.choice(case, self.ranking(case, ranking.wholes, unable), ranking.decode, for_decode)
            return PairChoice(whole, None, ranking)
        # no rates are learned: a pair's time can't be split between its workers
        prefills, decodes = (self.ranking(case, results, unable) for results in (ranking.prefills, ranking.decodes))
        return PairChoice(
            self.choice(case, decodes, ranking.decode, for_decode, learns=False),
            self.choice(case, prefills, ranking.prefill, for_prefill, learns=False),
            ranking,
        )

    def remarks(self, prompt: Prompt, pool: Pool) -> tuple[str, ...]:
        """What was ignored in the request, why no worker can hold its blocks, and which workers' blocks were not looked up.
        Each remark is logged once."""
        of_pool = describe_pool_mismatch(prompt, pool), describe_rare_shapes(pool)
        remarks = (*prompt.notes, *filter(None, of_pool)) if any(of_pool) else prompt.notes
        for line in remarks:
            if line not in self._remarked and len(self._remarked) < MOST_REMARKED:
                self._remarked.add(line)
                _log.warning("model %s: %s", prompt.scope.model_id, line)
        return remarks
