"""One reservation of this router, as the one who routes a request holds it."""

from kvatlas.reservations import Outcome, Reservations
from router_client.booking.leases import Leases
from router_client.decision.fail_open import FAILING, Deadline, Patience


class Reservation:
    """Every call is safe to repeat, and none raises for a store that does not answer: it is told later."""

    def __init__(
        self,
        pool_id: str,
        id: bytes,
        store: Reservations,
        leases: Leases | None,
        deadline_ms: float | None,
        patience: Patience,
    ) -> None:
        """`leases` None: it is booked in this process alone."""
        self.pool_id = pool_id
        self.id = id
        self._store = store
        self._leases = leases
        self._deadline_ms = deadline_ms
        self._patience = patience
        self._prefilled = False
        self._ended = False
        if leases is not None:
            leases.booked(pool_id)

    async def first_token(self) -> None:
        """The request's first token is there: its prefill is over."""
        if not self._prefilled and not self._ended:
            self._prefilled = True
            await self._tell(None)

    async def end(self, outcome: Outcome) -> None:
        """The request is over."""
        if self._ended:
            return
        self._ended = True
        if self._leases is not None:
            self._leases.ended(self.pool_id)
        await self._tell(outcome)

    async def _tell(self, outcome: Outcome | None) -> None:
        told = False
        try:
            if outcome is None:
                await Deadline(self._deadline_ms, self._patience).keep(
                    self._store.record_first_token(self.pool_id, self.id)
                )
            else:
                await Deadline(self._deadline_ms, self._patience).keep(
                    self._store.release(self.pool_id, self.id, outcome)
                )
            told = True
        except FAILING:
            pass  # told later, below
        finally:  # also where the request's own task was cancelled
            if not told and self._leases is not None:
                self._leases.later(self.pool_id, self.id, outcome)
