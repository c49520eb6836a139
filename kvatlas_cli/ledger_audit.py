"""Compares every publisher's ledger with the blocks that are actually in the index.

A publisher replies with its digests by scope, and sends a checkpoint to the stream. Once the index has applied the
checkpoint, the worker's blocks are recounted. The index's own digest is not trusted, because it may be right although the
blocks are wrong. A worker that never pauses can't be recounted; it is judged by the checkpoint, which the index compared
with its digest.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic

import anyio
from nats.aio.client import Client

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.control import ControlOp, ControlReply
from kvatlas.bus.control_requests import ask_publishers
from kvatlas.bus.subjects import partition_of
from kvatlas.identity import Scope, shard_of
from kvatlas.index.protocol import ResidencyIndex, WorkerRecord
from kvatlas.index.redis.index import RedisIndex
from kvatlas.index.redis.recount import RecountResult

POLL_S = 0.05
ROUNDS = 4


class Verdict(StrEnum):
    EQUAL = "equal"
    """A recount found the same blocks."""
    PROVEN = "proven"
    """The worker never paused, but its checkpoint matched."""
    DIFFERS = "differs"
    BEHIND = "behind"
    """The index has not applied everything that the publisher sent."""
    UNANSWERED = "unanswered"
    """The index holds blocks of the worker, but no publisher answers for it."""
    DRAINED = "drained"
    """Its publisher announced that it would stop; until the worker is retired or published again, no publisher answers for its
    blocks."""

    @property
    def good(self) -> bool:
        return self in (Verdict.EQUAL, Verdict.PROVEN, Verdict.DRAINED)


@dataclass(frozen=True, slots=True)
class Difference:
    """A scope and tier in which ledger and index differ. With equal counts they hold different blocks."""

    scope: Scope
    tier: Tier
    ledger_blocks: int
    index_blocks: int


@dataclass(frozen=True, slots=True)
class WorkerAudit:
    """The verdict on one worker. `blocks`: residencies in its ledger, None if its publisher did not answer."""

    worker_id: str
    verdict: Verdict
    blocks: int | None
    note: str = ""
    differences: Sequence[Difference] = ()


async def audit_workers(
    index: RedisIndex, client: Client, worker_ids: Iterable[str], deadline_s: float, drained: Collection[str] = ()
) -> list[WorkerAudit]:
    """One verdict per worker, sorted by worker. Workers that have no blocks and give no answer are left out. Raises
    Unreachable.

    `drained`: workers whose last heartbeat said that they are draining, so no answer is expected.
    """
    until_s = monotonic() + deadline_s
    found: dict[str, WorkerAudit] = {}
    pending = sorted(set(worker_ids))
    for round_number in range(ROUNDS):
        last = round_number == ROUNDS - 1 or monotonic() >= until_s
        replies = await ask_publishers(client, pending, ControlOp.DIGEST)
        caught_up = await _wait_until_caught_up(index, replies, until_s)
        counted = {one.worker_id: one for one in await index.recount(caught_up)}
        records = await _read_records(index, pending)
        for worker_id in pending:
            if worker_id in drained and worker_id not in replies:
                one = WorkerAudit(worker_id, Verdict.DRAINED, None, "its publisher has stopped; routers skip it")
            else:
                one = _judge(worker_id, replies.get(worker_id), records.get(worker_id), counted.get(worker_id))
            if one.verdict in (Verdict.EQUAL, Verdict.DRAINED) or last or (one.differences and not one.note):
                found[worker_id] = one
        pending = [worker_id for worker_id in pending if worker_id not in found]
        if not pending:
            break
    return [
        one
        for worker_id, one in sorted(found.items())
        if one.verdict not in (Verdict.UNANSWERED, Verdict.DRAINED) or _holds_blocks(records.get(worker_id))
    ]


def find_differences(ledger: Mapping[Scope, Sequence[int]], index: Mapping[Scope, Sequence[int]]) -> list[Difference]:
    """The scopes and tiers in which two digests by scope differ."""
    empty = Digest().words
    found = []
    for scope in sorted(ledger.keys() | index.keys(), key=str):
        one, other = ledger.get(scope, empty), index.get(scope, empty)
        for tier in Tier:
            words = slice(3 * tier, 3 * tier + 3)
            if list(one[words]) != list(other[words]):
                found.append(Difference(scope, tier, one[3 * tier], other[3 * tier]))
    return found


def _judge(
    worker_id: str, reply: ControlReply | None, record: WorkerRecord | None, counted: RecountResult | None
) -> WorkerAudit:
    if reply is None:
        return WorkerAudit(worker_id, Verdict.UNANSWERED, None, "no publisher answers for it")
    blocks = Digest(reply.digest).blocks if reply.digest is not None else None
    if not reply.ok or reply.digest is None:
        return WorkerAudit(worker_id, Verdict.BEHIND, blocks, reply.note)
    sent = _last_sent(reply)
    if record is None or (record.incarnation, record.seq) < sent:
        if counted is None and not blocks and record is None:
            return WorkerAudit(worker_id, Verdict.EQUAL, blocks)
        known = (
            "the index does not know the worker"
            if record is None
            else f"the index has incarnation {record.incarnation} seq {record.seq}"
        )
        note = f"the publisher has sent incarnation {sent[0]} seq {sent[1]}; {known}"
        return WorkerAudit(worker_id, Verdict.BEHIND, blocks, note)
    if record.incarnation > sent[0]:
        note = f"the index has incarnation {record.incarnation} of another publisher; this one's is {sent[0]}"
        return WorkerAudit(worker_id, Verdict.DIFFERS, blocks, note)
    if counted is not None and not counted.moved and (counted.incarnation, counted.seq) == sent:
        if reply.scopes is not None:
            found = find_differences({one.scope: one.digest for one in reply.scopes}, counted.scopes)
            note = "" if list(reply.marks) == list(counted.marks) else "its marks differ"
            if found or note or counted.sound:
                verdict = Verdict.DIFFERS if found or note else Verdict.EQUAL
                return WorkerAudit(worker_id, verdict, blocks, note, found)
            return WorkerAudit(
                worker_id, Verdict.DIFFERS, blocks, "its blocks are right, but flags or its holder's name are wrong"
            )
        same = _total(counted) == reply.digest and counted.sound and list(reply.marks) == list(counted.marks)
        return WorkerAudit(
            worker_id,
            Verdict.EQUAL if same else Verdict.DIFFERS,
            blocks,
            "" if same else "too many scopes to say which differ",
        )
    if record.bad or record.closed or not record.answering:
        return WorkerAudit(worker_id, Verdict.DIFFERS, blocks, "the worker is in doubt; waiting for its snapshot")
    return WorkerAudit(worker_id, Verdict.PROVEN, blocks, "the worker never paused; judged by its checkpoint")


def _last_sent(reply: ControlReply) -> tuple[int, int]:
    """The (incarnation, seq) of the checkpoint that the publisher sent for the audit."""
    return reply.incarnation, int((reply.status or {}).get("told_seq", -1))


def _total(counted: RecountResult) -> list[int]:
    """The digest of all scopes: counts are added, sums are added modulo 2^32."""
    words = Digest().words
    for scope_words in counted.scopes.values():
        words = [
            (a + b) % (1 << 32) if i % 3 else a + b for i, (a, b) in enumerate(zip(words, scope_words, strict=True))
        ]
    return words


def _holds_blocks(record: WorkerRecord | None) -> bool:
    return record is not None and record.answering


async def _wait_until_caught_up(
    index: ResidencyIndex, replies: Mapping[str, ControlReply], until_s: float
) -> list[str]:
    """Wait for the index to apply everything that the publishers sent. Returns the workers that have caught up by the
    deadline."""
    while True:
        records = await _read_records(index, list(replies))
        caught_up = []
        for worker_id, reply in replies.items():
            record = records.get(worker_id)
            if record is not None and (record.incarnation, record.seq) >= _last_sent(reply):
                caught_up.append(worker_id)
        if len(caught_up) == len(replies) or monotonic() >= until_s:
            return caught_up
        await anyio.sleep(POLL_S)


async def _read_records(index: ResidencyIndex, worker_ids: Sequence[str]) -> dict[str, WorkerRecord]:
    shards = {shard_of(partition_of(worker_id, index.partitions), index.shards) for worker_id in worker_ids}
    records = [record for shard in sorted(shards) for record in await index.records(shard)]
    wanted = set(worker_ids)
    return {record.worker_id: record for record in records if record.worker_id in wanted}
