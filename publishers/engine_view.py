"""What a publisher knows of its engine besides its blocks: is it up, how much has it to do, which rank does it send."""

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from kvatlas.blocks.tiers import Tier
from kvatlas.fleet.records import EngineState, WorkerState
from kvatlas_publishers.diagnoses import Diagnoses
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.settings import PublisherSettings

if TYPE_CHECKING:
    from kvatlas_publishers.engines.poller import EnginePoller


class EngineView:
    """Of one engine; `hear` each batch of it."""

    def __init__(
        self,
        settings: PublisherSettings,
        ledger: Ledger,
        diagnoses: Diagnoses,
        *,
        poller: "EnginePoller | None",
        feed_alive: Callable[[], bool] | None,
    ) -> None:
        """`poller`: with an engine URL. `feed_alive`: is the engine's feed connected?"""
        self.poller = poller
        self.reported_load: WorkerState | None = None
        """As an engine of the open event forms told it last."""
        self.draining = False
        self._settings = settings
        self._ledger = ledger
        self._diagnoses = diagnoses
        self._feed_alive = feed_alive
        self._heard_rank: int | None = None
        self._heard_s: float | None = None
        self._created_s = monotonic()

    def hear(self, dp_rank: int | None) -> bool:
        """A batch of this data-parallel rank came. Is it the worker's? Without a rank in the settings that of the first one is
        its own."""
        self._heard_s = monotonic()
        if dp_rank is None or dp_rank == self._heard_rank:
            return True
        own = self._settings.dp_rank if self._settings.dp_rank is not None else self._heard_rank
        if own is None or dp_rank == own:
            self._heard_rank = dp_rank
            return True
        seen = f"the feed has batches of data-parallel rank {dp_rank}, but the worker is rank {own}: they are ignored"
        self._diagnoses.set("rank", seen, f"set --dp-rank {dp_rank}, or --endpoint to the socket of rank {own}")
        return False

    @property
    def state(self) -> EngineState:
        """From the engine's health; without an engine URL from its feed; without a feed it is up. Once it drains: draining
        instead of up."""
        state = self._observed_state
        return EngineState.DRAINING if self.draining and state is EngineState.UP else state

    @property
    def _observed_state(self) -> EngineState:
        if self.poller is not None:
            return self.poller.state
        return EngineState.UP if self._feed_alive is None or self._feed_alive() else EngineState.DOWN

    @property
    def load(self) -> WorkerState | None:
        """The engine's; of the host's memory that it does not tell what is announced from there counts as used."""
        load = self.poller.load if self.reported_load is None and self.poller is not None else self.reported_load
        if load is None or load.cpu_used_bytes:
            return load
        blocks = self._ledger.digest.count(Tier.CPU_DRAM) * self._settings.granularity
        block_bytes = self._ledger.block_bytes_of.of_worker(self._ledger.block_size, Tier.CPU_DRAM)
        return load.model_copy(update={"cpu_used_bytes": blocks * block_bytes}) if blocks else load

    @property
    def block_size(self) -> int | None:
        """Tokens a block: from the engine's events, before the first one from its metrics."""
        return self._ledger.block_size or (self.poller.block_size if self.poller is not None else None)

    @property
    def feed_connected(self) -> bool | None:
        """None: there is no feed."""
        return None if self._feed_alive is None else self._feed_alive()

    @property
    def silence_s(self) -> float | None:
        """Since its last batch; None before the first."""
        return None if self._heard_s is None else monotonic() - self._heard_s

    @property
    def awaited_s(self) -> int | None:
        """How long it has not been up since the publisher's start; None if it was, or nobody looks."""
        return int(monotonic() - self._created_s) if self.poller is not None and not self.poller.was_up else None
