"""The panels below the table: hosts, store, events, and the end of the log of the first error.

No side effects. Each function returns the lines of a panel for a given width. The most important lines come first,
because a panel that has too little room is cut at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from distrun import units
from distrun.dashboard import rows, text
from distrun.dashboard.model import Host, Model, Server
from distrun.dashboard.text import Glyphs, Line
from distrun_runtime.contract.duration import time_of_day

SPARKLINE = 24
"""Columns of a chart in the store's panel."""


def hosts(model: Model, wanted: str, is_folded: bool, columns: int, glyphs: Glyphs, *, since_s: float) -> list[Line]:
    """Return the table of hosts. `since_s`: age of the metrics, seconds."""
    groups = rows.hosts(model.hosts.values(), wanted, is_folded)
    table: list[tuple[str, ...]] = [
        ("HOST", "STATE", "HEARD", "CPU", "LOAD", "MEM", "DISK FREE", "NET IN", "NET OUT", "GPU", "CLOCK")
    ]
    table += [_host_cells(group, since_s) for group in groups]
    styles = [text.BOLD, *(_host_style(group[0]) for group in groups)]
    return _aligned(table, styles, columns, glyphs, left=(0, 1), dispensable=(10, 8, 7, 2, 4, 6))


def _host_style(host: Host) -> str:
    return {"lost": text.RED, "silent": text.YELLOW}.get(host.word, text.PLAIN)


def _host_cells(group: Sequence[Host], since_s: float) -> tuple[str, ...]:
    first = group[0]
    name = first.name if len(group) == 1 else rows.folded(tuple(host.name for host in group))
    word = first.word if len(group) == 1 or not first.word else f"{len(group)} {first.word}"
    heard_s = max((host.heard_s for host in group if host.heard_s is not None), default=None)
    load = _mean([host.load for host in group])
    gpus = [gpu.util for host in group for gpu in host.gpus if gpu.util is not None]
    offset_s = max((host.offset_s for host in group if host.offset_s is not None), key=abs, default=None)
    return (
        text.clean(name),
        word,
        "" if heard_s is None else units.age(heard_s + since_s),
        units.percent(_mean([host.cpu for host in group])),
        "" if load is None else f"{load:.1f}",
        _part(_sum([host.mem_used for host in group]), _sum([host.mem_total for host in group])),
        units.short_size(min((host.disk_free for host in group if host.disk_free is not None), default=None)),
        _per_s(_sum([host.net_rx for host in group])),
        _per_s(_sum([host.net_tx for host in group])),
        "" if not gpus else f"{len(gpus)}x {units.percent(sum(gpus) / len(gpus))}",
        "" if offset_s is None else f"{round(offset_s, 1) + 0.0:+.1f}s",  # never -0.0
    )


