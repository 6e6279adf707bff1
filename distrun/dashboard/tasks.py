"""The table of tasks: selects the columns that fit and formats their cells.

No side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distrun import units
from distrun.dashboard import text
from distrun.dashboard.rows import Row
from distrun.dashboard.text import Glyphs, Line, Span
from distrun_runtime.contract import facts

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
    cell: Callable[[Row, Scene], str]
    is_number: bool = True
    keep: int = 0
    """Columns with the lowest number are left out first where there is no room; 0: never."""


def _word(row: Row, scene: Scene) -> str:
    return row.first.word if len(row.tasks) == 1 else f"{len(row.tasks)} {row.first.word}"


def _memory(row: Row, scene: Scene) -> str:
    return units.short_size(row.largest(lambda task: task.rss))


def _limit(row: Row, scene: Scene) -> str:
    return units.short_size(row.first.limit)


def _quiet(row: Row, scene: Scene) -> str:
    quiet_s = row.largest(lambda task: task.quiet_s)
    if quiet_s is None or row.first.is_over:
        return ""
    return units.age(quiet_s + scene.since_metrics_s)


def _cpu(row: Row, scene: Scene) -> str:
    return units.percent(row.mean(lambda task: task.cpu))


def _step(row: Row, scene: Scene) -> str:
    steps = [task.step for task in row.tasks if task.step is not None]
    return "" if not steps else str(min(steps))


def _code(row: Row, scene: Scene) -> str:
    codes = {task.code for task in row.tasks}
    return row.first.code if len(codes) == 1 else "various"


COLUMNS: Sequence[Column] = (
    Column("TASK", lambda row, scene: row.name, is_number=False),
    Column("HOST", lambda row, scene: row.host, is_number=False, keep=6),
    Column("PID", lambda row, scene: str(row.first.pid or "") if len(row.tasks) == 1 else "", keep=2),
    Column("STATE", _word, is_number=False),
    Column("UP", lambda row, scene: units.elapsed(row.largest(lambda task: task.uptime(scene.now))), keep=5),
    Column("CPU", _cpu, keep=9),
    Column("MEM", _memory, keep=8),
    Column("LIMIT", _limit, keep=1),
    Column("GPU", lambda row, scene: units.percent(row.mean(lambda task: task.gpu)), keep=9),
    Column("GMEM", lambda row, scene: units.short_size(row.largest(lambda task: task.gpu_mem)), keep=3),
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


class Table:
    """The table for one picture.

    Arguments:
        rows: all rows; widths are those of the visible ones, so that the cost does not grow with the job.
        columns: room.
    """

    def __init__(self, rows: Sequence[Row], columns: int, scene: Scene, glyphs: Glyphs) -> None:
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
            style = STYLES.get(row.first.word, text.PLAIN) if column.heading == "STATE" else text.PLAIN
            if column.heading == "TASK" and is_chosen:
                style = text.CHOSEN
            spans += [(cell, style), (self._gap, text.PLAIN)]
        if self._why and row.first.why:
            spans.append((text.fit(text.clean(row.first.why), self._why, self._glyphs.ellipsis), text.PLAIN))
        return tuple(spans)

    def _aligned(self, column: Column, cell: str) -> str:
        align = text.right if column.is_number else text.fit
        return align(cell, self._widths[column.heading], self._glyphs.ellipsis)
