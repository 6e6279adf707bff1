"""`distrun doctor`: check hosts before, or instead of, a launch."""

from __future__ import annotations

import json
import locale
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from distrun.cli.console import print_err, print_out, render
from distrun.cli.folder import current_folder
from distrun.cli.options import LauncherOption
from distrun.cli.reach import host_options, hosts_of
from distrun_runtime.contract import environ

if TYPE_CHECKING:
    from distrun.doctor.row import Row

SCHEMA = "distrun.doctor/1"
EXIT_BAD = 3

MARKS = {"ok": "✓", "warn": "!", "bad": "✗"}
ASCII_MARKS = {"ok": "ok", "warn": "!", "bad": "X"}
STYLES = {"ok": "green", "warn": "yellow", "bad": "red"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@host_options
@click.option("--launcher", "--backend", "launcher", default="", metavar="NAME", cls=LauncherOption)
@click.option("--sync-dst-dir", "dst", default="", metavar="DIR", help="Check that folder, as launch would use it.")
@click.option("--python", default="", metavar="PATH", help="Python of the bundled servers. [default: python3]")
@click.option("--no-servers", is_flag=True, help="Do not check what bundled servers need.")
@click.option("--interface", default="", metavar="NAME", help="Network interface for data.")
@click.option("--subnet", default="", metavar="CIDR", help="Network for data.")
@click.option("--port-range", default="", metavar="A-B", help="Ports to try between the hosts. [default: any]")
@click.option("-q", "--quiet", is_flag=True, help="Show only what is not in order.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with all facts.")
def doctor(**options: Any) -> int:
    """Check hosts: can they be reached, have they what a job needs, do they reach each other?

    \b
    Examples:
      distrun doctor -H hosts
      distrun doctor -H hosts --sync-dst-dir '~/job' --port-range 40000-40100

    Without hosts it checks this machine. Nothing is changed anywhere. Each ✗ ends with what mends it. The exit code is
    3 if there is a ✗, else 0.
    """
    from distrun.doctor.checks import Wish
    from distrun.doctor.examine import Request, examine

    env = environ.snapshot()
    inventory, backend, hosts = hosts_of(options, env, options["launcher"])
    for warning in inventory.warnings:
        print_err("distrun: warning: %s\n" % warning)
    dst = options["dst"] if backend.needs_hosts else ""
    python = options["python"] or ("" if backend.needs_hosts else sys.executable)
    request = Request(
        Wish(dst=dst, needs_servers=not options["no_servers"], count=len(hosts)),
        cwd="" if dst else current_folder(),
        interface=options["interface"] or environ.text("DMLC_INTERFACE", env),
        subnet=options["subnet"],
        port_range=options["port_range"],
        pythons={spec.name: spec.python or python for spec in inventory.specs},
        workdirs={spec.name: spec.workdir for spec in inventory.specs},
    )
    report = examine(backend, hosts, request)
    code = EXIT_BAD if any(row.mark == "bad" for row in report.rows) else 0
    if options["as_json"]:
        rows = [{**asdict(row), "fix": row.mend()} for row in report.rows]
        told = {"schema": SCHEMA, "exit_code": code, "rows": rows, "facts": report.facts}
        print_out(json.dumps(told, indent=2, default=dict) + "\n")
        return code
    print_out(table(report.rows, marks(), options["quiet"]))
    print_out("%s\n" % summary(report.rows, len(hosts)))
    return code


def marks() -> dict[str, str]:
    """Return the marks that this terminal's encoding can show."""
    try:
        "".join(MARKS.values()).encode(locale.getpreferredencoding(False))
    except (UnicodeEncodeError, LookupError):
        return ASCII_MARKS
    return MARKS


def table(rows: Sequence[Row], signs: dict[str, str], quiet: bool = False) -> str:
    """Return the rows as text, those of several hosts folded."""
    from rich.markup import escape
    from rich.table import Table

    from distrun.doctor.row import HERE, folded
    from distrun.hosts import fold

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "CHECK", "HOSTS"):
        shown.add_column(heading, no_wrap=True)
    shown.add_column("FOUND", overflow="fold")
    groups = [group for group in folded(rows) if group[0].mark != "ok" or not quiet]
    for row, names in groups:
        where = "" if names == [HERE] else fold(names) if any(names) else "all"
        found = escape(row.text) + ("\n[bold]mend:[/] %s" % escape(row.mend(names)) if row.fix else "")
        shown.add_row("[%s]%s[/]" % (STYLES[row.mark], signs[row.mark]), row.check, escape(where), found)
    return render(shown) if groups else ""


def summary(rows: Sequence[Row], hosts: int) -> str:
    """Return the last line. Pure."""
    bad = {row.host for row in rows if row.mark == "bad"}
    count = sum(row.mark == "bad" for row in rows)
    remarks = sum(row.mark == "warn" for row in rows)
    more = ", %d remark%s" % (remarks, "" if remarks == 1 else "s") if remarks else ""
    if not bad:
        return "%d host%s in order%s" % (hosts, " is" if hosts == 1 else "s are", more)
    return "%d fault%s on %d of %d hosts%s" % (count, "" if count == 1 else "s", len(bad), hosts, more)
