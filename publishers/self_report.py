"""A publisher's reports about itself: to operators (`status`), in metrics (`gauges`), and in heartbeats to `kvatlas doctor`."""

from dataclasses import asdict
from typing import Any

from kvatlas.blocks.residency import TierBlocks
from kvatlas.blocks.tiers import Tier
from kvatlas.fleet.records import LEFT_OUT, MAX_DIAGNOSIS_TEXT, MAX_SERVED_NAMES, Diagnosis
from kvatlas.identity import MAX_NAME_BYTES
from kvatlas.redaction import redact_url
from kvatlas_publishers.counters import PublisherGauges
from kvatlas_publishers.engine_view import EngineView
from kvatlas_publishers.heartbeat import DoctorFacts
from kvatlas_publishers.intake.diagnosis_texts import Circumstances, text_of
from kvatlas_publishers.intake.feed_coverage import Intake, Reason, Serving, Taken
from kvatlas_publishers.parts import PublisherParts
from kvatlas_publishers.stream.sender import Sender

MAX_SAMPLE = 160
_EXPLAINED = {
    Reason.OTHER_BLOCK_SIZE: ("block_size",),
    Reason.UNREADABLE_EVENTS: ("hashes", "engine"),
    Reason.UNREADABLE_PAYLOADS: ("feed", "engine"),
    Reason.IGNORED: ("rank", "engine_id", "gaps"),
    Reason.NO_EVENTS: ("feed", "engine", "block_size_untold"),
    Reason.HOLES: ("gaps",),
}
"""Diagnoses that state the cause more precisely."""
_NOT_STORED = (
    Reason.ADAPTER_UNNAMED,
    Reason.REMOVAL_UNTOLD,
    Reason.NO_FULL_ATTENTION,
    Reason.UNREADABLE_EVENTS,
    Reason.UNREADABLE_PAYLOADS,
    Reason.IGNORED,
)
"""Reasons for blocks that the ledger does not count as stored in groups of full attention."""
BLOCKED_S = 2.0
"""Time within which refused messages are normally sent again, and a new leader of the stream is elected."""


