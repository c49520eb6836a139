"""The counters of a local copy."""

from dataclasses import dataclass


@dataclass(slots=True)
class ReplicaCounters:
    """Plain integers, counted since the copy was opened.

    `answered`: lookups that the copy answered. `while_loading`, `while_stale`, `while_large`: lookups that the store answered,
    because the copy was still loading, was older than allowed, or would be too large. `loads`: how many copies were made from
    the store; `resumed`: how many continued from the file instead; `losses`: how many were abandoned. `saves`: how often the
    copy was saved to the file; `save_failures`: how often that failed. `verified`: workers whose digests were compared with the
    store's; `mismatches`: those that differed. `messages_read`: messages read from the stream; `refused`: messages that must
    not be applied (the indexer keeps them as dead letters).
    """

    answered: int = 0
    while_loading: int = 0
    while_stale: int = 0
    while_large: int = 0
    loads: int = 0
    resumed: int = 0
    losses: int = 0
    saves: int = 0
    save_failures: int = 0
    verified: int = 0
    mismatches: int = 0
    messages_read: int = 0
    refused: int = 0
