"""The tables of jobs, tasks, hosts and servers, as `distrun top` and `distrun status` show them. No side effects.

A table leaves out columns that are empty and, where there is no room, those that matter least. The rows of the table of
tasks are filtered, sorted, and folded if they are alike.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from distrun import formats
from distrun.dashboard import events, text
from distrun.dashboard.model import CONSEQUENCE_LEVEL, HostView, Model, ServerView, TaskView
from distrun.dashboard.text import Glyphs, Line, Span
from distrun_runtime.contract import facts

REST_LEAST = 12
"""Columns of a terminal that the last column of a table needs at least, and the first one if it is cut."""
REST_WANTED, LEAST = 40, 2
"""Columns that the last one gets before those that matter least (`Column.keep`)."""
STYLES = {
    **dict.fromkeys((facts.RUNNING, facts.STARTING, "runs"), text.CYAN),
    **dict.fromkeys((facts.EXITED, facts.SUCCEEDED), text.GREEN),
    **dict.fromkeys(
        (facts.FAILED, facts.LOST, facts.DAMAGED, facts.STALLED, "agent gone", "cannot be asked"), text.RED
    ),
    **dict.fromkeys((facts.PENDING, facts.STOPPED), text.DIM),
    **dict.fromkeys(("ok", ""), text.PLAIN),
}
"""Styles of words; others are yellow. The word says it all; the colour helps to find it."""

Row = TypeVar("Row")
View = TypeVar("View", TaskView, HostView)
Number = TypeVar("Number", int, float)


def style_of(word: str) -> str:
    """Return the style of a state."""
    return STYLES.get(word.partition(",")[0], text.YELLOW)


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column of a table."""

    heading: str
    cell: Callable[[Row], str]
    is_number: bool = True
    keep: int = 0
    """Columns with the lowest number are left out first where there is no room; 0: never."""
    is_kept: bool = False
    """It is shown even where all its cells are empty."""
    widest: int = 0
    """It is no wider where there is no room; 0: it is as wide as it needs."""
    takes_rest: bool = False
    """It is the last one, and cut where there is no room."""
    short: Column[Row] | None = None
    """What is shown in its place when it is left out."""


class TextTable(Generic[Row]):
    """A table for one picture.

    Arguments:
        columns: all that there are.
        rows: the visible ones, whose cells make the widths, so that the cost does not grow with the job.
        room: columns of the terminal.
        glyphs: of its marks.
        style: returns the style of a row's state (column STATE or AGENT).
        has_marks: rows begin with a mark if they are chosen.
    """

    def __init__(
        self,
        columns: Sequence[Column[Row]],
        rows: Sequence[Row],
        room: int,
        glyphs: Glyphs = text.UNICODE,
        *,
        style: Callable[[Row], str] = lambda row: text.PLAIN,
        has_marks: bool = False,
    ) -> None:
        self._rows, self._room, self._glyphs, self._style = rows, room, glyphs, style
        self._gap = "  " if room >= 100 or not has_marks else " "
        self._margin = 2 if has_marks else 0
        self._cells: dict[Column[Row], list[str]] = {}
        self._widths: dict[Column[Row], int] = {}
        self._shown = shown = [each for each in columns if self._measure(each) or each.is_kept]
        if self._needed() > room:
            self._widths.update({each: min(each.widest, self._widths[each]) for each in shown if each.widest})
        for rest, most in ((REST_WANTED, LEAST), (REST_LEAST, len(columns))):
            while self._needed(rest) > room and (least := [each for each in shown if 0 < each.keep <= most]):
                at = shown.index(min(least, key=lambda each: each.keep))
                short = shown[at].short
                shown[at : at + 1] = [short] if short is not None and self._measure(short) else []
        first, missing = self._widths[shown[0]], self._needed(rest=0) - room
        self._widths[shown[0]] = max(min(first, REST_LEAST), first - max(0, missing))

    def _measure(self, column: Column[Row]) -> bool:
        """Fill a column; return whether anything is in it."""
        cells = self._cells[column] = [text.clean(column.cell(row)) for row in self._rows]
        self._widths[column] = max(map(text.width, (column.heading, *cells)))
        return any(cells)

    def _needed(self, rest: int = REST_LEAST) -> int:
        widths = (min(self._widths[each], rest) if each.takes_rest else self._widths[each] for each in self._shown)
        return self._margin + sum(width + len(self._gap) for width in widths) - len(self._gap)

    def heading(self) -> Line:
        """Return the line of headings."""
        words = self._gap.join(self._aligned(each, each.heading) for each in self._shown)
        return self._cut(((" " * self._margin, text.PLAIN), (words.rstrip(), text.BOLD)))

    def line(self, number: int, is_chosen: bool = False) -> Line:
        """Return the line of a row."""
        spans: list[Span] = [((self._glyphs.mark if is_chosen else "").ljust(self._margin), text.BOLD)]
        for column in self._shown:
            style = self._style(self._rows[number]) if column.heading in ("STATE", "AGENT") else text.PLAIN
            if is_chosen and column is self._shown[0]:
                style = text.CHOSEN
            spans += [(self._aligned(column, self._cells[column][number]), style), (self._gap, text.PLAIN)]
        return self._cut(tuple(spans[:-1]))

    def lines(self) -> list[Line]:
        """Return all lines."""
        return [self.heading(), *(self.line(number) for number in range(len(self._rows)))]

    def as_json(self) -> dict[str, Any]:
        """Return headings, whether a column holds numbers, the cells of all rows, and the style of each row's state."""
        cells = [[self._cells[column][number] for column in self._shown] for number in range(len(self._rows))]
        return {
            "headings": [column.heading for column in self._shown],
            "numbers": [column.is_number for column in self._shown],
            "rows": cells,
            "styles": [self._style(row) for row in self._rows],
        }

    def _aligned(self, column: Column[Row], cell: str) -> str:
        if column.takes_rest:
            return cell
        return (text.right if column.is_number else text.fit)(cell, self._widths[column], self._glyphs.ellipsis)

    def _cut(self, line: Line) -> Line:
        return text.cut(line, self._room, self._glyphs.ellipsis)


