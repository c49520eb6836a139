"""JetStream's answer to a published message (pure): its position in the stream, or why it was refused.

Sources: the server's PubAck and its table of API errors (errors.json, NATS 2.10 to 2.15).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Refusal(StrEnum):
    """Why a message was not stored, as in logs and status."""

    NO_STREAM = "no stream for the subject"
    NO_SPACE = "no space in the stream"
    TOO_LARGE = "message larger than the stream allows"
    BUSY = "stream is not ready"
    OTHER = "refused"


@dataclass(frozen=True, slots=True)
class NegativeAck:
    """A message was refused. `detail` is the server's own description."""

    refusal: Refusal
    detail: str

    def __str__(self) -> str:
        return f"{self.refusal.value} ({self.detail})" if self.detail else self.refusal.value


_BY_CODE = {
    10059: Refusal.NO_STREAM,  # stream not found
    10076: Refusal.NO_STREAM,  # JetStream not enabled
    10039: Refusal.NO_STREAM,  # JetStream not enabled for the account
    10054: Refusal.TOO_LARGE,  # message size exceeds maximum allowed
    10002: Refusal.NO_SPACE,  # resource limits exceeded for account
    10023: Refusal.NO_SPACE,  # insufficient resources
    10028: Refusal.NO_SPACE,  # insufficient memory resources available
    10047: Refusal.NO_SPACE,  # insufficient storage resources available
    10008: Refusal.BUSY,  # JetStream system temporarily unavailable
    10009: Refusal.BUSY,  # not the leader
    10012: Refusal.BUSY,  # offline
    10167: Refusal.BUSY,  # too many requests
}
_STORED = re.compile(rb'\{"stream": ?"[^"]*", ?"seq": ?([0-9]+)')


def read_ack(data: bytes, headers: Mapping[str, str] | None) -> int | NegativeAck:
    """The message's stream position, from 1, or why it was refused."""
    stored = _STORED.match(data)  # three times as fast as parsing JSON
    if stored is not None:
        return int(stored[1])
    if not data:  # the server's answer for a subject without a subscriber
        status = (headers or {}).get("Status", "")
        return NegativeAck(
            Refusal.NO_STREAM if status == "503" else Refusal.OTHER, f"status {status}" if status else ""
        )
    try:
        answer = json.loads(data)
        if "error" not in answer:
            return int(answer["seq"])
        error = answer["error"]
        code, detail = error.get("err_code"), str(error.get("description", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        return NegativeAck(Refusal.OTHER, f"not an acknowledgement: {data[:80]!r}")
    if code in _BY_CODE:
        return NegativeAck(_BY_CODE[code], detail)
    if "maximum" in detail and "exceeded" in detail:  # 10077 wraps the store's own error: maximum bytes, messages
        return NegativeAck(Refusal.NO_SPACE, detail)
    return NegativeAck(Refusal.OTHER, detail)
