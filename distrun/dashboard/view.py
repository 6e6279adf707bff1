"""Draws the picture of a job: returns lines for a model, a look and the size of the terminal.

No side effects. From top to bottom: header, table of tasks, panels, a line for messages and questions, keys. A terminal
smaller than 80x24 gets the header and the table only. Rows that do not fit are counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from distrun import formats
from distrun.dashboard import events as progress
from distrun.dashboard import rows, text, user
from distrun.dashboard.events import EventLine
from distrun.dashboard.model import Model, TaskView
from distrun.dashboard.source import Point
from distrun.dashboard.text import Glyphs, Line, Span
from distrun.dashboard.user import ViewSelection, VisibleRows
from distrun_runtime.contract.facts import time_of_day

# The panels below the table: reports, hosts, store, events, and the end of the log of the first error.
#
# No side effects. Each function returns the lines of a panel for a given width. The most important lines come first,
# because a panel that has too little room is cut at its end.


def reports(model: Model, room: int, columns: int, glyphs: Glyphs) -> list[Line]:
    """Return charts of what scripts report, each below a line with its numbers or, for want of room, beside them.

    `room`: lines. Curves for which there is none are counted.
    """
    found = [(text.clean(name), points) for name, points in model.reports.items()]
    shown = found if len(found) <= room else found[: max(0, room - 1)]
    height = min(CHART_ROWS, room // max(1, len(found)) - 1)
    name_width = min(columns // 4, max((text.width(name) for name, _ in shown), default=0))
    range_width = max((len(_range(points)) for _, points in shown), default=0)
    beside = columns - name_width - NUMBER_WIDTH - range_width - 3
    lines: list[Line] = []
    for name, points in shown:
        last, past = formats.value(points[-1][2]), [(time_s, value) for _, time_s, value in points]
        if height > 0:
            about = "".join(f"   {each}" for each in (_range(points), _span(points)) if each)
            lines.append(((name, text.PLAIN), (f" {last}", text.BOLD), (about, text.DIM)))
            if len(past) > 1:
                lines += [((line, text.CYAN),) for line in text.chart(text.stretched(past, columns), height, glyphs)]
        else:
            head = f"{text.fit(name, name_width, glyphs.ellipsis)} "
            (drawn,) = text.chart(text.stretched(past, max(2, beside)), 1, glyphs)
            chart = (text.fit(drawn, beside, glyphs.ellipsis), text.CYAN)
            numbers = (f"{last:{NUMBER_WIDTH}}", text.BOLD)
            lines.append(((head, text.PLAIN), numbers, chart, (f"  {_range(points)}", text.DIM)))
    if len(shown) < len(found) and room > 0:
        lines.append(((f"{len(found) - len(shown)} more", text.DIM),))
    return [text.cut(line, columns, glyphs.ellipsis) for line in lines]


def _range(points: Sequence[Point]) -> str:
    known = [value for _, _, value in points if math.isfinite(value)]
    return f"min {formats.value(min(known))}  max {formats.value(max(known))}" if len(known) > 1 else ""


def _span(points: Sequence[Point]) -> str:
    """Return where a curve begins and ends: by steps or, if they are not known or went back, by time."""
    steps = [step for step, _, _ in points if step is not None]
    if len(steps) == len(points) and steps == sorted(steps):
        return "step " + " to ".join(dict.fromkeys(map(str, (steps[0], steps[-1]))))
    return " to ".join(dict.fromkeys(formats.elapsed(each[1]) for each in (points[0], points[-1])))


def store(model: Model, room: int, columns: int, glyphs: Glyphs) -> list[Line]:
    """Return the store's panel: totals with charts, then a line for each server. `room`: lines."""
    found = model.store
    if found is None:
        return []
    slowest = found.slowest
    rates = [
        ("push/s", rows.rate(found.push_s), "push_s"),
        ("pull/s", rows.rate(found.pull_s), "pull_s"),
        ("queue", rows.rate(found.queue), "queue"),
        ("staleness", rows.rate(found.staleness), "staleness"),
        ("lag", f"{slowest[1]:.2f}s {rows.rank(slowest[0])}" if slowest else "", "lag"),
    ]
    cell = max(24, columns // 3)
    charts: list[Line] = []
    for name, value, key in rates:
        if not value:
            continue
        wide = max(0, cell - 1 - text.width(f"{name} {value} "))
        chart = text.spark(model.trace(key, wide), wide, glyphs)
        charts.append(text.padded(((name, text.DIM), (f" {value} ", text.BOLD), (chart, text.CYAN)), cell))
    per_line = max(1, columns // cell)
    lines: list[Line] = [
        text.cut(tuple(span for chart in charts[at : at + per_line] for span in chart), columns, glyphs.ellipsis)
        for at in range(0, len(charts), per_line)
    ]
    if room - len(lines) < 2:
        return lines  # a heading alone says nothing
    return [*lines, *servers(model, columns, glyphs)]


def servers(model: Model, columns: int, glyphs: Glyphs) -> list[Line]:
    """Return the table of servers, and below it what is known of the store as a whole."""
    found = model.store
    lines = rows.servers(found.servers, columns, glyphs).lines() if found is not None and found.servers else []
    return lines + [text.cut(line, columns, glyphs.ellipsis) for line in store_notes(model)]


def store_notes(model: Model) -> list[Line]:
    """Return what is known of the store as a whole, and why servers do not use a GPU."""
    found = model.store
    if found is None:
        return []
    more = []
    if found.barriers is not None:
        more.append(f"barriers {found.barriers}")
    if found.barrier_waiting:
        of = "" if found.members is None else f" of {found.members} members"
        more.append(f"a barrier waits for {found.barrier_waiting}{of}")
    if found.round_s is not None:
        more.append(f"rounds/s {rows.rate(found.round_s)}")
    lines: list[Line] = [(("  ".join(more), text.DIM),)] if more else []
    for server in found.servers:
        if server.device_why:
            why = f"{server.name}: in host memory, not on a GPU: {server.device_why}"
            lines.append(((text.clean(why), text.PLAIN),))
    return lines


def events(model: Model, room: int, columns: int, glyphs: Glyphs) -> list[Line]:
    """Return the last events, the newest at the end, as many as there is room for."""
    lines = _event_lines(progress.folded(model.events)[-room:])
    return [text.cut(line, columns, glyphs.ellipsis) for line in lines]


def error(model: Model, room: int, columns: int, glyphs: Glyphs) -> list[Line]:
    """Return the end of the log of the task that failed first."""
    shown = [line.rstrip() for line in model.error_lines]
    while shown and not shown[-1]:
        shown.pop()
    return [(((text.fit(text.clean(line), columns, glyphs.ellipsis)).rstrip(), text.PLAIN),) for line in shown[-room:]]


def error_title(model: Model) -> str:
    """Return what stands above the panel of the first error."""
    task = model.first_error
    if task is None:
        return ""
    how = f"exit code {task.code}" if task.code.isdigit() else f"signal {task.code}" if task.code else task.word
    return f"first error: {task.name} on {task.host}, {how}"


COLUMNS, ROWS = 80, 24
"""A smaller terminal has no panels."""
TWO_COLUMNS = 150
"""With at least this many columns, panels are side by side."""
TABLE_LEAST = 5
TABLE_WIDE = 66
"""Columns that the table may need before its last one, WHY: what is longer than the rest has a line of its own."""
HOSTS_MOST = 8
"""More hosts are folded in a panel beside others."""
PANEL_LEAST = 3
"""Rows of a panel with its title, below which it is not shown."""
NUMBER_WIDTH = 11
"""Columns of a number in a line with its chart: `-1.234e-05`."""
TRACE_SPAN = "10 s each"
CHART_ROWS = 6
"""Rows of the chart of a reported number, at most."""
OLD_S = 5.0
"""Metrics that are older are said to be so."""

_FRAME = re.compile(r'(\s*File ")([^"]+)(", line \d+ in .*)')
"""A line of a stack as faulthandler writes it."""

HELP = (
    ("q", "leave; the job goes on"),
    ("Up, Down, PgUp, PgDn", "choose a task (also k, j)"),
    ("Enter", "all that is known of the task"),
    ("l", "follow the log of the task"),
    ("S", "where the task's program is now (its stack)"),
    ("s", "sort by: " + ", ".join(rows.SORTS)),
    ("/", "show only tasks and hosts with these words in name, host or state; Esc: all"),
    ("f", "fold what is alike: worker-[0-7] on gpu[01-08]"),
    ("Tab", "which panels: " + ", ".join(user.PANELS)),
    ("p", "hold the picture, or go on"),
    ("x", "stop the job: asks; type yes and Enter"),
    ("Ctrl-L", "draw the screen again"),
    ("Ctrl-Z", "to the shell; fg comes back"),
)


@dataclass(frozen=True)
class Options:
    """How a picture is made, whatever it shows."""

    columns: int
    rows: int
    glyphs: Glyphs = text.UNICODE


@dataclass(frozen=True)
class TaskExtra:
    """What is shown beside the model: of the task that is looked at."""

    log: Sequence[str] = ()
    stack: Sequence[str] = ()


@dataclass(frozen=True)
class Picture:
    """Lines for the terminal, and what they show."""

    lines: Sequence[Line]
    shown: VisibleRows
    first: int = 0
    """First visible row of the table."""
    hosts: tuple[str, ...] = ()
    """Hosts of the visible tasks."""


def picture(model: Model, look: ViewSelection, options: Options, now: float, extra: TaskExtra | None = None) -> Picture:
    """Return the picture. `now`: wall clock, seconds."""
    extra = extra or TaskExtra()
    if look.mode == user.MAIN:
        return _main(model, look, options, now)
    bottom = _bottom(model, look, options)
    head = _header(model, look, options, now)[:1]
    room = max(1, options.rows - len(head) - len(bottom) - 1)
    title, content = _text(model, look, options, now, extra)
    most = max(0, len(content) - room)
    offset = min(look.first, most)
    first = most - offset if look.mode == user.LOG else offset
    body = [_to_width(line, options) for line in content[first : first + room]]
    body += [()] * (room - len(body))
    lines = [*head, text.rule(title, options.columns, options.glyphs), *body, *bottom]
    task = model.tasks.get(look.chosen)
    return Picture(
        lines[: options.rows],
        VisibleRows((look.chosen,) if look.chosen else (), room, len(content)),
        hosts=(task.host,) if task is not None else (),
    )


def _main(model: Model, look: ViewSelection, options: Options, now: float) -> Picture:
    columns = options.columns
    head, bottom = _header(model, look, options, now), _bottom(model, look, options)
    found = rows.task_rows(model.tasks.values(), look.wanted, look.order, look.is_folded)
    keys = tuple(row[0].name for row in found)
    at = keys.index(look.chosen) if look.chosen in keys else 0
    why = text.clean(found[at][0].why) if found else ""
    if why and text.width(why) > columns - TABLE_WIDE:
        line: Line = ((f"{found[at][0].name}: ", text.BOLD), (why, text.PLAIN))
        bottom = [*bottom[:-1], _to_width(line, options), bottom[-1]]
    room = max(2, options.rows - len(head) - len(bottom))
    below = _panels(model, look, options, room=room, table=len(found) + 1, since_s=since(model, now))
    room -= len(below)
    count = max(1, room - 1)
    if len(found) > count:
        count = max(1, count - 1)  # the line that counts those that are hidden
    first = max(0, min(look.first, at, len(found) - count))
    if at >= first + count:
        first = at - count + 1
    visible = found[first : first + count]
    table = rows.tasks(visible, columns, now, since(model, now), options.glyphs, has_marks=True)
    body = [table.heading(), *(table.line(number, first + number == at) for number in range(len(visible)))]
    if not found:
        body.append(((_no_tasks(model, look), text.DIM),))
    hidden = [*found[:first], *found[first + count :]]
    if hidden:
        body.append(_hidden(found[:first], found[first + count :], options.glyphs))
    body = body[:room]
    body += [()] * (room - len(body))
    lines = [_to_width(line, options) for line in (*head, *body)] + [*below, *bottom]
    hosts = tuple(dict.fromkeys(task.host for row in visible for task in row[:1]))
    return Picture(lines[: options.rows], VisibleRows(keys, count, 0), first, hosts)


def _no_tasks(model: Model, look: ViewSelection) -> str:
    if look.wanted:
        return f"no task matches {look.wanted!r}; Esc shows all"
    return model.job.message or "no tasks yet"


def _hidden(above: Sequence[Sequence[TaskView]], below: Sequence[Sequence[TaskView]], glyphs: Glyphs) -> Line:
    """Return the line that counts rows for which there is no room."""
    words = Counter(task.word for row in (*above, *below) for task in row)
    counted = ", ".join(f"{count} {word}" for word, count in words.items())
    where = f", {len(above)} of them above" if above and below else ", above" if above else ""
    return ((f"  {len(above) + len(below)} more ({counted}){where}", text.DIM),)


# ---------------------------------------------------------------------- header


def _header(model: Model, look: ViewSelection, options: Options, now: float) -> list[Line]:
    job = model.job
    state = job.state or "no state yet"
    first: list[Span] = [
        (job.id, text.BOLD),
        ("  ", text.PLAIN),
        (state, rows.style_of(state)),
        (f" {formats.elapsed(job.elapsed(now))}", text.PLAIN),
    ]
    first += [
        ("" if job.exit_code is None else f"  exit code {job.exit_code}", text.PLAIN),
        ("  PAUSED" if look.is_paused else "", text.YELLOW),
        (f"  {job.backend}  ", text.DIM),
        (text.clean(formats.join(job.command)), text.PLAIN),
    ]
    second: list[Span] = [(f"tasks {len(model.tasks)}: ", text.DIM)]
    for number, (word, count) in enumerate(model.counts):
        second += [(", " if number else "", text.DIM), (f"{count} {word}", rows.style_of(word))]
    second += [
        (f"  hosts {len(model.hosts)}", text.DIM),
        (f"  sorted by {look.order}" if look.order != rows.SORTS[0] else "", text.YELLOW),
        (f"  only {look.wanted!r}" if look.wanted else "", text.YELLOW),
    ]
    lines = [tuple(first), tuple(second)]
    progress = _progress(model, options)
    if progress:
        lines.append(progress)
    return [_to_width(line, options) for line in (*lines, *notes(model, now))]


def notes(model: Model, now: float) -> list[Line]:
    """Return what a user should know of the job besides its state: why nothing new comes, how it ended."""
    found: list[Line] = []
    if model.link:
        found.append((("! ", text.RED), (text.clean(model.link), text.YELLOW)))
    elif model.metrics_at is not None and since(model, now) > OLD_S and not model.job.is_over:
        found.append(((f"! no metrics for {formats.age(since(model, now))}", text.YELLOW),))
    if model.job.is_over and model.job.message:
        style = text.GREEN if model.exit_code == 0 else text.RED
        found.append(((text.clean(model.job.message), style),))
    return found


def since(model: Model, now: float) -> float:
    """Return how old the metrics are, seconds."""
    return 0.0 if model.metrics_at is None else max(0.0, now - model.metrics_at)


def _progress(model: Model, options: Options) -> Line:
    """Return bar, step, rate, ETA and loss, as far as they are known."""
    found = model.progress
    if found is None:
        return ()
    spans: list[Span] = []
    if found.fraction is not None:
        room = max(6, min(40, options.columns // 5 - 10))
        spans.append((text.bar(found.fraction, room, options.glyphs), text.CYAN))
        spans.append((f" {formats.percent(found.fraction)}", text.BOLD))
    step, eta, slowest = progress.step(found), progress.eta(found), progress.slowest(found)
    is_over = model.job.is_over
    spans += [
        (f"  {step}" if step else "", text.PLAIN),
        ("" if found.rate is None else f" ({formats.per_second(found.rate)})", text.PLAIN),
        (f"  {eta}" if eta and not is_over else "", text.YELLOW if found.is_stalled else text.BOLD),
        ("" if found.loss is None else f"  {progress.loss(found)}", text.PLAIN),
        (f"  {slowest}" if slowest and not is_over else "", text.DIM),
    ]
    return tuple(span for span in spans if span[0])


# ---------------------------------------------------------------------- panels


@dataclass(frozen=True)
class _Panel:
    name: str
    title: str
    wants: int
    """Lines of content."""
    make: Callable[[int, int, Glyphs], Sequence[Line]]
    """Return the content for rows and columns."""


def _panels(
    model: Model, look: ViewSelection, options: Options, *, room: int, table: int, since_s: float
) -> list[Line]:
    """Return the lines of all panels. `table`: rows that the table would like to have."""
    if options.columns < COLUMNS or options.rows < ROWS or look.panel == "none":
        return []
    hosts = len(rows.host_rows(model.hosts.values(), look.wanted, False))
    is_one = look.panel != "all"
    folds = look.is_folded or (hosts > HOSTS_MOST and not is_one)

    def host_lines(height: int, columns: int, glyphs: Glyphs) -> Sequence[Line]:
        found = rows.hosts(groups, columns, since_s, glyphs).lines()
        if len(found) > height and not is_one:
            alike = rows.host_rows(model.hosts.values(), look.wanted, True)
            found = rows.hosts(alike, columns, since_s, glyphs).lines()
        if len(found) <= height:
            return found
        if height < PANEL_LEAST:  # better a row without its heading than a heading without rows
            return [*found[1:height], ((f"{len(found) - height} more (f folds them)", text.DIM),)]
        return [*found[: height - 1], ((f"{len(found) - height + 1} more hosts (f folds them)", text.DIM),)]

    groups = rows.host_rows(model.hosts.values(), look.wanted, folds)
    is_heard = any(host.word for host in model.hosts.values())
    curves = sum(1 + CHART_ROWS * (len(points) > 1) for points in model.reports.values())
    every = [
        _Panel("error", error_title(model), len(model.error_lines), partial(error, model)),
        _Panel("reports", "reports", curves, partial(reports, model)),
        _Panel("hosts", f"hosts {len(model.hosts)}", len(groups) + 1 if is_heard else 0, host_lines),
        _Panel("store", "store", 0 if model.store is None else len(model.store.servers) + 4, partial(store, model)),
        _Panel("events", "events", len(progress.folded(model.events)), partial(events, model)),
    ]
    if model.job.is_over:  # what its hosts and store did last says less than how it ended
        every.insert(1, every.pop())
    if is_one:
        (chosen,) = [panel for panel in every if panel.name == look.panel]
        most = room - min(table, max(TABLE_LEAST, room // 3))
        height = max(PANEL_LEAST, room - table, min(most, chosen.wants + 1))
        return _stacked([(chosen, height)], options.columns, options.glyphs) if room - height >= 2 else []
    wanted = [panel for panel in every if panel.wants]
    space = room - max(TABLE_LEAST, min(table, room // 2))
    if options.columns >= TWO_COLUMNS:
        others = [panel for panel in wanted if panel.name != "reports"]
        most = max(space // 2, space - sum(panel.wants + 1 for panel in others))
        charts = [(panel, min(panel.wants + 1, most)) for panel in wanted if panel.name == "reports"]
        above = _stacked(charts, options.columns, options.glyphs)
        while above and not above[-1]:  # the others may need it
            above.pop()
        return above + _side_by_side(others, space - len(above), options)
    return _stacked(_shares(wanted, space), options.columns, options.glyphs)


def _shares(wanted: Sequence[_Panel], space: int) -> list[tuple[_Panel, int]]:
    """Return how many rows each panel gets, its title with it: the first ones first, each at least PANEL_LEAST."""
    chosen: list[_Panel] = []
    for panel in wanted:
        if sum(min(each.wants + 1, PANEL_LEAST) for each in (*chosen, panel)) <= space:
            chosen.append(panel)
    heights = {panel.name: min(panel.wants + 1, PANEL_LEAST) for panel in chosen}
    left = space - sum(heights.values())
    while left > 0:
        growing = [panel for panel in chosen if heights[panel.name] < panel.wants + 1]
        if not growing:
            break
        for panel in growing[:left]:
            heights[panel.name] += 1
            left -= 1
    return [(panel, heights[panel.name]) for panel in chosen]


def _stacked(shares: Sequence[tuple[_Panel, int]], columns: int, glyphs: Glyphs) -> list[Line]:
    """Return panels one below the other. Rows that one does not use are the next one's."""
    lines: list[Line] = []
    spare = 0
    for panel, height in shares:
        room = height - 1 + spare
        content = list(panel.make(room, columns, glyphs))[:room] or [((_NOTHING[panel.name], text.DIM),)]
        spare = room - len(content)
        lines += [text.rule(panel.title or panel.name, columns, glyphs), *content]
    return lines + [()] * spare


_NOTHING = {
    "error": "no task has failed",
    "reports": "no script has reported a number",
    "hosts": "no host is known yet",
    "store": "no metrics of a parameter server",
    "events": "nothing has happened since this view began",
}


def _side_by_side(wanted: Sequence[_Panel], space: int, options: Options) -> list[Line]:
    """Return panels in two columns."""
    left_names = ("hosts", "error")
    sides = [
        [panel for panel in wanted if panel.name in left_names],
        [panel for panel in wanted if panel.name not in left_names],
    ]
    if not all(sides):
        return _stacked(_shares(wanted, space), options.columns, options.glyphs)
    gap = f" {options.glyphs.bar} "
    width = (options.columns - len(gap)) // 2
    widths = (width, options.columns - len(gap) - width)
    both = [
        _stacked(_shares(side, space), columns, options.glyphs) for side, columns in zip(sides, widths, strict=True)
    ]
    return [
        (*text.padded(one, widths[0], options.glyphs.ellipsis), (gap, text.DIM), *other)
        for one, other in zip_longest(*both, fillvalue=())
    ]


# ---------------------------------------------------------------------- bottom, and texts


def _bottom(model: Model, look: ViewSelection, options: Options) -> list[Line]:
    lines: list[Line] = []
    if look.prompt == user.STOP:
        question = (f"stop job {model.job.id}? ", text.RED)
        lines.append((question, ("type yes and Enter; any other key: no  ", text.PLAIN), (look.typed, text.BOLD)))
    elif look.prompt == user.FILTER:
        lines.append((("filter: ", text.BOLD), (look.typed, text.PLAIN), ("_", text.DIM)))
    elif look.message:
        lines.append(((text.clean(look.message), text.YELLOW),))
    lines.append(((_keys(look, options), text.DIM),))
    return [_to_width(line, options) for line in lines]


def _keys(look: ViewSelection, options: Options) -> str:
    """Return the line of keys. Those for which there is no room are left out, the last ones first."""
    arrows = options.glyphs.arrows
    keys = {
        user.MAIN: [
            *("q quit", "? help", f"{arrows} Enter detail", "l log", "S stack", "x stop"),
            *("s sort", "/ filter", "f fold", "Tab panels", "p pause"),
        ],
        user.LOG: ["q back", f"{arrows} PgUp PgDn scroll", "End follow", "p pause", "S stack", "x stop"],
        user.HELP: ["q back", f"{arrows} scroll"],
    }.get(look.mode, ["q back", f"{arrows} scroll", "l log", "S stack", "x stop"])
    while len(keys) > 1 and text.width("  ".join(keys)) > options.columns:
        keys.pop()
    return "  ".join(keys)


def _text(model: Model, look: ViewSelection, options: Options, now: float, extra: TaskExtra) -> tuple[str, list[Line]]:
    """Return title and content of a view that is a text."""
    columns = options.columns
    if look.mode == user.HELP:
        wide = max(len(key) for key, _ in HELP)
        return "keys", [((f"  {key:{wide}}  ", text.BOLD), (what, text.PLAIN)) for key, what in HELP]
    if look.mode == user.DETAIL:
        return f"{look.chosen}", _detail(model, look, options, now)
    if look.mode == user.STACK:
        stack = [_short_path(text.clean(line), columns, options.glyphs) for line in extra.stack]
        return f"stack of {look.chosen}", [((line, text.PLAIN),) for line in stack]
    lines = [part for line in extra.log for part in text.wrapped(text.clean(line), columns)]
    return f"log of {look.chosen}", [((line, text.PLAIN),) for line in lines]


def _short_path(line: str, columns: int, glyphs: Glyphs) -> str:
    """Return a line of a stack with the end of its file's path, if that makes line and function visible."""
    found = _FRAME.fullmatch(line)
    if found is None or text.width(line) <= columns:
        return line
    before, path, after = found.groups()
    room = columns - text.width(before) - text.width(after) - len(glyphs.ellipsis)
    return line if room < len(path.rsplit("/", 1)[-1]) else f"{before}{glyphs.ellipsis}{path[-room:]}{after}"


def _detail(model: Model, look: ViewSelection, options: Options, now: float) -> list[Line]:
    columns = options.columns
    task = model.tasks.get(look.chosen)
    if task is None:
        return [(("there is no such task any more", text.DIM),)]
    since_s = since(model, now)
    quiet_s = None if task.quiet_s is None else task.quiet_s + since_s
    cpu = formats.percent(task.cpu)
    pairs = [
        ("state", task.word),
        ("why", text.clean(task.why)),
        ("host", task.host),
        ("pid", "" if task.pid is None else str(task.pid)),
        ("exit code" if task.code.isdigit() else "signal", task.code),
        ("up", formats.elapsed(task.uptime(now))),
        ("step", "" if task.step is None else f"{task.step}" + (f" of {task.total}" if task.total else "")),
        *((text.clean(name), formats.value(value)) for name, value in task.values.items()),
        ("cpu", f"{cpu} of one core" if cpu else ""),
        ("memory", formats.short_size(task.rss) + (f" of {formats.short_size(task.limit)}" if task.limit else "")),
        ("processes", "" if task.processes is None else str(task.processes)),
        ("disk", _both(task.read_s, task.write_s, "read", "written")),
        ("gpu", formats.percent(task.gpu)),
        ("gpu memory", formats.short_size(task.gpu_mem)),
        ("last line", "" if quiet_s is None or task.is_over else f"{formats.age(quiet_s)} ago"),
    ]
    wide = max(len(name) for name, value in pairs if value)
    lines: list[Line] = []
    for name, value in pairs:
        if not value:
            continue
        style = rows.style_of(value) if name == "state" else text.PLAIN
        first, *more = text.wrapped(value, max(20, columns - wide - 4))
        lines.append(((f"  {name:{wide}}  ", text.DIM), (first, style)))
        lines += [((" " * (wide + 4), text.PLAIN), (part, style)) for part in more]
    for name, trace in (("cpu", task.cpu_history), ("memory", task.rss_history)):
        chart = text.spark(trace, columns - wide - 4, options.glyphs)
        if chart.strip():
            lines.append(((f"  {name:{wide}}  ", text.DIM), (chart, text.CYAN), (f"  {TRACE_SPAN}", text.DIM)))
    host = model.hosts.get(task.host)
    for gpu in host.gpus if host is not None else ():
        memory = f"{formats.short_size(gpu.mem_used)}/{formats.short_size(gpu.mem_total)}"
        used = f"  gpu {gpu.index} of {task.host}: {formats.percent(gpu.util)} {memory} {gpu.name}"
        lines.append(((used, text.PLAIN),))
    mine = [event for event in model.events if task.name in event.tasks]
    if mine:
        lines += [(), (("  events", text.TITLE),)]
        lines += [(("  " + line[0][0], text.DIM), *line[1:]) for line in _event_lines(mine)]
    return lines


def _event_lines(found: Sequence[EventLine]) -> list[Line]:
    return [((time_of_day(each.time)[:8] + " ", text.DIM), (each.words, each.style)) for each in found]


def _both(one: float | None, other: float | None, first: str, second: str) -> str:
    if one is None and other is None:
        return ""
    return f"{formats.short_size(one or 0.0)}/s {first}, {formats.short_size(other or 0.0)}/s {second}"


def _to_width(line: Line, options: Options) -> Line:
    return text.cut(line, options.columns, options.glyphs.ellipsis)
