"""The table of tasks: selects the columns that fit and formats their cells.

No side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distrun import formats
from distrun.dashboard import text
from distrun.dashboard.model import CONSEQUENCE_LEVEL, HostView, TaskView
from distrun.dashboard.text import Glyphs, Line, Span
from distrun_runtime.contract import facts

# The rows of the table of tasks: filters and sorts them, and folds tasks that are alike into one row.
#
# No side effects.


SORTS = ("problems", "task", "host", "step", "cpu", "memory", "gpu", "last line")
"""Orders of the table; `s` goes to the next one."""


@dataclass(frozen=True)
class TaskRow:
    """One row: a task, or several that are alike."""

    tasks: tuple[TaskView, ...]

    @property
    def key(self) -> str:
        """What the row is called while it is chosen."""
        return self.tasks[0].name

    @property
    def first(self) -> TaskView:
        """The task, or the first one."""
        return self.tasks[0]

    @property
    def name(self) -> str:
        """Names of the tasks, folded: `worker-[0-7]`."""
        return self.first.name if len(self.tasks) == 1 else text.folded(tuple(task.name for task in self.tasks))

    @property
    def host(self) -> str:
        """Names of the hosts, folded: `gpu[01-08]`."""
        return self.first.host if len(self.tasks) == 1 else text.folded(tuple(task.host for task in self.tasks))

    def total(self, of: Callable[[TaskView], float | None]) -> float | None:
        """Return the sum over its tasks of what is known."""
        known = [value for value in map(of, self.tasks) if value is not None]
        return sum(known) if known else None

    def mean(self, of: Callable[[TaskView], float | None]) -> float | None:
        """Return the mean over its tasks of what is known."""
        known = [value for value in map(of, self.tasks) if value is not None]
        return sum(known) / len(known) if known else None

    def largest(self, of: Callable[[TaskView], float | None]) -> float | None:
        """Return the largest value of its tasks."""
        return max((value for value in map(of, self.tasks) if value is not None), default=None)


def table(tasks: Iterable[TaskView], wanted: str, order: str, is_folded: bool) -> list[TaskRow]:
    """Return the rows of a table.

    Args:
        tasks: the job's tasks, in its order.
        wanted: words that must all be part of the task's name, host or state; empty: all tasks.
        order: one of SORTS. Within it tasks keep the job's order.
        is_folded: tasks of one role and state, unless they are problems, share a row.
    """
    found = [task for task in tasks if matches(wanted, task.name, task.host, task.word)]
    found.sort(key=_KEYS[order])
    if not is_folded:
        return [TaskRow((task,)) for task in found]
    groups: dict[tuple[str, ...], list[TaskView]] = {}
    for task in found:
        groups.setdefault((task.name,) if task.is_problem else ("", task.role, task.word), []).append(task)
    return [TaskRow(tuple(group)) for group in groups.values()]


def matches(wanted: str, *texts: str) -> bool:
    """Return whether each word of `wanted` is part of one of the texts, in upper or lower case."""
    return all(any(word in text.lower() for text in texts) for word in wanted.lower().split())


def hosts(known: Iterable[HostView], wanted: str, is_folded: bool) -> list[tuple[HostView, ...]]:
    """Return the rows of the panel of hosts: those that are silent or lost first; folded, one for those of one word."""
    found = sorted(
        (host for host in known if matches(wanted, host.name, host.word)), key=lambda host: host.word == "ok"
    )
    if not is_folded:
        return [(host,) for host in found]
    groups: dict[str, list[HostView]] = {}
    for host in found:
        groups.setdefault(host.word, []).append(host)
    return [tuple(group) for group in groups.values()]


def _descending(of: Callable[[TaskView], float | None]) -> Callable[[TaskView], tuple[float, ...]]:
    def key(task: TaskView) -> tuple[float, ...]:
        value = of(task)
        return (1.0,) if value is None else (0.0, -value)

    return key


_ROLES = {"worker": 0, "server": 1, "scheduler": 2}
_KEYS: dict[str, Callable[[TaskView], tuple[Any, ...]]] = {
    "problems": lambda task: (task.level, task.ended or 0.0, _ROLES.get(task.role, 3), task.rank),
    "task": lambda task: (_ROLES.get(task.role, 3), task.role, task.rank),
    "host": lambda task: (text.natural(task.host), _ROLES.get(task.role, 3), task.rank),
    "step": lambda task: (float("inf") if task.step is None else task.step, _ROLES.get(task.role, 3), task.rank),
    "cpu": _descending(lambda task: task.cpu),
    "memory": _descending(lambda task: task.rss),
    "gpu": _descending(lambda task: task.gpu),
    "last line": _descending(lambda task: task.quiet_s),
}


STYLES = {
    facts.RUNNING: text.CYAN,
    facts.STARTING: text.CYAN,
    facts.EXITED: text.GREEN,
    facts.SUCCEEDED: text.GREEN,
    facts.FAILED: text.RED,
    facts.LOST: text.RED,
    facts.STALLED: text.RED,
    facts.STRAGGLER: text.YELLOW,
    facts.WAITING: text.YELLOW,
    facts.STOPPING: text.YELLOW,
    facts.KILLED: text.YELLOW,
    facts.PENDING: text.DIM,
    facts.STOPPED: text.DIM,
}
"""Styles of words. The word says it all; the colour helps to find it."""
WHY_LEAST = 12
"""Columns that the last column needs to be shown."""


@dataclass(frozen=True)
class Scene:
    """What the cells of one picture need to know."""

    now: float
    """Wall clock, seconds."""
    since_metrics_s: float
    """How old the metrics are."""


@dataclass(frozen=True)
class Column:
    """One column of the table."""

    heading: str
    cell: Callable[[TaskRow, Scene], str]
    is_number: bool = True
    keep: int = 0
    """Columns with the lowest number are left out first where there is no room; 0: never."""


def _word(row: TaskRow, scene: Scene) -> str:
    return row.first.word if len(row.tasks) == 1 else f"{len(row.tasks)} {row.first.word}"


def _memory(row: TaskRow, scene: Scene) -> str:
    return formats.short_size(row.largest(lambda task: task.rss))


def _limit(row: TaskRow, scene: Scene) -> str:
    return formats.short_size(row.first.limit)


def _quiet(row: TaskRow, scene: Scene) -> str:
    quiet_s = row.largest(lambda task: task.quiet_s)
    if quiet_s is None or row.first.is_over:
        return ""
    return formats.age(quiet_s + scene.since_metrics_s)


def _cpu(row: TaskRow, scene: Scene) -> str:
    return formats.percent(row.mean(lambda task: task.cpu))


def _step(row: TaskRow, scene: Scene) -> str:
    steps = [task.step for task in row.tasks if task.step is not None]
    return "" if not steps else str(min(steps))


def _code(row: TaskRow, scene: Scene) -> str:
    codes = {task.code for task in row.tasks}
    return row.first.code if len(codes) == 1 else "various"


COLUMNS: Sequence[Column] = (
    Column("TASK", lambda row, scene: row.name, is_number=False),
    Column("HOST", lambda row, scene: row.host, is_number=False, keep=6),
    Column("PID", lambda row, scene: str(row.first.pid or "") if len(row.tasks) == 1 else "", keep=2),
    Column("STATE", _word, is_number=False),
    Column("UP", lambda row, scene: formats.elapsed(row.largest(lambda task: task.uptime(scene.now))), keep=5),
    Column("CPU", _cpu, keep=9),
    Column("MEM", _memory, keep=8),
    Column("LIMIT", _limit, keep=1),
    Column("GPU", lambda row, scene: formats.percent(row.mean(lambda task: task.gpu)), keep=9),
    Column("GMEM", lambda row, scene: formats.short_size(row.largest(lambda task: task.gpu_mem)), keep=3),
    Column("STEP", _step, keep=4),
    Column("LAST", _quiet, keep=7),
    Column("CODE", _code, keep=10),
)
WHY = "WHY"
MUST = ("TASK", "HOST", "STATE", "UP")
"""Columns that are shown even where all their cells are empty."""
WIDEST = {"TASK": 24, "HOST": 24, "STATE": 16}
ROLE_COLUMNS = 2
"""Columns of the mark before a row."""


class TaskTable:
    """The table for one picture.

    Arguments:
        rows: all rows; widths are those of the visible ones, so that the cost does not grow with the job.
        columns: room.
    """

    def __init__(self, rows: Sequence[TaskRow], columns: int, scene: Scene, glyphs: Glyphs) -> None:
        self._columns = columns
        self._glyphs = glyphs
        cells = {column.heading: [text.clean(column.cell(row, scene)) for row in rows] for column in COLUMNS}
        chosen = [column for column in COLUMNS if column.heading in MUST or any(cells[column.heading])]
        self._widths = {column.heading: self._width(column, cells[column.heading]) for column in chosen}
        gap = 2 if columns >= 100 else 1
        self._gap = " " * gap
        has_why = any(row.first.why for row in rows)
        for column in sorted((each for each in chosen if each.keep), key=lambda each: each.keep):
            if self._used(chosen, gap) <= columns - (WHY_LEAST + gap if has_why and column.keep < 4 else 0):
                break
            chosen.remove(column)
        self._shown = chosen
        self._cells = cells
        self._rows = rows
        self._why = columns - self._used(chosen, gap) - gap
        if not has_why or self._why < WHY_LEAST:
            self._why = 0

    def _width(self, column: Column, cells: Sequence[str]) -> int:
        found = max(len(column.heading), *(text.width(cell) for cell in cells)) if cells else len(column.heading)
        return min(found, WIDEST.get(column.heading, found))

    def _used(self, chosen: Sequence[Column], gap: int) -> int:
        return ROLE_COLUMNS + sum(self._widths[each.heading] + gap for each in chosen) - gap

    def heading(self) -> Line:
        """Return the line of headings."""
        parts = [self._aligned(column, column.heading) for column in self._shown]
        if self._why:
            parts.append(WHY)
        return ((" " * ROLE_COLUMNS, text.PLAIN), (self._gap.join(parts), text.BOLD))

    def line(self, number: int, is_chosen: bool) -> Line:
        """Return the line of a row."""
        row = self._rows[number]
        spans: list[Span] = [((self._glyphs.mark if is_chosen else " ").ljust(ROLE_COLUMNS), text.BOLD)]
        for column in self._shown:
            cell = self._aligned(column, self._cells[column.heading][number])
            style = text.PLAIN
            if column.heading == "STATE":
                is_dim = row.first.level == CONSEQUENCE_LEVEL
                style = text.DIM if is_dim else STYLES.get(row.first.word, text.PLAIN)
            if column.heading == "TASK" and is_chosen:
                style = text.CHOSEN
            spans += [(cell, style), (self._gap, text.PLAIN)]
        if self._why and row.first.why:
            spans.append((text.fit(text.clean(row.first.why), self._why, self._glyphs.ellipsis), text.PLAIN))
        return tuple(spans)

    def _aligned(self, column: Column, cell: str) -> str:
        align = text.right if column.is_number else text.fit
        return align(cell, self._widths[column.heading], self._glyphs.ellipsis)
