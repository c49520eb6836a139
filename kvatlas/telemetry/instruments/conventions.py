"""Instruments whose names follow OpenTelemetry's conventions for systems of all kinds."""

from collections.abc import Mapping

from kvatlas.telemetry.instruments.instrument import Instrument, Kind, Series, single

DB_TIME = Instrument(
    "db.client.operation.duration", "s", "Calls to functions of the store, by function", Kind.HISTOGRAM
)
HTTP_TIME = Instrument(
    "http.server.request.duration",
    "s",
    "Requests to engines through this router, to the end of the answer",
    Kind.HISTOGRAM,
)
MESSAGES_SENT = Instrument(
    "messaging.client.sent.messages", "{message}", "Messages sent to the stream, each attempt counted"
)
MESSAGES_CONSUMED = Instrument("messaging.client.consumed.messages", "{message}", "Messages read from the stream")
MESSAGES_TIME = Instrument(
    "messaging.process.duration", "s", "Applying batches of messages to the index", Kind.HISTOGRAM
)
MESSAGING: Mapping[str, str] = {
    "messaging.system": "nats",
    "messaging.destination.template": "kvatlas.events.{partition}.{worker}",
}


def _messaging(operation: str) -> Mapping[str, str]:
    return {**MESSAGING, "messaging.operation.name": operation}


STORE_CALL = single(DB_TIME, "duration")
"""Fields of kvatlas.telemetry.duration_series.Duration, here and in the next table."""
HTTP_REQUEST = single(HTTP_TIME, "duration")
MESSAGES_OUT = {"sends": Series(MESSAGES_SENT, _messaging("send"))}
"""The publisher's counters under standard names; the next table lists the indexer's."""
MESSAGES_IN = {
    "messages_read": Series(MESSAGES_CONSUMED, _messaging("receive")),
    "apply_time": Series(MESSAGES_TIME, _messaging("process")),
}
