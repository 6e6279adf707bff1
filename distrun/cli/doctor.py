"""`distrun doctor`: check hosts before, or instead of, a launch."""

from __future__ import annotations

import locale
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from distrun import activation, formats
from distrun.cli.common import agree, engine_of, hosts_of, takes
from distrun.cli.console import print_err, print_json, print_out, render
from distrun.doctor.checks import BAD, HERE, OK, CheckRow, Ways
from distrun.errors import UsageError
from distrun.formats import grouped
from distrun.hosts.ranges import fold
from distrun.options import BY_KEY, HOSTS, LAUNCHER, SITE
from distrun.requesting import PYTHON, current_folder, typed
from distrun_runtime.contract import address, environ, facts

if TYPE_CHECKING:
    from distrun.backends.queue import QueueBackend
    from distrun.doctor.examine import DoctorReport, EnvironmentSpec, Made

SCHEMA = "distrun.doctor/1"
FOR_WORKERS = """\
The servers and the scheduler of `distrun launch` use it automatically; workers do not. If workers use the store, give
them a Python that has numpy and pyzmq, such as a virtual environment of your own: --activate venv:PATH.
"""

MARKS = {"ok": "✓", "warn": "!", "bad": "✗"}
ASCII_MARKS = {"ok": "ok", "warn": "!", "bad": "X"}
STYLES = {"ok": "green", "warn": "yellow", "bad": "red"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@takes(*HOSTS, LAUNCHER, *SITE)
@click.option("--sync-dst-dir", "dst", default="", metavar="DIR", help="Check that folder, as launch would use it.")
@takes(
    BY_KEY["python"]._replace(help="Python of the bundled servers. [default: python3]"),
    BY_KEY["activate"]._replace(help="venv:PATH, conda:ENV, module:NAME or shell text, as for launch. Repeatable."),
)
@click.option("--no-servers", is_flag=True, help="Do not check what bundled servers need.")
@takes(
    BY_KEY["interface"]._replace(help="Network interface for data."),
    BY_KEY["subnet"]._replace(help="Network for data."),
    BY_KEY["port_range"]._replace(help="Ports to try between the hosts. [default: any]"),
)
@click.option("--fix", "is_fixing", is_flag=True, help="Make what bundled servers need, where it is missing.")
@click.option("-y", "--yes", is_flag=True, help="With --fix: do not ask.")
@click.option("-q", "--quiet", is_flag=True, help="Show problems only.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with all facts.")
def doctor(**options: Any) -> int:
    """Check hosts: can they be reached, do they have what a job needs, do they reach each other?

    \b
    Examples:
      distrun doctor -H hosts
      distrun doctor -H hosts --sync-dst-dir '~/job' --port-range 40000-40100
      distrun doctor -H hosts --fix
      distrun doctor --launcher slurm

    Without hosts it checks this machine. Each ✗ ends with how to fix it. The exit code is 3 if there is a ✗, else 0.

    Nothing is changed anywhere without --fix. With it, each host whose Python lacks numpy or pyzmq gets a virtual
    environment with them, in the user's data folder there (~/.local/share/distrun). It is for the bundled servers only:
    they use it by themselves.
    """
    from distrun.doctor.checks import DoctorRequest
    from distrun.doctor.examine import examine, make

    env = environ.snapshot()
    if options["as_json"] and options["is_fixing"] and not options["yes"]:
        raise UsageError("--fix with --json does not ask", "add -y, or leave --json out")
    engine = engine_of(options["launcher"], options, env)
    if engine is not None:
        return _tell_engine(engine, options)
    inventory, backend, hosts = hosts_of(options, env, options["launcher"])
    dst = options["dst"] if backend.needs_hosts else ""
    python = options["python"] or ("" if backend.needs_hosts else sys.executable)
    reached = typed(options, inventory)
    activated = activation.folders(options["activate"])
    request = DoctorRequest(
        dst=dst,
        needs_servers=not options["no_servers"],
        count=len(hosts),
        activate=activation.script(options["activate"]),
        is_activated_later=activated is None or bool(activated),
        doctor=formats.join(["distrun", "doctor", *reached, *typed(options, None, PYTHON)]),
        cwd="" if dst else current_folder(),
        interface=options["interface"] or environ.text("DMLC_INTERFACE", env),
        subnet=options["subnet"],
        port_range=options["port_range"],
        pythons={spec.name: spec.python or python for spec in inventory.specs},
        workdirs={spec.name: spec.workdir for spec in inventory.specs},
        gpus={spec.name: spec.gpus for spec in inventory.specs},
        where=inventory.where,
    )
    report = examine(backend, hosts, request)
    ways = Ways({host.name: host for host in hosts}, formats.join(["distrun", "exec", *reached]))
    if not options["as_json"]:
        print_out(table(report.rows, marks(), ways, options["quiet"]))
        print_out(f"{summary(report.rows, len(hosts))}\n")
    made: list[Made] = []
    if options["is_fixing"]:
        wanted = _agreed(report, options)
        if wanted:
            made = make(
                backend, hosts, wanted, activate=request.activate, say=lambda host, line: print_err(f"{host}: {line}\n")
            )
        _tell_made(made, ways, options["as_json"])
    fixed = {each.host for each in made if each.is_made}
    bad = [row for row in report.rows if row.mark == "bad"]
    code = facts.EXIT_PREFLIGHT if any(row.check != "server python" or row.host not in fixed for row in bad) else 0
    if options["as_json"]:
        rows = [{**asdict(row), "fix": row.fix_text(ways)} for row in report.rows]
        told = [{**asdict(each), "fix": _fix_text(each, [each.host], ways)} for each in made]
        more = {"made": told} if options["is_fixing"] else {}
        print_json(SCHEMA, exit_code=code, rows=rows, facts=report.facts, **more)
    return code


def _tell_engine(engine: QueueBackend, options: Mapping[str, Any]) -> int:
    """Say what is there of what a launch by an engine needs; return the exit code."""
    if options["is_fixing"]:
        raise UsageError(
            f"--fix is not for --launcher {engine.name}: it makes environments on hosts that ssh reaches",
            "make one where the nodes see it, and launch with it:  python3 -m venv ~/venv && ~/venv/bin/pip install"
            " numpy pyzmq; then --activate venv:~/venv",
        )
    found = engine_rows(engine)
    bad = sum(row.mark == "bad" for row in found)
    code = facts.EXIT_PREFLIGHT if bad else 0
    if options["as_json"]:
        print_json(SCHEMA, exit_code=code, rows=[asdict(row) for row in found], facts={})
        return code
    print_out(table(found, marks(), Ways(), options["quiet"]))
    print_out(f"{bad} problem{'' if bad == 1 else 's'} with {engine.name}\n" if bad else f"{engine.name} OK\n")
    return code


def engine_rows(backend: QueueBackend) -> list[CheckRow]:
    """Return what is there of what a launch by an engine needs."""
    from distrun.backends.engine import examined

    found = [
        CheckRow(HERE, backend.name, OK, each.text)
        if each.ok
        else CheckRow(HERE, backend.name, BAD, each.text, each.fix or f"see docs/{backend.name}.md")
        for each in examined(backend.engine)
    ]
    own = address.own()
    text = f"agents reach this machine at {', '.join(own)}" if own else "this machine has no address but its own"
    fix = "" if own else "--coordinator-address A, an address at which the nodes reach it"
    return [*found, CheckRow(HERE, "coordinator", OK if own else BAD, text, fix)]


def _agreed(report: DoctorReport, options: Mapping[str, Any]) -> list[EnvironmentSpec]:
    """Return the environments that are missing, if the user agrees that they are made."""
    from distrun.doctor import examine

    wanted = [] if options["no_servers"] else examine.wanted(report.examined)
    say = print_err if options["as_json"] else print_out
    if not wanted:
        say("nothing to make: no host that was reached lacks only numpy or pyzmq for servers\n")
        return []
    for line in examine.told(wanted):
        say(f"to do on {line}\n")
    agree(
        f"Make {'this environment' if len(wanted) == 1 else f'these {len(wanted)} environments'}?",
        options["yes"],
        "look first: leave --fix out",
    )
    return wanted


def _tell_made(made: Sequence[Made], ways: Ways, as_json: bool) -> None:
    say = print_err if as_json else print_out
    for group in grouped(((each.text, each.is_made, each.fix, each.script), each) for each in made).values():
        each, names = group[0], [one.host for one in group]
        say(f"{'' if each.is_made else 'NOT '}made on {fold(names)}: {each.text}\n")
        say("".join(f"  fix: {line}\n" for line in _fix_text(each, names, ways).splitlines()))
    if any(each.is_made for each in made):
        say(FOR_WORKERS)


def _fix_text(made: Made, names: Sequence[str], ways: Ways) -> str:
    return CheckRow("", "", "", "", made.fix, made.script).fix_text(ways, names)


def marks() -> dict[str, str]:
    """Return the marks that this terminal's encoding can show."""
    try:
        "".join(MARKS.values()).encode(locale.getpreferredencoding(False))
    except (UnicodeEncodeError, LookupError):
        return ASCII_MARKS
    return MARKS


def table(rows: Sequence[CheckRow], signs: dict[str, str], ways: Ways, quiet: bool = False) -> str:
    """Return the rows as text, those of several hosts folded."""
    from rich.markup import escape
    from rich.table import Table

    from distrun.doctor.checks import HERE, folded

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "CHECK", "HOSTS"):
        shown.add_column(heading, no_wrap=True)
    shown.add_column("FOUND", overflow="fold")
    groups = [group for group in folded(rows) if group[0].mark != "ok" or not quiet]
    for row, names in groups:
        where = "" if names == [HERE] else fold(names) if any(names) else "all"
        lines = row.fix_text(ways, names).splitlines()
        found = escape(row.text) + "".join(f"\n[bold]fix:[/] {escape(line)}" for line in lines)
        shown.add_row(f"[{STYLES[row.mark]}]{signs[row.mark]}[/]", row.check, escape(where), found)
    return render(shown) if groups else ""


def summary(rows: Sequence[CheckRow], hosts: int) -> str:
    """Return the last line."""
    bad = {row.host for row in rows if row.mark == "bad"}
    count = sum(row.mark == "bad" for row in rows)
    warnings = sum(row.mark == "warn" for row in rows)
    more = f", {warnings} warning{'' if warnings == 1 else 's'}" if warnings else ""
    if not bad:
        return f"{hosts} host{'' if hosts == 1 else 's'} OK{more}"
    return f"{count} problem{'' if count == 1 else 's'} on {len(bad)} of {hosts} hosts{more}"
