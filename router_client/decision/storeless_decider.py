"""Choices without the store, by what this router knows on its own: the loads that were read last and its own bookings."""

from collections.abc import Sequence
from dataclasses import replace

from kvatlas.reservations import Ask, Evaluation, LookAlikesUnknown, LookupImpossible
from router_client.basis import Basis
from router_client.booking.ask import ask_for_one, narrow_ask
from router_client.booking.booker import Booker
from router_client.booking.reservation import Reservation
from router_client.decision.case import Case
from router_client.decision.choice_builder import ChoiceBuilder
from router_client.decision.policy import RoutingPolicy
from router_client.pricing.quotes import Quote, with_source
from router_client.prompt import Prompt
from router_client.results import Choice


class StorelessDecider:
    """Decides for one router while the store is down, slow or far away."""

    def __init__(self, policy: RoutingPolicy, booker: Booker, builder: ChoiceBuilder) -> None:
        self._policy = policy
        self._booker = booker
        self._builder = builder

    def choose(self, case: Case, *, names_all: bool, book: bool, behind: bool) -> Choice:
        """Choose a worker, and reserve it if `book`. `names_all`: price every candidate. `behind`: report the booking to the
        store afterwards."""
        choice = None if names_all else self._choose_among_few(case, book=book, behind=behind)
        return choice or self._choose_among_all(case, book=book, behind=behind)

    def _choose_among_all(self, case: Case, *, book: bool, behind: bool) -> Choice:
        quotes: Sequence[Quote] = self._policy.quote(case)
        ask = self._policy.ask(case, quotes)
        evaluation = self._booker.look_alone(case.prompt.scope.pool_id, ask)
        if case.basis is not Basis.COST and not any(evaluated.load_known for evaluated in evaluation.by_offer):
            case = replace(case, basis=Basis.PREFIX_HASH)
            ids = [quote.id for quote in quotes]
            evaluation = replace(evaluation, chosen=ids.index(self._policy.choose_by_prefix(case, ids)))
        only = narrow_ask(ask, evaluation.worker_id if case.followed is None else case.followed)
        booked, reservations = self._book(case.prompt, only, book=book, behind=behind)
        quotes = with_source(quotes, booked.worker_id, booked.source)
        results = self._policy.rank(case.prompt, quotes, evaluation.by_offer, evaluation.chosen)
        return self._builder.chosen(case, results, *reservations)

    def _choose_among_few(self, case: Case, *, book: bool, behind: bool) -> Choice | None:
        """Choose without a quote for every candidate; None if that is not possible."""
        prompt, pool = case.prompt, case.pool
        quotes = self._policy.quote_lookup(prompt, pool, known=case.lookup)
        if quotes is None:
            return None
        pool_id, by_prefix = prompt.scope.pool_id, None
        if case.basis is not Basis.COST and not self._booker.knows_a_load(pool_id, pool.candidate_of):
            case = replace(case, basis=Basis.PREFIX_HASH)
            by_prefix = self._policy.choose_by_prefix(case, pool.candidate_of)
            quotes = quotes.including(by_prefix)
        ask = self._policy.ask_lookup(prompt, quotes)
        try:
            evaluation = self._booker.look_alone(pool_id, ask, quotes.held_in(case.lookup))
        except (LookAlikesUnknown, LookupImpossible):
            return None
        if by_prefix is not None:
            evaluation = replace(evaluation, chosen=evaluation.worker_ids.index(by_prefix))
        only = ask_for_one(ask, evaluation.offers[evaluation.chosen], quotes.limit_of(evaluation.worker_id, ask))
        _, reservations = self._book(prompt, only, book=book, behind=behind)
        matched, by_offer, chosen = quotes.match(evaluation)
        assert chosen is not None  # it was reported from these records
        return self._builder.chosen(case, self._policy.rank(prompt, matched, by_offer, chosen), *reservations)

    def _book(
        self, prompt: Prompt, only: Ask, *, book: bool, behind: bool
    ) -> tuple[Evaluation, tuple[Reservation, ...]]:
        """Book the only worker of an ask, if `book`. `behind`: report it to the store afterwards."""
        if not book:
            return self._booker.look_alone(prompt.scope.pool_id, only), ()
        return (self._booker.book_behind if behind else self._booker.book_alone)(prompt, only)