def of_texts(
    headings: Sequence[str], rows: Sequence[Sequence[str]], room: int, dispensable: Sequence[str] = ()
) -> list[Line]:
    """Return a table of texts. `dispensable`: columns in the order in which they are left out; the last one is cut."""

    def column(at: int) -> Column[Sequence[str]]:
        keep = dispensable.index(headings[at]) + 1 if headings[at] in dispensable else 0
        is_last = at == len(headings) - 1
        return Column(headings[at], lambda row: row[at], False, keep, is_kept=True, takes_rest=is_last)

    columns = [column(at) for at in range(len(headings))]
    state = next((at for at, each in enumerate(headings) if each in ("STATE", "AGENT")), 0)
    return TextTable(columns, rows, room, style=lambda row: style_of(row[state])).lines()


# ---------------------------------------------------------------------- jobs


def jobs(models: Sequence[Model], room: int, now: float, glyphs: Glyphs = text.UNICODE, **how: Any) -> TextTable[Model]:
    """Return the table of jobs. `room`: columns of the terminal. `now`: wall clock, seconds."""
    for model in models:
        model.settle(now)
    words = (facts.FAILED, facts.LOST, facts.STALLED, facts.STRAGGLER)
    columns: Sequence[Column[Model]] = (
        Column("JOB", lambda model: model.job.id, False, is_kept=True),
        Column("STATE", _job_state, False, is_kept=True),
        Column("PROGRESS", lambda model: events.short(model.progress) if model.progress else "", False, keep=7),
        Column("CODE", lambda model: _shown(model.job.exit_code), False, keep=3),
        Column("NAME", lambda model: model.job.name, False, keep=9),
        Column(
            "TASKS",
            lambda model: _counted(model, (facts.RUNNING, *words)),
            False,
            keep=4,
            short=Column("TASKS", lambda model: _counted(model, words), False, keep=8),
        ),
        Column("TIME", lambda model: formats.elapsed(model.job.elapsed(now)), False, keep=6),
        Column("HOSTS", lambda model: _shown(len(model.hosts) or None), False, keep=1),
        Column("CREATED", lambda model: clock(model.job.created, "%m-%d %H:%M"), False, keep=2),
        Column("COMMAND", _command, False, is_kept=True, takes_rest=True),
    )
    return TextTable(columns, models, room, glyphs, style=lambda model: style_of(model.job.state), **how)


