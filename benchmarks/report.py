"""docs/benchmarks.md: each benchmark writes a section of its own, and leaves the others as they are.

    python benchmarks/report.py     # draws the charts of docs/benchmarks anew, from the tables of the page

A table of times by work and system, whose first columns are `work` and `distrun`, gets a chart beside it. Two charts
at the top, `peers.svg` and `peers-small.svg`, compare distrun with MXNet, gloo and Open MPI by the ratios of several
tables.
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

These numbers are here so that a change can be compared. They promise no speed. The two charts show the ratios to MXNet,
gloo and Open MPI from the tables below. If a library was measured in several ways, the chart shows the fastest one.

![distrun's time divided by that of MXNet, gloo and Open MPI, in rounds of whole models](benchmarks/peers.svg)

![The same for small rounds](benchmarks/peers-small.svg)
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
    page = with_section(old, heading, charted(heading, body))
    TARGET.write_text(page, encoding="utf-8")
    draw_peers(page)


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
RATIO_WIDTH, RATIO_LABEL = 600, 170
"""Pixels: the chart, the names at its left, a bar, and the space between two works."""
STYLE = """\
<style>
text { fill: #1f2328; } .end { text-anchor: end; } .middle { text-anchor: middle; } .bold { font-weight: bold; }
.page { fill: #ffffff; } .line { stroke: #1f2328; } .grid { stroke: #d8dee4; } .range { stroke: #57606a; }
.distrun { fill: #0969da; } .other { fill: #b9c3c9; }
.MXNet { fill: #bf8700; } .gloo { fill: #0969da; } .MPI { fill: #8250df; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; } .page { fill: #0d1117; } .line { stroke: #f0f6fc; } .grid { stroke: #30363d; }
  .range { stroke: #9198a1; } .distrun { fill: #4493f8; } .other { fill: #656c76; }
  .MXNet { fill: #d29922; } .gloo { fill: #4493f8; } .MPI { fill: #ab7df8; }
}
</style>
<rect class="page" width="100%" height="100%"/>"""


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
        drawn.append(words(8, y + BAR - 3, row.work, "bold"))
        for name, time_ms in row.times_ms.items():
            kind = "distrun" if name == "distrun" else "other"
            drawn.append(words(LABEL - 6, y + BAR - 3, name, "end"))
            drawn.append(bar(LABEL, y + 1, max(place(time_ms), 1), BAR - 2, kind))
            drawn.append(words(LABEL + place(time_ms) + 4, y + BAR - 3, "%g ms" % time_ms))
            y += BAR
        y += GAP
    return image("%s: milliseconds, logarithmic; shorter is faster" % heading, WIDTH, y, 10, drawn)


def image(title: str, width: int, height: int, font: int, drawn: list[str]) -> str:
    """Return an SVG image with its title at the top, for light and dark pages."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" font-family="sans-serif"' % (
        width,
        height,
        WIDTH,
    )
    head += ' font-size="%d">\n<title>%s</title>\n%s' % (font, html.escape(title), STYLE)
    return "\n".join([head, words(8, font + 6, title, "bold"), *drawn, "</svg>"]) + "\n"


def words(x: float, y: float, text: str, kind: str = "") -> str:
    """Return an element of SVG: text."""
    return '<text x="%.1f" y="%.1f" class="%s">%s</text>' % (x, y, kind, html.escape(text))


def bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return an element of SVG: a bar."""
    return '<rect x="%.1f" y="%.1f" width="%.1f" height="%d" class="%s"/>' % (x, y, width, height, kind)


# distrun beside others

PEERS = {
    "mxnet": "MXNet",
    "gloo": "gloo",
    "gloo-bucket": "gloo",
    "mpi": "MPI",
    "mpi-bucket": "MPI",
    "DistributedOptimizer": "gloo",
}
"""The columns whose ratios are shown, and the library that is measured there."""
LIBRARIES = tuple(dict.fromkeys(PEERS.values()))
COMPARED = {
    "peers": {
        "A round of push and pull": "A round of push and pull, one machine",
        "A round between 2 hosts": "A round between 2 hosts",
        "A round between 4 hosts": "A round between 4 hosts",
        "A step of torch": "A step of torch with DistributedOptimizer; gloo: with DDP",
    },
    "peers-small": {
        "A small round": "A small round, one machine",
        "A small round between 2 hosts": "A small round between 2 hosts",
    },
}
"""For each chart, the sections whose tables are compared, and their titles in it."""


@dataclass(frozen=True)
class Ratio:
    """distrun's time divided by that of another library: the median of the runs, the least and the greatest."""

    median: float
    least: float
    most: float


def ratios_of(text: str) -> dict[str, dict[str, Ratio]]:
    """Return the ratios in the tables of a section by work and library: to the fastest variant of each library."""
    found: dict[str, dict[str, Ratio]] = {}
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    for work, *cells in lines[2:]:
        for column, cell in zip(lines[0][1:], cells, strict=True):
            parts = re.search(r"\(([0-9.]+), ([0-9.]+)-([0-9.]+)\)", cell)
            if column in PEERS and parts:
                ratio = Ratio(*map(float, parts.groups()))
                of_work = found.setdefault(work, {})
                of_work[PEERS[column]] = max(ratio, of_work.get(PEERS[column], ratio), key=lambda each: each.median)
    return {work: {name: ratios[name] for name in LIBRARIES if name in ratios} for work, ratios in found.items()}


def draw_peers(page: str) -> None:
    """Write the charts of distrun beside other libraries, from the tables of the page."""
    sections = dict(part.partition("\n")[::2] for part in page.split("\n## ")[1:])
    CHARTS.mkdir(exist_ok=True)
    for chart_name, titles in COMPARED.items():
        found = {title: ratios_of(sections[name]) for name, title in titles.items() if name in sections}
        (CHARTS / (chart_name + ".svg")).write_text(peers_chart(found), encoding="utf-8")


TICKS = (0.01, 0.1, 0.5, 1, 2, 10)


def peers_chart(found: dict[str, dict[str, dict[str, Ratio]]]) -> str:
    """Return an SVG image: a bar for each ratio, from the line at 1 to the left where distrun is faster, else right.

    Args:
        found: by title of a group, work and library.
    """
    every = [ratio for works in found.values() for ratios in works.values() for ratio in ratios.values()]
    low, high = min([0.5, *(each.least for each in every)]) * 0.9, max([2.0, *(each.most for each in every)]) * 1.1
    scale = (RATIO_WIDTH - RATIO_LABEL - 8) / math.log(high / low)

    def place(ratio: float) -> float:
        return RATIO_LABEL + scale * math.log(ratio / low)

    one, y = place(1), 84.0
    drawn: list[str] = []
    for title, works in found.items():
        drawn.append(words(8, y + 10, title, "bold"))
        y += 18
        for work, ratios in works.items():
            drawn.append(words(RATIO_LABEL - 8, y + 4 + 4.5 * len(ratios), work, "end"))
            for name, ratio in ratios.items():
                at = place(ratio.median)
                drawn.append(bar(min(at, one), y, max(abs(at - one), 1), 8, name))
                drawn.append(line(place(ratio.least), y + 4, place(ratio.most), y + 4, "range"))
                y += 9
            y += 7
        y += 5
    head = [words(one - 6, 62, "\u2190 distrun is faster", "end"), words(one + 6, 62, "slower \u2192")]
    for at, name in enumerate(LIBRARIES):
        head += [bar(8 + 80 * at, 32, 10, 10, name), words(22 + 80 * at, 41, {"MPI": "Open MPI"}.get(name, name))]
    head.append(words(270, 41, "thin lines: range of the runs"))
    for tick in (each for each in TICKS if low < each < high):
        head.append(words(place(tick), 78, "%g" % tick, "middle"))
        head.append(line(place(tick), 82, place(tick), y, "line" if tick == 1 else "grid"))
    return image("distrun's time divided by that of other libraries", RATIO_WIDTH, int(y), 12, [*head, *drawn])


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return an element of SVG: a line."""
    return '<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" class="%s"/>' % (x1, y1, x2, y2, kind)


def main() -> None:
    """Draw all charts of the page anew."""
    page = TARGET.read_text(encoding="utf-8")
    for part in page.split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        page = with_section(page, heading, charted(heading, body))
    TARGET.write_text(page, encoding="utf-8")
    draw_peers(page)


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
