"""NATS and the event stream: whether it exists, is configured as kvatlas needs it, and reaches far enough back."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from nats.aio.client import Client
from nats.errors import NoRespondersError

from kvatlas.bus.stream import microseconds_of
from kvatlas.bus.subjects import ALL_EVENTS, STREAM
from kvatlas.bus.wire import MAX_MESSAGE_BYTES
from kvatlas_cli.doctor.report import Finding, Level
from kvatlas_cli.output import count_text

SHORT_S = 120
"""A replica that takes over, or one that fell behind, needs the messages of the last minutes."""
ANSWER_S = 5.0
_NO_STREAM = 10059
_RECREATE = "delete the stream; an indexer creates it again"


async def examine_stream(client: Client) -> list[Finding]:
    """Check the event stream. Raises nats errors if the server does not answer in time."""
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
        yield f"stream {STREAM} does not acknowledge messages: publishers wait for ever", _RECREATE


def _limits_text(config: Mapping[str, Any]) -> str:
    age_s, most = int(config.get("max_age", 0)) / 1e9, int(config.get("max_bytes", -1))
    age = f"{age_s / 60:,.0f} min" if age_s else "for ever"
    size = f"{most / (1 << 20):,.0f} MiB" if most > 0 else "without a size limit"
    replicas = count_text(int(config.get("num_replicas", 1)), "replica")
    return f"stream {STREAM} keeps {age}, {size}, in {config.get('storage')}, {replicas}"
