"""docs/benchmarks.md: each benchmark writes a section of its own, and leaves the others as they are.

    python benchmarks/report.py     # draws the charts of docs/benchmarks anew, from the tables of the page

A table of times by work and system, whose first columns are `work` and `distrun`, gets a chart beside it.
"""

from __future__ import annotations

import datetime
import html
import math
import os
import platform
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "benchmarks.md"
CHARTS = TARGET.with_suffix("")
"""The folder of the charts."""
TITLE = """\
<!-- Each section that names a program is written by it, with `--write`. Do not edit those. -->

# Benchmarks

These numbers are here so that a change can be compared. They promise no speed.
"""


def with_section(page: str, heading: str, body: str) -> str:
    """Return the page with this section in place of the one of that heading, or at the end. Pure."""
    new = "## %s\n\n%s\n" % (heading, body.strip("\n"))
    parts = page.split("\n## ")
    sections = [part.strip("\n") + "\n" for part in parts[1:]]
    headings = [section.partition("\n")[0] for section in sections]
    texts = ["## " + section for section in sections]
    if heading in headings:
        texts[headings.index(heading)] = new
    else:
        texts.append(new)
    return "\n".join([TITLE, *texts])


def write(heading: str, body: str) -> None:
    """Put the section into docs/benchmarks.md, with a chart of each table of times."""
    old = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
    TARGET.write_text(with_section(old, heading, charted(heading, body)), encoding="utf-8")


# Charts


@dataclass(frozen=True)
class Row:
    """A row of a table of times: milliseconds by system, without those that failed or do not have such work."""

    work: str
    times_ms: dict[str, float]


def charted(heading: str, body: str) -> str:
    """Draw the tables of times of a section, and return it with their charts behind them."""
    body = re.sub(r"\n!\[[^]]*\]\(%s/[^)]*\)\n" % CHARTS.name, "", body)
    parts = re.split(r"((?:^\|.*\n?)+)", body, flags=re.MULTILINE)
    number = 0
    for at, part in enumerate(parts):
        rows = times_of(part)
        if not rows:
            continue
        number += 1
        name = "%s%s.svg" % (slug(heading), "-%d" % number if number > 1 else "")
        CHARTS.mkdir(exist_ok=True)
        (CHARTS / name).write_text(chart(heading, rows), encoding="utf-8")
        parts[at] = "%s\n\n![%s](%s/%s)\n" % (part.rstrip("\n"), heading, CHARTS.name, name)
    return "".join(parts)


def times_of(text: str) -> list[Row]:
    """Return the rows of a table in Markdown whose first columns are `work` and `distrun`; of other text, none."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    if len(lines) < 3 or lines[0][:2] != ["work", "distrun"]:
        return []
    rows = []
    for work, *cells in lines[2:]:
        found = {name: re.match(r"[0-9.]+", cell) for name, cell in zip(lines[0][1:], cells, strict=True)}
        rows.append(Row(work, {name: float(each[0]) for name, each in found.items() if each}))
    return rows


def slug(heading: str) -> str:
    """Return a heading as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


WIDTH, LABEL, BAR, GAP = 760, 200, 13, 10
"""Pixels: the chart, the names at its left, a bar, and the space between two works."""
OURS, OTHERS = "#1f6f8b", "#b9c3c9"


def chart(heading: str, rows: list[Row]) -> str:
    """Return an SVG image: a bar for each time, on a logarithmic scale, as works differ by orders of magnitude."""
    times = [each for row in rows for each in row.times_ms.values() if each > 0]
    low, high = 10 ** math.floor(math.log10(min(times))), max(times)
    span = math.log10(high / low) or 1.0
    room = WIDTH - LABEL - 70

    def place(time_ms: float) -> float:
        return room * math.log10(max(time_ms, low) / low) / span

    drawn: list[str] = []
    y = 30
    for row in rows:
        drawn.append('<text x="8" y="%d" font-weight="bold">%s</text>' % (y + BAR - 3, html.escape(row.work)))
        for name, time_ms in row.times_ms.items():
            color = OURS if name == "distrun" else OTHERS
            drawn.append(
                '<text x="%d" y="%d" text-anchor="end">%s</text>' % (LABEL - 6, y + BAR - 3, html.escape(name))
            )
            drawn.append(
                '<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>'
                % (LABEL, y + 1, max(place(time_ms), 1), BAR - 2, color)
            )
            drawn.append('<text x="%.1f" y="%d">%g ms</text>' % (LABEL + place(time_ms) + 4, y + BAR - 3, time_ms))
            y += BAR
        y += GAP
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="10">'
        '<rect width="100%%" height="100%%" fill="white"/><text x="8" y="16" font-size="12">%s: milliseconds,'
        " logarithmic; shorter is faster</text>" % (WIDTH, y, html.escape(heading))
    )
    return "\n".join([head, *drawn, "</svg>"]) + "\n"


def main() -> None:
    """Draw all charts of the page anew."""
    page = TARGET.read_text(encoding="utf-8")
    for part in page.split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        page = with_section(page, heading, charted(heading, body))
    TARGET.write_text(page, encoding="utf-8")


# Sections


def circumstances(script: str, *hidden: str) -> str:
    """Return the lines that say how and where it was measured: command, date, version, machine.

    Args:
        script: the program's name in benchmarks/.
        hidden: options that matter on this machine only; left out with their values.
    """
    from distrun import __version__

    shown = shlex.join(["python", "benchmarks/" + script, *without(sys.argv[1:], *hidden)])
    today = datetime.date.today().isoformat()
    return "* Command: `%s`\n* Date: %s; distrun %s\n* Machine: %s" % (shown, today, __version__, machine())


def machine() -> str:
    """Return the machine in words: cores, processor, kernel, Python."""
    processor = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return "%s cores (%s), %s, Python %s" % (
        os.cpu_count(),
        processor,
        platform.system() + " " + platform.release(),
        platform.python_version(),
    )


def without(arguments: list[str], *options: str) -> list[str]:
    """Return the arguments without these options and their values."""
    hidden = {at + more for at, word in enumerate(arguments) if word in options for more in (0, 1)}
    return [word for at, word in enumerate(arguments) if at not in hidden]


if __name__ == "__main__":
    main()
