"""One screen of `kvatlas top` as lines of text, none wider than the terminal (pure)."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvatlas.quantities import age_text, count_text
from kvatlas_cli.output import wrap
from kvatlas_cli.top.sample import FleetSample, RouterSample, WorkerSample
from kvatlas_cli.worker_state import state_word

MIN_WIDTH, MIN_HEIGHT = 40, 10


class _Column(NamedTuple):
    """A column of the workers' table. `width` 0: the remaining width. `key`: sort key of workers, the most interesting
    last."""

    label: str
    width: int
    text: Callable[[WorkerSample, int], str]
    key: Callable[[WorkerSample, int], float]


def _state(worker: WorkerSample) -> str:
    return state_word(worker.record)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _cache(worker: WorkerSample) -> float | None:
    return None if worker.record.load is None else worker.record.load.forward_pass.cache_usage


def _hit_rate(worker: WorkerSample) -> float | None:
    return None if worker.record.load is None else worker.record.load.forward_pass.prefix_hit_rate


def _running(worker: WorkerSample) -> int | None:
    return None if worker.record.load is None else worker.record.load.running_decodes


def _waiting(worker: WorkerSample) -> int | None:
    return None if worker.record.load is None else worker.record.load.forward_pass.requests_waiting


def _number(value: int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if value < 10_000_000 else f"{value / 1e6:,.0f}M"


def _ago(at_us: int | None, now_us: int) -> str:
    return age_text(max(0, now_us - at_us)) if at_us else "-"


def _badness(worker: WorkerSample) -> float:
    return {"up": 0, "draining": 1, "asleep": 1, "in doubt": 2, "down": 3, "lost": 4}.get(_state(worker), 1)


COLUMNS: Sequence[_Column] = (
    _Column("worker", 0, lambda one, _: one.record.endpoint.id, lambda one, _: 0),
    _Column("state", 8, lambda one, _: _state(one), lambda one, _: _badness(one)),
    _Column("blocks", 9, lambda one, _: _number(one.held), lambda one, _: one.held or 0),
    _Column("behind", 6, lambda one, _: _number(one.behind), lambda one, _: one.behind or 0),
    _Column("run", 4, lambda one, _: _number(_running(one)), lambda one, _: _running(one) or 0),
    _Column("wait", 4, lambda one, _: _number(_waiting(one)), lambda one, _: _waiting(one) or 0),
    _Column("cache", 5, lambda one, _: _share(_cache(one)), lambda one, _: _cache(one) or 0),
    _Column("hit", 4, lambda one, _: _share(_hit_rate(one)), lambda one, _: _hit_rate(one) or 0),
    _Column(
        "event", 7, lambda one, now: _ago(one.record.applied_us, now), lambda one, _: -(one.record.applied_us or 0)
    ),
    _Column("heard", 7, lambda one, now: _ago(one.record.heard_us, now), lambda one, _: -one.record.heard_us),
)
_FIXED = sum(column.width + 1 for column in COLUMNS)


@dataclass(frozen=True, slots=True)
class View:
    """The state of the view: the column to sort by, the selected worker, and the opened one."""

    sort: int = 0
    reverse: bool = False
    selected: str = ""
    opened: str = ""

    def press(self, key: str, order: Sequence[str]) -> "View | None":
        """The view after a key; None: quit. `order`: the workers as shown."""
        match key:
            case "q" | "escape" | "left" if self.opened:
                return replace(self, opened="")
            case "q":
                return None
            case "s":
                return replace(self, sort=(self.sort + 1) % len(COLUMNS), reverse=False)
            case "S":
                return replace(self, sort=(self.sort - 1) % len(COLUMNS), reverse=False)
            case "r":
                return replace(self, reverse=not self.reverse)
            case "down" | "j" | "up" | "k" | "home" | "end" if order:
                at = order.index(self.selected) if self.selected in order else -1
                last = len(order) - 1
                to = {"down": at + 1, "j": at + 1, "up": at - 1, "k": at - 1, "home": 0, "end": last}[key]
                chosen = order[max(0, min(last, to))]
                return replace(self, selected=chosen, opened=chosen if self.opened else "")
            case "enter" | "right" if order:
                chosen = self.selected if self.selected in order else order[0]
                return replace(self, selected=chosen, opened=chosen)
        return self


def sort_workers(sample: FleetSample, view: View) -> list[str]:
    """The worker ids in the view's order: by name, or the largest figure first."""
    names = sorted(sample.workers)
    if view.sort:
        key = COLUMNS[view.sort].key
        names.sort(key=lambda name: -key(sample.workers[name], sample.now_us))
    return names[::-1] if view.reverse else names