def store(model: Model, columns: int, glyphs: Glyphs, room: int) -> list[Line]:
    """Return the store's panel: totals with charts, then a line for each server. `room`: lines."""
    found = model.store
    if found is None:
        return []
    slowest = found.slowest
    rates = [
        ("push/s", _rate(found.push_s), "push_s"),
        ("pull/s", _rate(found.pull_s), "pull_s"),
        ("queue", _rate(found.queue), "queue"),
        ("staleness", _rate(found.staleness), "staleness"),
        ("lag", f"{slowest[1]:.2f}s {_rank(slowest[0])}" if slowest else "", "lag"),
    ]
    cell = max(24, min(columns, 96) // 3)
    charts: list[Line] = []
    for name, value, key in rates:
        if not value:
            continue
        trace = model.history.get(key) or ()
        trace = trace if len(trace) > 1 else model.traces.get(key, ())
        head = f"{name} {value} "
        chart = text.spark(trace, max(0, min(SPARKLINE, cell - 1 - text.width(head))), glyphs)
        charts.append(text.padded(((name, text.DIM), (f" {value} ", text.BOLD), (chart, text.CYAN)), cell))
    per_line = max(1, columns // cell)
    lines: list[Line] = [
        text.cut(tuple(span for chart in charts[at : at + per_line] for span in chart), columns, glyphs.ellipsis)
        for at in range(0, len(charts), per_line)
    ]
    more = []
    if found.barriers is not None:
        more.append(f"barriers {found.barriers}")
    if found.barrier_waiting:
        more.append(f"a barrier waits for {found.barrier_waiting}")
    if found.round_s is not None:
        more.append(f"rounds/s {_rate(found.round_s)}")
    table: list[tuple[str, ...]] = [
        ("SERVER", "KEYS", "SIZE", "PUSH/S", "PULL/S", "IN", "OUT", "QUEUE", "WAITING", "STALE", "LAST RANK", "DEVICE")
    ]
    table += [_server_cells(server) for server in found.servers]
    styles = [text.BOLD, *([text.PLAIN] * len(found.servers))]
    if room - len(lines) < 2:
        return lines  # a heading alone says nothing
    lines += _aligned(table, styles, columns, glyphs, left=(0, 10, 11), dispensable=(6, 5, 1, 11, 9, 8, 2))
    if more:
        lines.append((("  ".join(more), text.DIM),))
    return lines


def _server_cells(server: Server) -> tuple[str, ...]:
    last = max(server.lags.items(), key=lambda item: item[1], default=None)
    return (
        server.name,
        str(server.keys if server.keys is not None else ""),
        units.short_size(server.size),
        _rate(server.push_s),
        _rate(server.pull_s),
        _per_s(server.in_s),
        _per_s(server.out_s),
        "" if server.queue is None else str(server.queue),
        "" if server.waiting is None else str(server.waiting),
        _rate(server.staleness_max),
        "" if last is None or last[1] <= 0 else f"{_rank(last[0])} +{last[1]:.2f}s",
        server.device,
    )


def _rank(rank: str) -> str:
    return f"worker-{rank}" if rank.isdigit() else rank


def events(model: Model, room: int, columns: int, glyphs: Glyphs) -> list[Line]:
    """Return the last events, the newest at the end, as many as there is room for."""
    return [
        text.cut(((time_of_day(event.time)[:8] + " ", text.DIM), (event.words, event.style)), columns, glyphs.ellipsis)
        for event in model.events[-room:]
    ]


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


def _aligned(
    table: Sequence[Sequence[str]],
    styles: Sequence[str],
    columns: int,
    glyphs: Glyphs,
    *,
    left: Sequence[int],
    dispensable: Sequence[int],
) -> list[Line]:
    """Return a table whose columns are as wide as they need. What is empty, or for what there is no room, is left out.

    Args:
        table: the headings, then the rows.
        styles: of each row.
        left: columns that are aligned at their left.
        dispensable: columns in the order in which they are left out.
    """
    shown = [at for at in range(len(table[0])) if at in left[:1] or any(row[at] for row in table[1:])]
    widths = [max(text.width(row[at]) for row in table) for at in range(len(table[0]))]
    for at in dispensable:
        if sum(widths[each] + 2 for each in shown) - 2 > columns and at in shown:
            shown.remove(at)
    widths[0] = min(widths[0], max(12, columns - sum(widths[each] + 2 for each in shown[1:])))
    lines = []
    for row, style in zip(table, styles, strict=True):
        cells = [(text.fit if at in left else text.right)(row[at], widths[at], glyphs.ellipsis) for at in shown]
        lines.append(text.cut((("  ".join(cells).rstrip(), style),), columns, glyphs.ellipsis))
    return lines


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _part(used: float | None, total: float | None) -> str:
    return (
        ""
        if used is None
        else units.short_size(used)
        if total is None
        else f"{units.short_size(used)}/{units.short_size(total)}"
    )


def _per_s(value: float | None) -> str:
    return "" if value is None else f"{units.short_size(value)}/s"


def _rate(value: float | None) -> str:
    """Return how many a second, below a heading that says so."""
    return units.per_second(value).removesuffix("/s")
