"""Is the index right? Every publisher's ledger against the blocks that the index really has, on demand.

A publisher answers with its digest by scope and puts a checkpoint in the stream. When the index has reached it, the worker's
blocks are recounted (not the index's own digest: that may be right where the blocks are not). A worker that never rests
can't be recounted: there the checkpoint, which the index held against its digest, is the answer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic

import anyio
from nats.aio.client import Client
from nats.errors import Error as NatsError

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.control import ControlOp, ControlReply, ControlRequest
from kvatlas.bus.subjects import control_subject
from kvatlas.errors import InvalidValue
from kvatlas.identity import Scope, partition_of, shard_of
from kvatlas.index.protocol import RecountResult, ResidencyIndex, WorkerRecord

ANSWER_S = 2.0
POLL_S = 0.05
AT_ONCE = 64
ROUNDS = 4


class Verdict(StrEnum):
    EQUAL = "equal"
    """Every block recounted."""
    PROVEN = "proven"
    """It never rested: its checkpoint was right."""
    DIFFERS = "differs"
    BEHIND = "behind"
    """The index did not reach what the publisher had told."""
    UNANSWERED = "unanswered"
    """The index holds something of it, and no publisher answers for it."""

    @property
    def good(self) -> bool:
        return self in (Verdict.EQUAL, Verdict.PROVEN)


@dataclass(frozen=True, slots=True)
class Difference:
    """One scope and tier in which the publisher and the index don't agree. Equal counts: other blocks."""

    scope: Scope
    tier: Tier
    told_blocks: int
    held_blocks: int


@dataclass(frozen=True, slots=True)
class WorkerAudit:
    """One worker. `blocks`: residencies told by its publisher, None where it did not answer."""

    worker_id: str
    verdict: Verdict
    blocks: int | None
    note: str = ""
    differences: Sequence[Difference] = ()


async def audit(
    index: ResidencyIndex, client: Client, worker_ids: Iterable[str], deadline_s: float
) -> list[WorkerAudit]:
    """One verdict a worker, by worker. Workers that hold nothing and don't answer are left out. Raises Unreachable."""
    until_s = monotonic() + deadline_s
    found: dict[str, WorkerAudit] = {}
    open_ = sorted(set(worker_ids))
    for lap in range(ROUNDS):
        last = lap == ROUNDS - 1 or monotonic() >= until_s
        replies = await _ask_all(client, open_)
        reached = await _wait_until_reached(index, replies, until_s)
        counted = {one.worker_id: one for one in await index.recount(reached)}
        records = await _records(index, open_)
        for worker_id in open_:
            verdict = _judge(worker_id, replies.get(worker_id), records.get(worker_id), counted.get(worker_id))
            if verdict.verdict is Verdict.EQUAL or last or (verdict.differences and not verdict.note):
                found[worker_id] = verdict
        open_ = [worker_id for worker_id in open_ if worker_id not in found]
        if not open_:
            break
    nothing = {w for w, one in found.items() if one.verdict is Verdict.UNANSWERED and not _holds(records.get(w))}
    return [one for worker_id, one in sorted(found.items()) if worker_id not in nothing]


def differences(told: Mapping[Scope, Sequence[int]], held: Mapping[Scope, Sequence[int]]) -> list[Difference]:
    """Where two digests by scope are not equal, by scope and tier."""
    nothing = Digest().words
    found = []
    for scope in sorted(told.keys() | held.keys(), key=str):
        one, other = told.get(scope, nothing), held.get(scope, nothing)
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
    told = _told(reply)
    if record is None or (record.incarnation, record.seq) < told:
        if counted is None and not blocks and record is None:
            return WorkerAudit(worker_id, Verdict.EQUAL, blocks)
        where = (
            "it does not know the worker"
            if record is None
            else f"it has incarnation {record.incarnation} seq {record.seq}"
        )
        note = f"told incarnation {told[0]} seq {told[1]}; {where}"
        return WorkerAudit(worker_id, Verdict.BEHIND, blocks, note)
    if record.incarnation > told[0]:
        note = f"another publisher tells of it: incarnation {record.incarnation}, this one's is {told[0]}"
        return WorkerAudit(worker_id, Verdict.DIFFERS, blocks, note)
    if counted is not None and not counted.moved and (counted.incarnation, counted.seq) == told:
        if reply.scopes is not None:
            told_scopes = {one.scope: one.digest for one in reply.scopes}
            found = differences(told_scopes, counted.scopes)
            if found or counted.sound:
                return WorkerAudit(worker_id, Verdict.DIFFERS if found else Verdict.EQUAL, blocks, "", found)
            return WorkerAudit(
                worker_id, Verdict.DIFFERS, blocks, "its blocks are there, but flags or its holder's name are wrong"
            )
        same = _total(counted) == reply.digest and counted.sound
        return WorkerAudit(
            worker_id, Verdict.EQUAL if same else Verdict.DIFFERS, blocks, "" if same else "too many scopes"
        )
    if record.bad or record.closed or not record.answering:
        return WorkerAudit(worker_id, Verdict.DIFFERS, blocks, "the index doubts it; a snapshot is under way")
    return WorkerAudit(worker_id, Verdict.PROVEN, blocks, "it never rested: by its checkpoint")


def _told(reply: ControlReply) -> tuple[int, int]:
    return reply.incarnation, int((reply.status or {}).get("told_seq", -1))


def _total(counted: RecountResult) -> list[int]:
    """The digest of all scopes: counts add up, sums modulo 2^32."""
    words = Digest().words
    for scope_words in counted.scopes.values():
        words = [
            (a + b) % (1 << 32) if i % 3 else a + b for i, (a, b) in enumerate(zip(words, scope_words, strict=True))
        ]
    return words


def _holds(record: WorkerRecord | None) -> bool:
    return record is not None and record.answering


async def _ask_all(client: Client, worker_ids: Sequence[str]) -> dict[str, ControlReply]:
    replies: dict[str, ControlReply] = {}
    limit = anyio.CapacityLimiter(AT_ONCE)
    request = ControlRequest(op=ControlOp.DIGEST).pack()

    async def ask(worker_id: str) -> None:
        async with limit:
            try:
                msg = await client.request(control_subject(worker_id), request, timeout=ANSWER_S)
                reply = ControlReply.unpack(msg.data)
            except (NatsError, TimeoutError, InvalidValue):
                return
        if reply.worker_id == worker_id:
            replies[worker_id] = reply

    async with anyio.create_task_group() as group:
        for worker_id in worker_ids:
            group.start_soon(ask, worker_id)
    return replies


async def _wait_until_reached(index: ResidencyIndex, replies: Mapping[str, ControlReply], until_s: float) -> list[str]:
    """The workers of which the index has what they had told; all of them, or at the deadline those."""
    while True:
        records = await _records(index, list(replies))
        reached = []
        for worker_id, reply in replies.items():
            record = records.get(worker_id)
            if record is not None and (record.incarnation, record.seq) >= _told(reply):
                reached.append(worker_id)
        if len(reached) == len(replies) or monotonic() >= until_s:
            return reached
        await anyio.sleep(POLL_S)


async def _records(index: ResidencyIndex, worker_ids: Sequence[str]) -> dict[str, WorkerRecord]:
    shards = {shard_of(partition_of(worker_id, index.partitions), index.shards) for worker_id in worker_ids}
    records = [record for shard in sorted(shards) for record in await index.records(shard)]
    wanted = set(worker_ids)
    return {record.worker_id: record for record in records if record.worker_id in wanted}
