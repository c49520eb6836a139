"""Log lines on stderr, one for each record; tracebacks only with `--log-level debug`."""

import logging
import sys


class _OneLineFormatter(logging.Formatter):
    """`kvatlas: <message>`; an exception is one more line, or its traceback when debugging."""

    def __init__(self, tracebacks: bool) -> None:
        super().__init__("kvatlas: %(message)s")
        self._tracebacks = tracebacks

    def formatException(self, ei: object) -> str:  # noqa: N802 - the standard library's name
        error = ei[1] if isinstance(ei, tuple) else None
        if self._tracebacks or error is None:
            return super().formatException(ei)  # type: ignore[arg-type]
        return f"  {type(error).__name__}: {' '.join(str(error).split())}"


def log_to_stderr(level: str) -> None:
    """Log kvatlas' own records from this level up, and those of other libraries from warnings up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLineFormatter(tracebacks=level == "debug"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("kvatlas", "publishers", "indexer", "router_client", "simulator"):
        logging.getLogger(name).setLevel(level.upper())
