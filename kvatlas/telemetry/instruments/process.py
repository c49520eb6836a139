"""Instruments for every process."""

from kvatlas.telemetry.instruments.instrument import by, counter, gauge, single

# ---------------------------------------------------------------- http: kvatlas.http.counters.HttpCounters

HTTP_REFUSED = counter("http.refused", "{request}", "HTTP requests and connections refused at the border, by reason")

HTTP = by(
    HTTP_REFUSED,
    "reason",
    framing="framing",
    headers="headers",
    too_long="too_long",
    too_late="too_late",
    slow="slow",
    too_many="too_many",
    denied="denied",
    upgrade="upgrade",
    unread="unread",
)

# ---------------------------------------------------------------- process: kvatlas.runtime.process_gauges.ProcessGauges

DESCRIPTORS = gauge("process.descriptors", "{descriptor}", "File descriptors that are open, and how many may be")
CERTIFICATE = gauge("process.certificate", "s", "Time until the first of this process's certificates expires")

PROCESS = {
    **by(DESCRIPTORS, "what", descriptors_open="open", descriptors_most="most"),
    **single(CERTIFICATE, "certificate_s"),
}
