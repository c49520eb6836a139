"""A publisher's view of its engine, apart from its blocks: its state, its load, and the data-parallel rank of its
events."""

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
    """The view of one engine. Call `hear` for each of its batches."""

    def __init__(
        self,
        settings: PublisherSettings,
        ledger: Ledger,
        diagnoses: Diagnoses,
        *,
        poller: "EnginePoller | None",
        feed_alive: Callable[[], bool] | None,
    ) -> None:
        """`poller`: set if there is an engine URL. `feed_alive`: True if the engine's feed is connected."""
        self.poller = poller
        self.reported_load: WorkerState | None = None
        """Last load that an engine of the open event forms reported."""
        self.draining = False
        self._settings = settings
        self._ledger = ledger
        self._diagnoses = diagnoses
        self._feed_alive = feed_alive
        self._heard_rank: int | None = None
        self._heard_s: float | None = None
        self._created_s = monotonic()

    def hear(self, dp_rank: int | None) -> bool:
        """Record a batch from this data-parallel rank. Returns True if the rank is the worker's. If the settings give no rank,
        the first batch sets it."""
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
        """The engine's state according to its health; without an engine URL, according to its feed; without a feed, up. A
        draining engine is draining instead of up."""
        state = self._observed_state
        return EngineState.DRAINING if self.draining and state is EngineState.UP else state

    @property
    def _observed_state(self) -> EngineState:
        if self.poller is not None:
            return self.poller.state
        return EngineState.UP if self._feed_alive is None or self._feed_alive() else EngineState.DOWN

    @property
    def load(self) -> WorkerState | None:
        """The engine's load. If it does not report its use of host memory, the blocks published for that tier count as
        used."""
        load = self.poller.load if self.reported_load is None and self.poller is not None else self.reported_load
        if load is None or load.cpu_used_bytes:
            return load
        blocks = self._ledger.digest.count(Tier.CPU_DRAM) * self._settings.granularity
        block_bytes = self._ledger.sizes.bytes_in(Tier.CPU_DRAM)
        return load.model_copy(update={"cpu_used_bytes": blocks * block_bytes}) if blocks else load

    @property
    def block_size(self) -> int | None:
        """Tokens per block: from the engine's events or, before the first event, from its metrics."""
        return self._ledger.block_size or (self.poller.block_size if self.poller is not None else None)

    @property
    def feed_connected(self) -> bool | None:
        """True if the feed is connected; None if there is no feed."""
        return None if self._feed_alive is None else self._feed_alive()

    @property
    def silence_s(self) -> float | None:
        """Seconds since the engine's last batch; None before the first one."""
        return None if self._heard_s is None else monotonic() - self._heard_s

    @property
    def awaited_s(self) -> int | None:
        """Seconds since the publisher's start if the engine has never been up; None if it has been, or if its health is not
        polled."""
        return int(monotonic() - self._created_s) if self.poller is not None and not self.poller.was_up else None