def clock(when: float | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a time as a clock here shows it."""
    return "" if when is None else time.strftime(form, time.localtime(when))


def _shown(number: int | None) -> str:
    return "" if number is None else str(number)


def _command(model: Model) -> str:
    return formats.join(model.job.command) or model.job.message


def _job_state(model: Model) -> str:
    seen_s = model.job.seen_s
    return model.job.state if seen_s is None else f"{model.job.state}, seen {formats.age(seen_s)} ago"


def _counted(model: Model, words: Sequence[str]) -> str:
    counts = Counter({facts.RUNNING: 0})
    for word, count in model.counts:
        counts[facts.RUNNING if word == facts.WAITING else word] += count
    return formats.counted(len(model.tasks), [(counts[word], word) for word in words]) if model.tasks else ""


# ---------------------------------------------------------------------- tasks


SORTS = ("problems", "task", "host", "step", "cpu", "memory", "gpu", "last line")
"""Orders of the table; `s` goes to the next one."""


def task_rows(tasks: Iterable[TaskView], wanted: str, order: str, is_folded: bool) -> list[tuple[TaskView, ...]]:
    """Return the rows of a table, each a task or several that are alike.

    Args:
        tasks: the job's tasks, in its order.
        wanted: words that must all be part of the task's name, host or state; empty: all tasks.
        order: one of SORTS. Within it tasks keep the job's order.
        is_folded: tasks of one role and state, unless they are problems, share a row.
    """
    found = sorted((task for task in tasks if matches(wanted, task.name, task.host, task.word)), key=_KEYS[order])
    return _rows(found, lambda task: (task.name,) if task.is_problem else ("", task.role, task.word), is_folded)


def host_rows(known: Iterable[HostView], wanted: str, is_folded: bool) -> list[tuple[HostView, ...]]:
    """Return the rows of the panel of hosts: those that are silent or lost first; folded, one for those of one word."""
    found = sorted(
        (host for host in known if matches(wanted, host.name, host.word)), key=lambda host: host.word == "ok"
    )
    return _rows(found, lambda host: host.word, is_folded)


def matches(wanted: str, *texts: str) -> bool:
    """Return whether each word of `wanted` is part of one of the texts, in upper or lower case."""
    return all(any(word in text.lower() for text in texts) for word in wanted.lower().split())


def _rows(found: Sequence[View], alike: Callable[[View], object], is_folded: bool) -> list[tuple[View, ...]]:
    groups = formats.grouped((alike(each) if is_folded else number, each) for number, each in enumerate(found))
    return list(map(tuple, groups.values()))


def _descending(of: Callable[[TaskView], float | None]) -> Callable[[TaskView], tuple[float, ...]]:
    def key(task: TaskView) -> tuple[float, ...]:
        value = of(task)
        return (1.0,) if value is None else (0.0, -value)

    return key


_ROLES = {"worker": 0, "server": 1, "scheduler": 2}
_KEYS: dict[str, Callable[[TaskView], tuple[Any, ...]]] = {
    "problems": lambda task: (
        task.level,
        (task.ended or 0.0) if task.is_problem else 0.0,
        _ROLES.get(task.role, 3),
        task.rank,
    ),
    "task": lambda task: (_ROLES.get(task.role, 3), task.role, task.rank),
    "host": lambda task: (text.natural(task.host), _ROLES.get(task.role, 3), task.rank),
    "step": lambda task: (float("inf") if task.step is None else task.step, _ROLES.get(task.role, 3), task.rank),
    "cpu": _descending(lambda task: task.cpu),
    "memory": _descending(lambda task: task.rss),
    "gpu": _descending(lambda task: task.gpu),
    "last line": _descending(lambda task: task.quiet_s),
}


def tasks(
    rows: Sequence[Sequence[TaskView]],
    room: int,
    now: float,
    since_s: float = 0.0,
    glyphs: Glyphs = text.UNICODE,
    **how: Any,
) -> TextTable[Sequence[TaskView]]:
    """Return the table of tasks. `now`: wall clock, seconds. `since_s`: how old the metrics are."""
    columns: Sequence[Column[Sequence[TaskView]]] = (
        Column("TASK", lambda row: text.folded(tuple(task.name for task in row)), False, is_kept=True, widest=24),
        Column("HOST", lambda row: text.folded(tuple(task.host for task in row)), False, 8, is_kept=True, widest=24),
        Column("PID", lambda row: _shown(row[0].pid) if len(row) == 1 else "", keep=3),
        Column("STATE", _word, False, is_kept=True, widest=16),
        Column("UP", lambda row: formats.elapsed(_most(task.uptime(now) for task in row)), keep=7, is_kept=True),
        Column("CPU", lambda row: formats.percent(_mean(task.cpu for task in row)), keep=11),
        Column("MEM", lambda row: formats.short_size(_most(task.rss for task in row)), keep=10),
        Column("LIMIT", lambda row: formats.short_size(row[0].limit), keep=2),
        Column("GPU", lambda row: formats.percent(_mean(task.gpu for task in row)), keep=11),
        Column("GMEM", lambda row: formats.short_size(_most(task.gpu_mem for task in row)), keep=4),
        Column("STEP", lambda row: _shown(min(_known(task.step for task in row), default=None)), keep=6),
        Column(
            "LAST", lambda row: "" if row[0].is_over else _age(_most(task.quiet_s for task in row), since_s), keep=9
        ),
        Column("CPU TIME", lambda row: "" if row[0].cpu_s is None else f"{row[0].cpu_s:.1f} s", keep=1),
        Column("CODE", lambda row: row[0].code if len({task.code for task in row}) == 1 else "various", keep=12),
        Column("WHY", lambda row: row[0].why, False, keep=5, takes_rest=True),
    )

    def style(row: Sequence[TaskView]) -> str:
        return text.DIM if row[0].level == CONSEQUENCE_LEVEL else style_of(row[0].word)

    return TextTable(columns, rows, room, glyphs, style=style, **how)


def _word(row: Sequence[TaskView] | Sequence[HostView]) -> str:
    word = row[0].word
    return word if len(row) == 1 or not word else f"{len(row)} {word}"


# ---------------------------------------------------------------------- hosts and servers


def hosts(
    groups: Sequence[Sequence[HostView]], room: int, since_s: float, glyphs: Glyphs = text.UNICODE
) -> TextTable[Sequence[HostView]]:
    """Return the table of hosts, or of groups of them. `since_s`: age of the metrics, seconds."""
    columns: Sequence[Column[Sequence[HostView]]] = (
        Column("HOST", lambda group: text.folded(tuple(host.name for host in group)), False, is_kept=True),
        Column("STATE", _word, False),
        Column("HEARD", lambda group: _age(_most(host.heard_s for host in group), since_s), keep=4),
        Column("CPU", lambda group: formats.percent(_mean(host.cpu for host in group))),
        Column("LOAD", lambda group: _load(_mean(host.load for host in group)), keep=5),
        Column(
            "MEM", lambda group: _part(total(host.mem_used for host in group), total(host.mem_total for host in group))
        ),
        Column(
            "DISK FREE",
            lambda group: formats.short_size(min(_known(host.disk_free for host in group), default=None)),
            keep=6,
        ),
        Column("NET IN", lambda group: _per_s(total(host.net_rx for host in group)), keep=3),
        Column("NET OUT", lambda group: _per_s(total(host.net_tx for host in group)), keep=2),
        Column("GPU", _gpus),
        Column("CLOCK", _offset, keep=1),
    )
    return TextTable(columns, groups, room, glyphs, style=lambda group: style_of(group[0].word))


def _load(load: float | None) -> str:
    return "" if load is None else f"{load:.1f}"


def _gpus(group: Sequence[HostView]) -> str:
    known = _known(gpu.util for host in group for gpu in host.gpus)
    return f"{len(known)}x {formats.percent(_mean(known))}" if known else ""


def _offset(group: Sequence[HostView]) -> str:
    offset_s = max(_known(host.offset_s for host in group), key=abs, default=None)
    return "" if offset_s is None else f"{round(offset_s, 1) + 0.0:+.1f}s"  # never -0.0


def servers(found: Sequence[ServerView], room: int, glyphs: Glyphs = text.UNICODE) -> TextTable[ServerView]:
    """Return the table of servers."""
    columns: Sequence[Column[ServerView]] = (
        Column("SERVER", lambda server: server.name, False, is_kept=True),
        Column("KEYS", lambda server: _shown(server.keys), keep=3),
        Column("SIZE", lambda server: formats.short_size(server.size), keep=7),
        Column("PUSH/S", lambda server: rate(server.push_s)),
        Column("PULL/S", lambda server: rate(server.pull_s)),
        Column("IN", lambda server: _per_s(server.in_s), keep=2),
        Column("OUT", lambda server: _per_s(server.out_s), keep=1),
        Column("QUEUE", lambda server: _shown(server.queue)),
        Column("WAITING", lambda server: _shown(server.waiting), keep=6),
        Column("STALE", lambda server: rate(server.staleness_max), keep=5),
        Column("LAST RANK", _last_rank, False),
        Column("DEVICE", lambda server: server.device, False, keep=4),
    )
    return TextTable(columns, found, room, glyphs)


def _last_rank(server: ServerView) -> str:
    last = max(server.lags.items(), key=lambda item: item[1], default=None)
    return "" if last is None or last[1] <= 0 else f"{rank(last[0])} +{last[1]:.2f}s"


def rank(name: str) -> str:
    """Return the name of the worker of a rank."""
    return f"worker-{name}" if name.isdigit() else name


def rate(value: float | None) -> str:
    """Return how many a second, below a heading that says so."""
    return formats.per_second(value).removesuffix("/s")


def _known(values: Iterable[Number | None]) -> list[Number]:
    return [value for value in values if value is not None]


def total(values: Iterable[float | None]) -> float | None:
    """Return the sum of the values that are known; None if none is."""
    return sum(known) if (known := _known(values)) else None


def _mean(values: Iterable[float | None]) -> float | None:
    return sum(known) / len(known) if (known := _known(values)) else None


def _most(values: Iterable[float | None]) -> float | None:
    return max(_known(values), default=None)


def _age(seconds: float | None, since_s: float) -> str:
    return "" if seconds is None else formats.age(seconds + since_s)


def _part(used: float | None, total: float | None) -> str:
    whole = "" if used is None or total is None else f"/{formats.short_size(total)}"
    return formats.short_size(used) + whole


def _per_s(value: float | None) -> str:
    return "" if value is None else f"{formats.short_size(value)}/s"
