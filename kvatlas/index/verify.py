"""Holding an overlap by galloping against a full walk."""

from collections.abc import Sequence

from kvatlas.blocks.residency import Overlap


def differences(galloped: Overlap, walked: Overlap) -> Sequence[tuple[str, int, int]]:
    """(worker, depth by galloping, depth by the walk) wherever they are not equal."""
    fast, slow = galloped.depths(), walked.depths()
    return tuple(
        (worker, fast.get(worker, 0), slow.get(worker, 0))
        for worker in sorted(fast.keys() | slow.keys())
        if fast.get(worker, 0) != slow.get(worker, 0)
    )
