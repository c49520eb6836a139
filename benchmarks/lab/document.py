"""A study as a section of docs/results.md."""

from collections.abc import Sequence

from simulator.lab.comparison import Cell, Study
from simulator.lab.report import COLUMNS, rows_of

LINES = """# Measured: what policies make of traffic
Written by `make lab`; don't edit. kvatlas {version}; {machine}; it took {took}.

Requests are replayed against simulated engines in **virtual time**, so the figures depend on neither the machine nor its
load, and equal seeds give equal figures. kvatlas' own ledger, wire codec, index, prices, reservations and learned rates run as
they are; the engines decide step by step as the project's simulator does (a test compares them). Step costs are the simulator's
defaults: about an 8-billion-parameter model on one accelerator (`kvatlas/cost/engine.py` derives them). Blocks are as the trace
has them. Seeds shift each session by up to 3 s, or by the tick of the trace's clock; ± is the 95 % interval of the mean.

What the policies are: `kvatlas replay --help`. The oracle sees caches, queues and costs as they are when a request
arrives, and sends it where it is answered first. It knows no later request, so it is no bound for a whole workload.

![by policy]({picture})
"""


def to_markdown(
    heading: str, purpose: str, command: str, titles: Sequence[str], study: Study, cells: Sequence[Cell]
) -> str:
    """The section, with a table for each point."""
    lines = [f"## {heading}", purpose, "", "```", command, "```"]
    for point, title in zip(study.points, titles, strict=True):
        lines += ["", title, "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [_line(row) for row in rows_of([cell for cell in cells if cell.point == point])]
    return "\n".join([*lines, ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
