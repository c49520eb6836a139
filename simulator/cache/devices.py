"""Several devices, each with its own cache: placement by preference, moves, and rebalancing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.allocation import AllocationRequest, CacheHandle
from kvatlas_simulator.cache.errors import SequenceExists, SequenceId, SequenceNotFound, UnknownDevice
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.cache.stats import CacheStats


@dataclass(frozen=True, slots=True)
class SequenceMove:
    """A sequence that was moved to another device."""

    sequence_id: SequenceId
    source: str
    target: str
    blocks: int
    """Number of blocks that it has on the target."""


class DeviceCaches:
    """The caches of several devices. A sequence is on one of them at a time; devices share no blocks.

    The caches can also be used directly (`cache`): this class has no state.
    """

    def __init__(self, caches: Mapping[str, KVCache]) -> None:
        """`caches`: by device, such as `gpu:0`; all with the same block size."""
        if not caches:
            raise InvalidValue("no devices; expected at least one")
        sizes = sorted({cache.block_size for cache in caches.values()})
        if len(sizes) > 1:
            raise InvalidValue(f"block sizes differ: {', '.join(map(str, sizes))}; expected one for all devices")
        self._caches = dict(caches)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self._caches)

    def cache(self, device: str) -> KVCache:
        """A device's cache. Raises UnknownDevice."""
        try:
            return self._caches[device]
        except KeyError:
            raise UnknownDevice(device, self._caches) from None

    def device_of(self, sequence_id: SequenceId) -> str:
        """The device on which a sequence is. Raises SequenceNotFound."""
        for device, cache in self._caches.items():
            if sequence_id in cache:
                return device
        raise SequenceNotFound(sequence_id)

    def cache_of(self, sequence_id: SequenceId) -> KVCache:
        """The cache in which a sequence is. Raises SequenceNotFound."""
        return self._caches[self.device_of(sequence_id)]

    def stats(self) -> dict[str, CacheStats]:
        return {device: cache.stats() for device, cache in self._caches.items()}

    def can_allocate(self, request: AllocationRequest) -> bool:
        """True if some device has enough blocks."""
        return any(cache.can_allocate(request) for cache in self._caches.values())

    def allocate(self, request: AllocationRequest, *, preferred: Sequence[str] = ()) -> CacheHandle:
        """Begin a sequence on the request's device or the first preferred one that has enough blocks, otherwise on the device
        with the most space left.

        Raises InsufficientBlocks if no device has enough (with the numbers for the device that lacks the fewest),
        SequenceExists, or UnknownDevice.
        """
        if any(request.sequence_id in cache for cache in self._caches.values()):
            raise SequenceExists(request.sequence_id)
        own = () if request.device is None else (request.device,)
        wanted = [self.cache(device) for device in (*own, *preferred)]
        for cache in wanted:
            if cache.can_allocate(request):
                return cache.allocate(request)
        roomiest = max(self._caches.values(), key=lambda cache: cache.available_blocks - cache.blocks_required(request))
        return roomiest.allocate(request)

    def extend(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """Append tokens to the sequence, on its device. Raises InsufficientBlocks: `move` or `rebalance` may help."""
        self.cache_of(sequence_id).extend(sequence_id, token_ids)

    def free(self, sequence_id: SequenceId) -> None:
        """End a sequence, wherever it is."""
        self.cache_of(sequence_id).free(sequence_id)

    def move(self, sequence_id: SequenceId, device: str) -> SequenceMove:
        """Move a live sequence. It shares what the target has cached, and no longer shares blocks with sequences on its old
        device.

        Its blocks stay cached on the old device. Raises InsufficientBlocks, SequenceSwappedOut or UnknownDevice; in that
        case, the sequence does not move.
        """
        target, source = self.cache(device), self.device_of(sequence_id)
        if source != device:
            request = self._caches[source].request_of(sequence_id)
            target.allocate(request, count_lookup=False)
            self._caches[source].free(sequence_id)
        return SequenceMove(sequence_id, source, device, target.handle_stats(sequence_id).blocks)

    def rebalance(self) -> tuple[SequenceMove, ...]:
        """Move sequences from the fullest device to the emptiest, as long as that makes the fuller of the two less
        full.

        Sequences that would be preempted first are moved first. Swapped-out sequences stay.
        """
        moves = []
        while (move := self._next_move()) is not None:
            moves.append(self.move(*move))
        return tuple(moves)

    def _next_move(self) -> tuple[SequenceId, str] | None:
        source = max(self._caches, key=lambda device: self._caches[device].utilisation)
        device = min(self._caches, key=lambda device: self._caches[device].utilisation)
        fullest, emptiest = self._caches[source], self._caches[device]
        for sequence_id in fullest.preemption_order():
            request = fullest.request_of(sequence_id)
            if not fullest.exclusive_blocks(sequence_id) or not emptiest.can_allocate(request):
                continue
            held = emptiest.num_blocks - emptiest.available_blocks + emptiest.blocks_required(request)
            if held / emptiest.num_blocks < fullest.utilisation:
                return sequence_id, device
        return None
