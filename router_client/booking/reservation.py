"""One reservation of this router, for the caller that routes the request."""

from kvatlas.reservations import Outcome, Reservations
from kvatlas.store.deadline import STORE_FAILURES, Deadline, LateCalls
from router_client.booking.leases import Leases


class Reservation:
    """One reservation. Every call can safely be repeated, and none raises if the store does not answer: the report is then
    sent again later. While the client is entered, no call waits for the store at all."""

    def __init__(
        self,
        pool_id: str,
        id: bytes,
        store: Reservations,
        leases: Leases | None,
        deadline_ms: float | None,
        late_calls: LateCalls,
        mirror: "Reservation | None" = None,
    ) -> None:
        """`leases=None`: the booking exists in this process only. `mirror`: the same reservation in this process, which
        ends together with this one."""
        self.pool_id = pool_id
        self.id = id
        self._store = store
        self._leases = leases
        self._deadline_ms = deadline_ms
        self._late_calls = late_calls
        self._prefilled = False
        self._ended = False
        self._outcome: Outcome | None = None
        self._output_tokens: int | None = None
        self._mirror = mirror
        if leases is not None:
            leases.record_booking(pool_id)

    async def first_token(self) -> None:
        """Report the request's first token: its prefill is over."""
        if not self._prefilled and not self._ended:
            self._prefilled = True
            if self._mirror is not None:
                await self._mirror.first_token()
            await self._report(None)

    async def end(self, outcome: Outcome, output_tokens: int | None = None) -> None:
        """Report the end of the request. `output_tokens`: the number of tokens in its answer, if known."""
        if self._ended:
            return
        self._ended, self._outcome, self._output_tokens = True, outcome, output_tokens
        if self._mirror is not None:
            await self._mirror.end(outcome, output_tokens)
        if self._leases is not None:
            self._leases.record_release(self.pool_id)
        await self._report(outcome)

    def report_again(self) -> None:
        """Repeat the reports: the store has made the booking only now, so earlier reports found nothing."""
        if self._leases is not None and (self._ended or self._prefilled):
            self._leases.report_later(self.pool_id, self.id, self._outcome, self._output_tokens)

    async def _report(self, outcome: Outcome | None) -> None:
        if self._leases is not None and self._leases.sends_reports:
            self._leases.report_later(self.pool_id, self.id, outcome, self._output_tokens)
            return
        deadline = Deadline(self._deadline_ms, self._late_calls)
        received = False
        try:
            if outcome is None:
                await deadline.wait_for(self._store.record_first_token(self.pool_id, self.id))
            else:
                await deadline.wait_for(self._store.release(self.pool_id, self.id, outcome, self._output_tokens))
            received = True
        except STORE_FAILURES:
            pass  # reported later, below
        finally:  # even if the request's own task was cancelled
            if not received and self._leases is not None:
                self._leases.report_later(self.pool_id, self.id, outcome, self._output_tokens)
