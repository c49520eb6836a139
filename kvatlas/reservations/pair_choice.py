"""Chooses a pair: one worker computes the prompt, and another one the answer. The twin in Lua is `functions/_pair_choice.lua`.

A pair costs the sum of prefill, transfer and decode. The transfer depends only on the group of the prefill worker, so only the
cheapest worker of each group is tried: the work grows with the number of workers, not of pairs.
"""

from collections.abc import Sequence

from kvatlas.reservations.protocol import PairLayout


def choose_pair(layout: PairLayout, scores: Sequence[tuple[int, float]]) -> tuple[int | None, int]:
    """The offers that compute the prompt (None: the other one does) and the answer.

    `scores`: the level (`limits.level`) and the cost of each offer. The levels of a pair add up, and matter more than costs.
    Ties go to a worker that does both, then to the first one. The ask must contain an offer that can be chosen.
    """
    first_both = layout.prefills + layout.decodes
    prefill: int | None = None
    chosen = -1
    least: tuple[int, float] | None = None
    for i in range(first_both, len(scores)):
        if least is None or scores[i] < least:
            chosen, least = i, scores[i]
    cheapest: dict[int, int] = {}
    for i, group in enumerate(layout.groups):
        if group not in cheapest or scores[i] < scores[cheapest[group]]:
            cheapest[group] = i
    for i, transfers_us in enumerate(layout.transfers_us, start=layout.prefills):
        for group, transfer_us in enumerate(transfers_us):
            if transfer_us >= 0 and group in cheapest:
                level, score = scores[cheapest[group]]
                pair = (level + scores[i][0], score + (scores[i][1] + transfer_us))
                if least is None or pair < least:
                    prefill, chosen, least = cheapest[group], i, pair
    return prefill, chosen