class SelfReport:
    """Reads the parts of one publisher; changes only its diagnoses."""

    def __init__(self, parts: PublisherParts, engine: EngineView, sender: Sender, *, has_replay: bool = False) -> None:
        self._settings = parts.settings
        self._changelog = parts.changelog
        self._ledger = parts.changelog.ledger
        self._engine = engine
        self._counters = parts.counters
        self._diagnoses = parts.diagnoses
        self._sender = sender
        self._client = parts.client
        self._has_replay = has_replay
        self._intake = Intake()

    def gauges(self) -> PublisherGauges:
        """Values for metrics; read on the exporter's thread."""
        outbox, digest, connected = self._changelog.outbox, self._ledger.digest, self._engine.feed_connected
        return PublisherGauges(
            None if connected is None else int(connected),
            self._engine.silence_s,
            self._intake.verdict.share,
            self._engine.state,
            outbox.waiting - outbox.in_flight,
            outbox.in_flight,
            TierBlocks(*(digest.count(tier) for tier in Tier)),
            self._ledger.orphans,
            self._ledger.awaiting_events,
        )

    def status(self) -> dict[str, Any]:
        """Everything that an operator may want to know, as JSON types."""
        changelog, outbox, ledger = self._changelog, self._changelog.outbox, self._ledger
        return {
            "worker_id": self._settings.worker_id,
            "incarnation": outbox.incarnation,
            "told_seq": outbox.next_seq - 1,
            "acked_seq": outbox.acked_seq,
            "waiting_messages": outbox.waiting,
            "wanted": changelog.incarnation_due.value if changelog.incarnation_due else None,
            "yielded": changelog.yielded,
            "trouble": self._sender.trouble,
            "nats": self._server_name,
            "engine_state": self._engine.state.value,
            "announced": ledger.digest.blocks,
            "marked": ledger.marked_blocks,
            "groups": {index: group.kind.value for index, group in sorted(ledger.groups.told.items())},
            "upper_bound": ledger.reuse.upper_bound,
            "shared_store": self._settings.shared_store,
            "block_size": ledger.block_size,
            "intake": self._intake_status(),
            "diagnoses": [diagnosis.model_dump() for diagnosis in self.doctor_facts().diagnoses],
            "counters": self._counters.to_jsonable(),
            "ledger": asdict(ledger.counters),
        }

    def doctor_facts(self) -> DoctorFacts:
        found = list(self._diagnoses.current)
        if self._sender.blocked_s >= BLOCKED_S:
            found.append(self._diagnose_blocked())
        if self._engine.poller is None:
            return DoctorFacts(found)
        served = self._engine.poller.served_names
        names = () if self._settings.model_id in served else [name[:MAX_NAME_BYTES] for name in served]
        return DoctorFacts(found, names[:MAX_SERVED_NAMES], self._engine.awaited_s)

    def judge_intake(self, now_s: float) -> None:
        """Judge how much of the engine's reports can be published. Call it about once a second."""
        poller = self._engine.poller
        serving = poller.serving if poller is not None and self._settings.events else Serving()
        publishes = bool(self._ledger.digest.blocks)
        verdict = self._intake.judge(self._taken, serving, publishes=publishes, now_s=now_s)
        explained = _EXPLAINED.get(verdict.reason, ()) if verdict.reason is not None else ()
        if verdict.reason is None or any(one.name in explained for one in self._diagnoses.current):
            self._diagnoses.clear(LEFT_OUT)
            return
        zmq = self._engine.feed_connected is not None
        where = Circumstances(
            self._settings.engine, zmq, self._has_replay, self._diagnoses.last_unreadable[:MAX_SAMPLE]
        )
        self._diagnoses.set(LEFT_OUT, *text_of(verdict, where), counts=True)

    @property
    def _taken(self) -> Taken:
        counters, ledger = self._counters, self._ledger.counters
        left_out = {
            Reason.UNKNOWN_PARENT: max(0, ledger.unknown_parent - ledger.parents_found - ledger.zero_parent),
            Reason.ZERO_PARENT: ledger.zero_parent,
            Reason.OTHER_BLOCK_SIZE: ledger.other_block_size,
            Reason.UNINDEXABLE: ledger.unindexable,
            Reason.NO_TOKENS: ledger.placeholder_unknown,
            Reason.ADAPTER_UNNAMED: ledger.adapter_unnamed,
            Reason.REMOVAL_UNTOLD: ledger.removal_untold,
            Reason.NO_FULL_ATTENTION: ledger.sparse if ledger.sparse == ledger.stored else 0,
            Reason.UNREADABLE_EVENTS: counters.skipped_events,
            Reason.UNREADABLE_PAYLOADS: counters.poison,
            Reason.IGNORED: counters.feed_unheard,
        }
        told = ledger.stored - ledger.sparse + sum(left_out[reason] for reason in _NOT_STORED)
        unfilled = counters.feed_gaps - counters.feed_gaps_filled
        return Taken(told, left_out, unfilled)

    def _intake_status(self) -> dict[str, Any]:
        verdict, taken = self._intake.verdict, self._taken
        return {
            "told": taken.told,
            "left_out": {reason.value: count for reason, count in (taken.left_out or {}).items() if count},
            "recently_reported": verdict.told,
            "recently_left_out": verdict.left_out,
            "reason": None if verdict.reason is None else verdict.reason.value,
        }

    def diagnose_block_size(self) -> None:
        """Diagnose a block size setting that does not match the engine's blocks."""
        other, own = self._ledger.other_block_size, self._settings.block_size
        if other is None or self._counters.blocks_stored or self._ledger.digest.blocks:
            self._diagnoses.clear("block_size")
        else:
            seen = f"the engine's blocks have {other} tokens, but --block-size is {own}: none of them is published"
            why = " (context parallelism multiplies an engine's block size)" if other % (own or other) == 0 else ""
            self._diagnoses.set("block_size", seen, f"set --block-size {other}, or leave it out{why}")

    def diagnose_chain(self) -> None:
        """Diagnose blocks left out because only other blocks have token ids."""
        if left_out := self._ledger.counters.other_chain:
            seen = f"{left_out} blocks without token ids are left out, because others were reported with token ids"
            self._diagnoses.set("chain", seen, "send the token ids of every block, or of none")

    def _diagnose_blocked(self) -> Diagnosis:
        seen = f"NATS at {self._server_name} does not take its messages: {self._sender.trouble}"
        if self._sender.refused_without_stream:
            cure = "start an indexer on that NATS, or set --nats-url to the NATS that the indexers use"
        else:
            cure = "check the storage and limits of JetStream, and the permissions of the publisher's NATS user"
        return Diagnosis(name="publishing", seen=seen[:MAX_DIAGNOSIS_TEXT], cure=cure)

    @property
    def _server_name(self) -> str | None:
        """The name of the NATS server to which the publisher is connected."""
        server = self._client.connected_url
        return None if server is None else redact_url(server.geturl())
