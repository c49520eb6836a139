"""Checks of NATS: that the event stream exists, is the one that indexers read, is configured as kvatlas needs it, and
reaches far enough back. Also reports which messages indexers have refused."""

import asyncio
import json
import time
from base64 import b64decode
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nats.aio.client import Client
from nats.errors import NoRespondersError
from nats.js.errors import APIError

from kvatlas.bus.partition_batch import Position
from kvatlas.bus.stream import StreamInfo, microseconds_of, stream_info
from kvatlas.bus.subjects import ALL_EVENTS, DEAD_REASON, DEAD_STREAM, DEAD_SUBJECT, DEAD_WHY, STREAM
from kvatlas.bus.wire import MAX_MESSAGE_BYTES
from kvatlas_cli.doctor.finding import Finding, Level, join_names
from kvatlas_cli.output import count_text

SHORT_S = 120
"""Minimum reach of the stream: a replica that takes over, or has fallen behind, needs the messages of the last few
minutes."""
ANSWER_S = 2.0
LATELY_US = 120_000_000
"""Messages refused longer ago than this are not reported."""
MOST_LETTERS = 64
"""Maximum number of the latest refused messages that are read."""
_NO_STREAM = 10059
_RECREATE = "delete the stream; an indexer creates it again"


async def examine_stream(client: Client) -> list[Finding]:
    """Check the event stream. Raises NATS errors if the server does not answer in time."""
    try:
        reply = await client.request(f"$JS.API.STREAM.INFO.{STREAM}", b"", timeout=ANSWER_S)
    except NoRespondersError:
        line = "JetStream is not enabled for this account: publishers can't send events"
        return [
            Finding(
                "nats.jetstream", Level.ERROR, line, "start nats-server with --jetstream, and enable it for the account"
            )
        ]
    answer = json.loads(reply.data)
    if error := answer.get("error"):
        if error.get("err_code") == _NO_STREAM:
            line = f"there is no stream {STREAM}"
            return [Finding("nats.stream", Level.ERROR, line, "an indexer creates it when it starts; is one running?")]
        return [Finding("nats.stream", Level.ERROR, f"stream {STREAM}: {error.get('description')}")]
    return list(judge_stream(answer["config"], answer["state"], client.max_payload, time.time_ns() // 1_000))


async def read_identity(client: Client) -> StreamInfo | None:
    """The event stream; None if there is none. Raises NATS errors if the server does not answer in time."""
    try:
        return await stream_info(client)
    except (APIError, NoRespondersError):
        return None


def judge_identity(nats: str, stream: StreamInfo | None, position: Position | None) -> Iterator[Finding]:
    """Check that the indexers read the stream on this NATS server. `position`: that of a partition that one of them
    owns."""
    if position is None or (stream is not None and stream.creation_us == position.creation_us):
        return
    here = "has none" if stream is None else f"has another one, created {_time_text(stream.creation_us)}"
    line = f"the indexers read a stream {STREAM} that was created {_time_text(position.creation_us)}; {nats} {here}"
    advice = "the indexers use another NATS: give them, the publishers and this command the same --nats-url"
    yield Finding("nats.other", Level.ERROR, line, advice)


class DeadLetter(NamedTuple):
    """A message that an indexer refused, with its subject's worker and the reason."""

    worker: str
    reason: str
    why: str
    refused_us: int


async def read_dead_letters(client: Client) -> Sequence[DeadLetter]:
    """The last MOST_LETTERS refused messages; none if this user may not read them."""
    try:
        state = (await _ask(client, f"$JS.API.STREAM.INFO.{DEAD_STREAM}")).get("state")
        if state is None:
            return []  # no indexer has ever refused a message
        first, last = int(state["first_seq"]), int(state["last_seq"])
        seqs = range(max(first, last - MOST_LETTERS + 1), last + 1)
        answers = await asyncio.gather(
            *(_ask(client, f"$JS.API.STREAM.MSG.GET.{DEAD_STREAM}", {"seq": seq}) for seq in seqs)
        )
    except (NoRespondersError, TimeoutError):
        return []
    return [_letter_of(answer["message"]) for answer in answers if "message" in answer]


async def _ask(client: Client, subject: str, question: Mapping[str, Any] | None = None) -> dict[str, Any]:
    payload = b"" if question is None else json.dumps(question).encode()
    answer: dict[str, Any] = json.loads((await client.request(subject, payload, timeout=ANSWER_S)).data)
    return answer


def _letter_of(message: Mapping[str, Any]) -> DeadLetter:
    lines = b64decode(message.get("hdrs", "")).decode(errors="replace").split("\r\n")
    headers = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    subject = headers.get(DEAD_SUBJECT, "")
    refused_us = microseconds_of(message["time"])
    return DeadLetter(subject.rpartition(".")[2], headers.get(DEAD_REASON, "?"), headers.get(DEAD_WHY, ""), refused_us)


_CURES = {
    "version": "use the same version of kvatlas everywhere: upgrade the indexers first",
    "wrong_partition": "give its publisher the --partitions of the store's layout",
    "identity": "change what its publisher publishes, or the identities (`kvatlas auth nats`)",
    "wrong_subject": "it publishes for another worker: give each publisher its own --worker-id",
    "incarnation": "the clock of the publisher's machine is wrong: synchronize it",
}


def judge_refused(letters: Sequence[DeadLetter], now_us: int) -> Iterator[Finding]:
    """Report the messages that indexers have recently refused, grouped by reason."""
    by_reason: dict[str, list[DeadLetter]] = defaultdict(list)
    for letter in letters:
        if letter.refused_us >= now_us - LATELY_US:
            by_reason[letter.reason].append(letter)
    for reason, some in sorted(by_reason.items()):
        names = join_names({letter.worker for letter in some})
        line = f"indexers refused {count_text(len(some), 'message')} of {names} within 2 minutes ({reason}): {some[-1].why}"
        yield Finding("nats.refused", Level.ERROR, line, _CURES.get(reason, "what else writes into the stream?"))


def judge_stream(
    config: Mapping[str, Any], state: Mapping[str, Any], max_payload: int, now_us: int
) -> Iterator[Finding]:
    """Judge JetStream's own description of the stream."""
    subjects = config.get("subjects")
    if subjects != [ALL_EVENTS]:
        line = f"stream {STREAM} has subjects {subjects}; expected {[ALL_EVENTS]}"
        yield Finding("nats.subjects", Level.ERROR, line, _RECREATE)
    wrong = list(_wrong_limits(config))
    for line, advice in wrong:
        yield Finding("nats.limits", Level.ERROR, line, advice)
    if not wrong:
        yield Finding("nats.limits", Level.OK, _limits_text(config))
    messages, size = int(state.get("messages", 0)), int(state.get("bytes", 0))
    most = int(config.get("max_bytes", -1))
    line = f"stream {STREAM} holds {count_text(messages, 'message')}, {size / (1 << 20):,.1f} MiB"
    reach_s = (now_us - microseconds_of(state["first_ts"])) / 1e6 if messages else 0.0
    if messages and most > 0 and size > 0.9 * most and reach_s < SHORT_S:
        line += f", which reach back only {reach_s:,.0f} s"
        advice = "raise its max_bytes: snapshots replace messages that indexers missed, at a higher cost"
        yield Finding("nats.stream", Level.WARNING, line, advice)
    else:
        yield Finding("nats.stream", Level.OK, line)
    if max_payload < MAX_MESSAGE_BYTES:
        line = f"NATS accepts messages of up to {max_payload:,} bytes; publishers send smaller ones because of it"
        yield Finding(
            "nats.payload",
            Level.INFO,
            line,
            f"set max_payload to {MAX_MESSAGE_BYTES * 2}: larger messages cost less per block",
        )


def _wrong_limits(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(line, advice) for each setting that loses or refuses messages."""
    if config.get("retention") != "limits":
        yield (
            f"stream {STREAM} has retention {config.get('retention')}: indexers would take messages from each other",
            _RECREATE,
        )
    if config.get("discard") != "old":
        yield (
            f"stream {STREAM} discards {config.get('discard')} messages: when full, it refuses new ones",
            f"nats stream edit {STREAM} --discard=old",
        )
    most = int(config.get("max_msg_size", -1))
    if 0 <= most < MAX_MESSAGE_BYTES:
        yield (
            f"stream {STREAM} accepts messages of up to {most:,} bytes; publishers send up to {MAX_MESSAGE_BYTES:,}",
            f"nats stream edit {STREAM} --max-msg-size={MAX_MESSAGE_BYTES + 65_536}",
        )
    for name in ("max_msgs", "max_msgs_per_subject"):
        if int(config.get(name, -1)) > 0:
            yield f"stream {STREAM} has {name} {config[name]}: messages are dropped before they are read", _RECREATE
    if config.get("no_ack"):
        yield f"stream {STREAM} does not acknowledge messages: publishers wait forever", _RECREATE


def _limits_text(config: Mapping[str, Any]) -> str:
    age_s, most = int(config.get("max_age", 0)) / 1e9, int(config.get("max_bytes", -1))
    age = f"{age_s / 60:,.0f} min" if age_s else "forever"
    size = f"{most / (1 << 20):,.0f} MiB" if most > 0 else "without a size limit"
    replicas = count_text(int(config.get("num_replicas", 1)), "replica")
    return f"stream {STREAM} keeps {age}, {size}, in {config.get('storage')}, {replicas}"


def _time_text(us: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(us / 1e6))
