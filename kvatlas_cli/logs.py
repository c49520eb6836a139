"""Log lines on stderr, one per record, human-readable or JSON. A lasting condition does not log a line every second."""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

from opentelemetry import trace

from kvatlas.runtime.rate_limited_log import LIMITED, Repetitions

OWN = ("kvatlas", "kvatlas_cli", "kvatlas_router", "router_client")
ACCESS = "router_client.access"
"""The logger that writes one line per request. It is never limited."""
MOST_LETTERS = 4_096
"""Maximum number of characters in one message."""
_WORKER = re.compile(r"worker ([A-Za-z0-9_-]{1,64}):? ")
"""The beginning of a line about one worker."""


class PlainFormatter(logging.Formatter):
    """`kvatlas: <message>`, for commands that end on their own. An exception adds one line, or its traceback when
    debugging."""

    def __init__(self, *, tracebacks: bool = False) -> None:
        super().__init__("kvatlas: %(message)s")
        self._tracebacks = tracebacks

    def formatException(self, ei: object) -> str:  # noqa: N802 - the standard library's name
        error = ei[1] if isinstance(ei, tuple) else None
        if self._tracebacks or error is None:
            return super().formatException(ei)  # type: ignore[arg-type]
        return f"  {type(error).__name__}: {' '.join(str(error).split())}"


class ServiceFormatter(PlainFormatter):
    """`<time> <level> <component>: <message>`, plus the trace if there is one. The time is UTC.

    A line about one worker begins with `worker <id>`. Names in it come from requests and engines, so characters that would
    end the line or move a terminal's cursor are escaped.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the standard library's name
        traced = _trace_ids()
        suffix = f" (trace {traced['trace_id']})" if traced else ""
        message = escape(record.message.rstrip())
        return f"{_time(record)} {_level(record)} {_component(record)}: {message}{suffix}"


class JsonFormatter(PlainFormatter):
    """One JSON object per line: time, level, component, message and, if known, worker, trace_id, span_id and error."""

    def format(self, record: logging.LogRecord) -> str:
        message = cut(record.getMessage())
        fields: dict[str, Any] = {
            "time": _time(record),
            "level": _level(record),
            "component": _component(record),
            "message": message,
        }
        if named := _WORKER.match(message):
            fields["worker"] = named[1]
        fields.update(_trace_ids())
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info).strip()
        line = json.dumps(fields, ensure_ascii=False)
        if line.isprintable():
            return line
        # line readers and terminals act on more characters than JSON escapes
        return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in line)


class RepetitionFilter(logging.Filter):
    """Lets the first line about a condition pass, and then fewer and fewer, each with the number of lines that were left
    out.

    A condition is a logger's line with its first text arguments, such as a worker's name or an error. Shards and partitions
    are numbers, so they are not distinguished.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repetitions = Repetitions(most_kinds=1_024)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == ACCESS or record.levelno < logging.INFO or getattr(record, LIMITED, False):
            return True
        given = record.args if isinstance(record.args, tuple) else ()
        texts = [str(one)[:200] for one in given if not isinstance(one, (int, float))]
        left_out = self._repetitions.admit((record.name, record.msg, *texts[:2]), record.created)
        if left_out is None:
            return False
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} similar lines left out)", ()
        return True


_formatter: logging.Formatter = PlainFormatter()


def log_to_stderr(level: str, style: str = "plain") -> None:
    """Log kvatlas' own records from this level up, and other libraries' from warnings up.

    `style`: `plain`, `console` or `json`, see the formatters.
    """
    global _formatter
    formatters = {"plain": PlainFormatter, "console": ServiceFormatter, "json": JsonFormatter}
    _formatter = formatters[style](tracebacks=level == "debug")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter)
    handler.addFilter(RepetitionFilter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    # no line shows a thread, a process or a place in the code, and finding them takes a quarter of a line's time
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    for name in OWN:
        logging.getLogger(name).setLevel(level.upper())


def notice_text(line: str) -> str:
    """A line for the user: JSON if the log is JSON, otherwise plain text."""
    formatter = _formatter if isinstance(_formatter, JsonFormatter) else PlainFormatter()
    return formatter.format(logging.LogRecord("kvatlas_cli", logging.INFO, "", 0, line, None, None))


def escape(text: str) -> str:
    """The text as one line of printable characters, truncated if it is very long."""
    return cut(text if text.isprintable() else printable(text[: MOST_LETTERS + 1]))


def printable(text: str) -> str:
    """The text as one line of printable characters: terminals act on other characters, which any name may contain."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def cut(text: str) -> str:
    """The text, truncated to MOST_LETTERS."""
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}... ({len(text)} letters)"


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _level(record: logging.LogRecord) -> str:
    return record.levelname.lower()


def _component(record: logging.LogRecord) -> str:
    """The part of kvatlas that logs, from its logger's name; for a library, the library's name."""
    if record.name == "kvatlas_cli":
        return "kvatlas"
    return record.name.removeprefix("kvatlas.").removeprefix("kvatlas_").replace("router_client", "router")


def _trace_ids() -> dict[str, str]:
    """The ids of the trace and span in which the line is logged."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
