"""NATS subjects and streams. They are spelled out here and nowhere else."""

from collections.abc import Sequence
from math import gcd

import xxhash

from kvatlas.errors import InvalidValue
from kvatlas.identity import check_worker_id

STREAM = "KVATLAS_EVENTS"
ALL_EVENTS = "kvatlas.events.*.*"
ALL_ALIVE = "kvatlas.alive.*"
ALL_CONTROL = "kvatlas.control.*"
ALL_HASHES = "kvatlas.hashes.*"
ALL_GRANTS = "kvatlas.grant.*.*"
ALL_FLEETS = "kvatlas.fleet.*"
ALL_STORE_NOTICES = "kvatlas.store.*.*"
DEAD_STREAM = "KVATLAS_DEAD"
ALL_DEAD = "kvatlas.dead.*.*"
DEAD_REASON, DEAD_WHY, DEAD_SUBJECT = "Kvatlas-Reason", "Kvatlas-Why", "Kvatlas-Subject"
"""Headers of a dead message: why it was refused, in a word and in a line, and its original subject."""
FLEET = "Kvatlas-Fleet"
"""Header of an event message: the fleet id of its publisher, if the publisher was given one."""


def partition_of(worker_id: str, partitions: int) -> int:
    """The partition of a worker's messages: XXH3_64(worker_id) modulo the number of partitions."""
    return xxhash.xxh3_64_intdigest(worker_id.encode()) % partitions


def events_subject(worker_id: str, partitions: int) -> str:
    """The subject of one worker's messages; its publisher may not write to any other events subject."""
    return f"kvatlas.events.{partition_of(worker_id, partitions)}.{check_worker_id(worker_id)}"


def events_of_worker(worker_id: str) -> str:
    """The filter for all messages of one worker, in any partition."""
    return f"kvatlas.events.*.{check_worker_id(worker_id)}"


def partition_events(partition: int, partitions: int = 0, others: Sequence[int] = ()) -> list[str]:
    """The filters for all messages of one partition out of `partitions`. `others`: other partition counts that publishers may
    use; with any of these, the filters also let messages of other partitions' workers through."""
    numbers = {partition}
    for count in others:  # the worker's hash is known modulo both counts, and therefore modulo their common divisor too
        common = gcd(count, partitions)
        numbers.update(range(partition % common, count, common))
    return [f"kvatlas.events.{number}.*" for number in sorted(numbers)]


def worker_of(subject: str) -> tuple[int, str]:
    """(partition, worker id) from an events subject. Raises InvalidValue for any other subject."""
    parts = subject.split(".")
    if len(parts) != 4 or parts[:2] != ["kvatlas", "events"] or not parts[2].isdigit():
        raise InvalidValue(f"subject {subject!r}; expected kvatlas.events.<partition>.<worker>")
    return int(parts[2]), parts[3]


def alive_subject(worker_id: str) -> str:
    """The subject of one worker's heartbeats (core NATS)."""
    return f"kvatlas.alive.{check_worker_id(worker_id)}"


def control_subject(worker_id: str) -> str:
    """The subject of requests to a worker's publisher: snapshot, status, digest (core NATS, request and reply)."""
    return f"kvatlas.control.{check_worker_id(worker_id)}"


def hashes_subject(worker_id: str) -> str:
    """The subject of routers' requests for a worker's own block hashes (core NATS, request and reply)."""
    return f"kvatlas.hashes.{check_worker_id(worker_id)}"


def grant_subject(worker_id: str, partitions: int) -> str:
    """The subject on which one worker's publisher requests a grant for a large snapshot (core NATS, request and reply)."""
    return f"kvatlas.grant.{partition_of(worker_id, partitions)}.{check_worker_id(worker_id)}"


def grants_of_worker(worker_id: str) -> str:
    """The pattern for one worker's grant requests in every partition, for use as a permission."""
    return f"kvatlas.grant.*.{check_worker_id(worker_id)}"


def fleet_subject(fleet_id: str) -> str:
    """The subject of requests for the identities of a fleet's indexers (core NATS, request and reply)."""
    return f"kvatlas.fleet.{fleet_id}"


def shared_store_subject(store_id: str, worker_id: str) -> str:
    """The subject of notices from a worker's publisher to the publisher of a shared store (core NATS)."""
    return f"kvatlas.store.{check_worker_id(store_id)}.{check_worker_id(worker_id)}"


def notices_to_store(store_id: str) -> str:
    """The pattern for the notices of all writers about one store."""
    return f"kvatlas.store.{check_worker_id(store_id)}.*"


def notices_of_writer(worker_id: str) -> str:
    """The pattern for one writer's notices about any store, for use as a permission."""
    return f"kvatlas.store.*.{check_worker_id(worker_id)}"


def dead_subject(partition: int, worker_token: str) -> str:
    """The subject of messages that an indexer must not apply; `worker_token` is the last token of the original subject."""
    return f"kvatlas.dead.{partition}.{worker_token}"


def writer_of(subject: str) -> str:
    """The worker that sent a notice about a shared store. Raises InvalidValue for any other subject."""
    parts = subject.split(".")
    if len(parts) != 4 or parts[:2] != ["kvatlas", "store"]:
        raise InvalidValue(f"subject {subject!r}; expected kvatlas.store.<store>.<worker>")
    return check_worker_id(parts[3])


def is_inbox(reply: str) -> bool:
    """True if replies to this subject are allowed. The responder may publish anywhere, so the reply subject of a request has to
    be checked."""
    return reply.startswith("_INBOX.")
