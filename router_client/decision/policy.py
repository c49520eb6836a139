"""A router's policy: which workers may get a prompt, surcharges on their costs, and the limits that results are checked
against.

Pure, and the same on all routers with the same settings. Only a followed policy may have state.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from kvatlas.reservations import Ask, Lookup, OfferEvaluation
from router_client.booking.ask import build_ask
from router_client.decision.case import Case
from router_client.decision.shadow_policy import Policy, RoundRobin
from router_client.pricing.look_alikes import LookAlikeQuotes, least_members, quote_look_alikes
from router_client.pricing.lookups import LookupQuotes, quote_lookup
from router_client.pricing.overlap import PromptLookup
from router_client.pricing.pool import Pool
from router_client.pricing.prefill_decode import PairQuotes, quote_pairs
from router_client.pricing.quote_desk import quote_candidates
from router_client.pricing.quotes import Quote, rendezvous_weight
from router_client.pricing.ranking import Criteria, RankedResults
from router_client.pricing.surcharges import add_session_surcharge, add_surcharges, session_worker
from router_client.prompt import Prompt, Strategy
from router_client.prompt_chain import PromptChain
from router_client.settings import RouterSettings, SloMode

PREFIX_TOKENS = 1_024
"""If neither load nor index is available, prompts that share this many first tokens go to the same worker."""


class RoutingPolicy:
    """The settings of one router, applied to its prompts."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._round_robin = RoundRobin()
        self._seed = settings.seed.to_bytes(8, "little", signed=True) if settings.seed else b""

    def narrow(self, pool: Pool, prompt: Prompt, avoid: Collection[str] = ()) -> Pool:
        """The pool without workers that may not see the prompt's tenant, that the caller avoids, or that a selector
        excludes."""
        pool = pool.of_tenant(prompt.scope.tenant_id)
        if avoid:
            pool = pool.without(avoid)
        for select in (self._settings.select, prompt.select):
            if select is not None:
                pool = pool.narrow(select.why_not)
        return pool

    def quote(self, case: Case) -> list[Quote]:
        """The cost of every candidate without load, including surcharges, in tie-breaking order."""
        fingerprint = case.lookup.fingerprint + self._seed
        quotes = quote_candidates(case.prompt, case.pool, case.lookup.held, fingerprint=fingerprint)
        return self._add_surcharges(case.prompt, quotes, fingerprint)

    def names_all(self, prompt: Prompt) -> bool:
        """True if every candidate has to be priced here, either to draw one of them or to follow a policy."""
        return bool(self._settings.temperature) or self._followed(prompt) is not None

    def quote_look_alikes(self, case: Case) -> LookAlikeQuotes | None:
        """Quotes that name only a few candidates; the store finds the cheapest of the others. None if that is not
        possible."""
        settings, prompt, pool, held = self._settings, case.prompt, case.pool, case.lookup.held
        fingerprint, home = case.lookup.fingerprint + self._seed, self._session_worker(prompt, pool)
        if home is None:
            return quote_look_alikes(prompt, pool, held, fingerprint)
        quotes = quote_look_alikes(prompt, pool, held, fingerprint, named=[home])
        if quotes is None:
            return None
        away = add_session_surcharge(quotes.look_alikes.values(), home, settings.session_us, members=True)
        return replace(
            quotes,
            named=add_session_surcharge(quotes.named, home, settings.session_us),
            look_alikes=dict(zip(quotes.look_alikes, away, strict=True)),
        )

    def quote_lookup(
        self, prompt: Prompt, pool: Pool, *, explain_all: bool = False, known: PromptLookup | None = None
    ) -> LookupQuotes | None:
        """Quotes for a choice that reads only few workers, and looks up what these hold; None if that is not possible.
        `explain_all`: the choice must read every candidate. `known`: the lookup, if it was made before."""
        home, session_us = self._session_worker(prompt, pool), self._settings.session_us
        return quote_lookup(prompt, pool, self._seed, known, home=home, session_us=session_us, explain_all=explain_all)

    def ask_lookup(self, prompt: Prompt, quotes: LookupQuotes) -> Ask:
        """Build an ask with a lookup: its answer is the cheapest worker, by what each holds and its load."""
        return self._ask_members(prompt, (), quotes.empty.chains, quotes.rows, quotes, quotes.lookup)

    def quote_pairs(self, case: Case) -> PairQuotes:
        """Quotes for prefill and decode workers."""
        fingerprint, least = case.lookup.fingerprint + self._seed, self._settings.pairs.least_new_tokens
        pairs = quote_pairs(case.prompt, case.pool, case.lookup.held, fingerprint=fingerprint, least_new_tokens=least)
        return pairs.add_surcharges(lambda answering: self._add_surcharges(case.prompt, answering, fingerprint))

    def ask(self, case: Case, quotes: Sequence[Quote]) -> Ask:
        """Build the ask that books whichever of these is cheapest under load. Raises InvalidValue for an invalid token
        id."""
        pool = case.pool
        return build_ask(
            case.prompt,
            quotes,
            case.lookup.chains,
            self._settings,
            pool.usual_block_size,
        )

    def ask_look_alikes(self, case: Case, quotes: LookAlikeQuotes) -> Ask:
        """Build the same kind of ask for named workers and look-alikes."""
        rows = [*quotes.look_alikes.items()]
        return self._ask_members(case.prompt, quotes.named, case.lookup.chains, rows, quotes)

    def _ask_members(
        self,
        prompt: Prompt,
        named: Sequence[Quote],
        chains: Mapping[int, PromptChain],
        rows: Sequence[tuple[bytes, Quote]],
        quotes: LookAlikeQuotes | LookupQuotes,
        lookup: Lookup | None = None,
    ) -> Ask:
        """The ask, including what the store needs to choose among look-alikes."""
        pool = quotes.pool
        names_all = lookup is not None and bool(lookup.named)
        return build_ask(
            prompt,
            named,
            chains,
            self._settings,
            pool.usual_block_size,
            rows,
            skipped=() if names_all else tuple(pool.skipped),
            least_members=0 if names_all else least_members(pool),
            ring=quotes.ring,
            lookup=lookup,
        )

    def rank(
        self, prompt: Prompt, quotes: Sequence[Quote], by_offer: Sequence[OfferEvaluation], chosen: int
    ) -> RankedResults:
        """Results for the quotes and their evaluations, which are in the same order. `chosen`: the position of the
        cheapest."""
        return RankedResults(quotes, by_offer, chosen=chosen, criteria=self.criteria(prompt))

    def criteria(self, prompt: Prompt) -> Criteria:
        """The terms and limits of results, the same as in the ask."""
        limits = self._settings.limits
        factor = limits.slo_factor if limits.slo is SloMode.PENALTY else 0.0
        booking = self._settings.booking
        filters = limits.slo is SloMode.FILTER
        return Criteria(prompt.slo, booking.again_factor, booking.interference_factor, factor, filters)

    def choose_followed(self, prompt: Prompt, pool: Pool) -> str | None:
        """The worker that the followed policy chooses; None if there is no policy, or if its choice is not a
        candidate."""
        if (follow := self._followed(prompt)) is None:
            return None
        endpoints = [candidate.endpoint for candidate in pool.candidates]
        worker_id = follow.choose(prompt, endpoints)
        return worker_id if any(endpoint.id == worker_id for endpoint in endpoints) else None

    def _followed(self, prompt: Prompt) -> Policy | None:
        if prompt.strategy is None:
            return self._settings.follow
        return self._round_robin if prompt.strategy is Strategy.ROUND_ROBIN else None

    def _session_worker(self, prompt: Prompt, pool: Pool) -> str | None:
        """The worker of the prompt's session; None if there is none."""
        if not (self._settings.session_us and prompt.session_id and pool.candidate_of):
            return None
        return session_worker(prompt.session_id, sorted(pool.candidate_of))

    def choose_by_prefix(self, case: Case, worker_ids: Iterable[str]) -> str:
        """The worker chosen by a hash of the prompt's start, so that prompts with equal starts share a cache."""
        lookup = case.lookup
        size = min(lookup.chains, default=0)
        prefix = lookup.chains[size].prefix_hash(max(1, PREFIX_TOKENS // size)) if size else lookup.fingerprint
        return max(worker_ids, key=partial(rendezvous_weight, prefix + self._seed))

    def _add_surcharges(self, prompt: Prompt, quotes: list[Quote], fingerprint: bytes) -> list[Quote]:
        settings = self._settings
        if not (settings.temperature or (settings.session_us and prompt.session_id)):
            return quotes
        return add_surcharges(
            quotes,
            fingerprint,
            session_id=prompt.session_id,
            session_us=settings.session_us,
            temperature=settings.temperature,
        )
