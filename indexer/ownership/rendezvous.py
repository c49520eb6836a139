"""Assigns partitions to replicas: rendezvous hashing over the live members (pure)."""

from collections.abc import Collection

import xxhash


def targets(members: Collection[str], partitions: int) -> dict[int, str]:
    """Partition -> the member that should own it; empty if there are no members. Every replica computes the same result from
    the same members. When a member joins or leaves, the only partitions that move are the ones that it gets or had."""
    if not members:
        return {}
    return {
        partition: max(members, key=lambda member: (_weight(member, partition), member))
        for partition in range(partitions)
    }


def target_partitions(member: str, members: Collection[str], partitions: int) -> list[int]:
    """The partitions that `member` should own, in ascending order."""
    return [partition for partition, owner in targets(members, partitions).items() if owner == member]


def _weight(member: str, partition: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{partition}/{member}".encode())