def render(
    sample: FleetSample, before: FleetSample | None, view: View, width: int, height: int | None, trouble: str = ""
) -> list[str]:
    """Render a screen. `before`: the previous sample, for rates. `height=None`: unlimited. `trouble`: why there is no
    newer sample."""
    width = max(width, MIN_WIDTH)
    head = [*_summary(sample, before), trouble] if trouble else list(_summary(sample, before))
    if view.opened in sample.workers:
        body = list(_worker_lines(sample.workers[view.opened], sample.now_us, width))
        keys = "q back   up/down another worker"
    else:
        routers = list(_router_lines(sample.routers, before))
        room = None if height is None else max(3, max(height, MIN_HEIGHT) - len(head) - len(routers) - 3)
        body = [*_worker_table(sample, view, width, room), *routers]
        keys = f"q quit   s sort ({COLUMNS[view.sort].label})   r reverse   up/down select   Enter open"
    lines = [*head, "", *body]
    if height is not None:
        lines = [*lines[: height - 1], *[""] * max(0, height - 1 - len(lines)), keys]
    return [line[:width].rstrip() for line in lines]


def _summary(sample: FleetSample, before: FleetSample | None) -> Iterator[str]:
    engines = [one for one in sample.workers.values() if not one.record.endpoint.is_store]
    routable = sum(one.record.routable for one in engines)
    clock = time.strftime("%H:%M:%S", time.localtime(sample.now_us / 1e6))
    yield (
        f"{clock}   {routable} of {count_text(len(engines), 'worker')} routable   "
        f"{count_text(len(sample.members), 'indexer')}, {sample.owned} of {sample.partitions} partitions owned"
    )
    compared = sum(one.compared for one in sample.routers)
    tokens = sum(one.prompt_tokens for one in sample.routers)
    parts = [count_text(len({one.router_id for one in sample.routers}), "router"), f"{_answers_text(sample, before)}"]
    if tokens:
        parts.append(f"hit rate {sum(one.cached_tokens for one in sample.routers) / tokens:.0%}")
    if compared:
        parts.append(f"{sum(one.as_predicted for one in sample.routers) / compared:.1%} as predicted")
    yield "   ".join(parts)


def _answers_text(sample: FleetSample, before: FleetSample | None) -> str:
    total = sum(one.answers for one in sample.routers)
    if before is None or sample.now_us <= before.now_us:
        return count_text(total, "answer")
    known = {(one.router_id, one.model_id): one.answers for one in before.routers}
    new = sum(max(0, one.answers - known.get((one.router_id, one.model_id), one.answers)) for one in sample.routers)
    return f"{count_text(total, 'answer')}, {new / (sample.now_us - before.now_us) * 1e6:,.1f}/s"


def _worker_table(sample: FleetSample, view: View, width: int, room: int | None) -> Iterator[str]:
    names = sort_workers(sample, view)
    first = width - _FIXED - 1
    columns = COLUMNS
    while first < 12 and len(columns) > 2:  # a narrow terminal has fewer figures
        first += columns[-1].width + 1
        columns = columns[:-1]
    first = min(first, max([len(name) for name in names] + [12]))
    yield _line([column.label.upper() for column in columns], columns, first)
    shown = names if room is None else _around(names, view.selected, room)
    for name in shown:
        mark = ">" if name == view.selected and room is not None else " "
        texts = [column.text(sample.workers[name], sample.now_us) for column in columns]
        yield _line(texts, columns, first, mark)
    if left := len(names) - len(shown):
        yield f" {count_text(left, 'more worker')}"
    if not names:
        yield " no worker is published"


