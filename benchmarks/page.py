"""docs/benchmarks.md: each benchmark writes a section of its own, and leaves the others as they are."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "benchmarks.md"
TITLE = """\
<!-- Each section is written by the program that it names, with `--write`. Do not edit this page. -->

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
    """Put the section into docs/benchmarks.md."""
    old = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
    TARGET.write_text(with_section(old, heading, body), encoding="utf-8")


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
