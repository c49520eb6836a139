"""Our own certificates: those on disk, those in use, and for how many days they remain valid."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvatlas.bus.access import NatsAccess
from kvatlas.runtime.certificate_files import CertificateState, state_on_disk
from kvatlas.store.access import RedisAccess
from kvatlas_cli.doctor.finding import Finding, Level

FEW_DAYS = 14
_CHECK = "certificates"


def own_certificates(nats: NatsAccess, redis: RedisAccess | str) -> Sequence[CertificateState]:
    """The certificates that this command presents to the servers."""
    files: list[tuple[str, Path | None]] = [
        ("NATS", nats.cert_file),
        ("Redis", None if isinstance(redis, str) else redis.cert_file),
    ]
    return [state_on_disk(f"connections to {what}", file) for what, file in files if file is not None]


def judge_certificates(where: str, states: Sequence[CertificateState]) -> Iterator[Finding]:
    """Judge certificates. `where`: the process that uses them."""
    for state in states:
        line = f"{where}, {state.what}: {state.file} is in use, {_left(state.in_use_days)}; on disk {_left(state.on_disk_days)}"
        days = [one for one in (state.in_use_days, state.on_disk_days) if one is not None]
        if state.error:
            advice = "put a valid certificate and its key there: they are read again"
            yield Finding(_CHECK, Level.ERROR, f"{line}, which can't be used: {state.error}", advice)
        elif days and min(days) < 0:
            yield Finding(_CHECK, Level.ERROR, line, "renew it: the file is read again, no restart is needed")
        elif days and min(days) < FEW_DAYS:
            yield Finding(_CHECK, Level.WARNING, line, "renew it soon: the file is read again, no restart is needed")
        else:
            yield Finding(_CHECK, Level.OK, line)


def _left(days: float | None) -> str:
    if days is None:
        return "expiry unknown"
    return f"expired {-days:.0f} days ago" if days < 0 else f"{days:.0f} days left"