def _around(names: Sequence[str], selected: str, room: int) -> Sequence[str]:
    """As many names as fit, including the selected one."""
    if len(names) <= room:
        return names
    room -= 1  # for the line that counts the hidden workers
    at = names.index(selected) if selected in names else 0
    first = max(0, min(at - room // 2, len(names) - room))
    return names[first : first + room]


def _line(texts: Sequence[str], columns: Sequence[_Column], first: int, mark: str = " ") -> str:
    """A worker's line: its name and state are left-aligned, figures right-aligned."""
    cells = [mark + _cut(texts[0], first).ljust(first), _cut(texts[1], columns[1].width).ljust(columns[1].width)]
    cells += [_cut(text, column.width).rjust(column.width) for text, column in zip(texts[2:], columns[2:], strict=True)]
    return " ".join(cells)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "~"


def _router_lines(routers: Sequence[RouterSample], before: FleetSample | None) -> Iterator[str]:
    if not routers:
        return
    known = {(one.router_id, one.model_id): one.answers for one in before.routers} if before is not None else {}
    yield ""
    yield f" {'ROUTER':24} {'MODEL':20} {'ANSWERS':>10} {'NEW':>6} {'HIT':>5} {'PREDICTED':>9}"
    for one in routers[:6]:
        new = one.answers - known.get((one.router_id, one.model_id), one.answers)
        hit = one.cached_tokens / one.prompt_tokens if one.prompt_tokens else None
        right = one.as_predicted / one.compared if one.compared else None
        figures = f"{one.answers:>10,} {max(0, new):>6,} {_share(hit):>5} {_share(right):>9}"
        yield f" {_cut(one.router_id, 24):24} {_cut(one.model_id, 20):20} {figures}"


def _worker_lines(worker: WorkerSample, now_us: int, width: int) -> Iterator[str]:
    record, endpoint = worker.record, worker.record.endpoint
    tiers = ", ".join(f"{count:,} {tier.label}" for tier, count in sorted((worker.blocks or {}).items())) or "none"
    repair = record.repair
    load = record.load
    facts = {
        "worker": f"{endpoint.id} ({endpoint.kind.value}, {endpoint.role.value})",
        "state": _state(worker) + (f": {record.doubt}" if record.doubt else ""),
        "address": endpoint.url or "none",
        "model": endpoint.model_id,
        "tokenizer": endpoint.tokenizer_id,
        "tenant": endpoint.tenant_id,
        "block size": f"{endpoint.block_size} tokens" if endpoint.block_size else "unknown",
        "blocks": tiers,
        "behind": "unknown" if worker.behind is None else count_text(worker.behind, "message"),
        "partition": f"{worker.partition}, followed by {worker.owner or 'no indexer'}",
        "incarnation": str(record.incarnation),
        "last event": f"{_ago(record.applied_us, now_us)} ago" if record.applied_us else "none applied",
        "last repair": "none" if repair is None else f"{_ago(repair.at_us, now_us)} ago: {repair.reason}",
        "heard": f"{_ago(record.heard_us, now_us)} ago" if record.heard_us else "never",
    }
    if load is not None:
        forward = load.forward_pass
        facts["load"] = f"{load.running_decodes} running, {forward.requests_waiting} waiting"
        facts["cache"] = f"{forward.cache_usage:.0%} used, {forward.prefix_hit_rate:.0%} of prompt tokens hit"
    for label, text in facts.items():
        yield from wrap(text, width, f" {label:12} ", " " * 14)
    for diagnosis in worker.diagnoses:
        line = f"{'wrong':12} {diagnosis.seen} -> {diagnosis.cure}"
        yield from wrap(line, width, " ", " " * 14)
