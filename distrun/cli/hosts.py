"""`distrun hosts`: show what a hosts file, a list or the environment says; fold and expand node lists."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from distrun.cli.console import print_err, print_json, print_out, render
from distrun.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from distrun.hosts import HostSpec, Inventory

SCHEMA = "distrun.hosts/1"
OTHERS = ("labels", "python", "workdir", "identity", "jump")
"""Members that are shown in one column."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("what", metavar="[FILE]...", nargs=-1)
@click.option("--hosts", "listed", metavar="A,B", help="A list of hosts, instead of a file.")
@click.option(
    "--hostfile-format",
    "form",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="Format of the file: auto, dmlc, mpich, horovod or sge.",
)
@click.option("--fold", "way", flag_value="fold", default="", help="Print node lists NODES... as one, folded.")
@click.option("--expand", "way", flag_value="expand", default="", help="Print the names of node lists, one a line.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def hosts(what: tuple[str, ...], listed: str | None, form: str, way: str, as_json: bool) -> int:
    """Show how distrun reads FILE (`-`: stdin), --hosts, or the environment if neither is given.

    All errors of a file are shown at once; the exit code is 2 then. With --fold or --expand the arguments are node
    lists, not files; `-` reads them from stdin.

    \b
    Examples:
      distrun hosts hosts
      distrun hosts --expand 'gpu[01-04],x1'
      sort -u names | distrun hosts --fold -
    """
    if way:
        if listed is not None or as_json or not what:
            raise UsageError(f"--{way} takes node lists, and no other option", f"distrun hosts --{way} 'gpu[1-4]'")
        print_out(_nodes(what, way))
        return 0
    if len(what) > 1:
        raise UsageError(f"expected one hosts file, found {len(what)}: {', '.join(what)}")
    found = _find(what[0] if what else None, listed, form)
    if as_json:
        print_json(SCHEMA, **as_object(found))
        return 0
    for warning in found.warnings:
        print_err(f"distrun: warning: {warning}\n")
    print_out(render(table(found)))
    print_out(f"\nfrom      {found.source}\n{_forms(found)}")
    return 0


def _find(path: str | None, listed: str | None, form: str) -> Inventory:
    from distrun.hosts.parse import VARIABLES, find
    from distrun_runtime.contract import environ

    found = find(path, listed, environ.snapshot(), form=form)
    if found is None:
        raise UsageError("no hosts are given", f"name a FILE, --hosts A,B, or set {', '.join(VARIABLES)}")
    return found


def _nodes(lists: Sequence[str], way: str) -> str:
    from distrun.hosts.ranges import expand, fold

    # One line for each, so that an error's place is the argument's.
    text = "\n".join(sys.stdin.buffer.read().decode("utf-8", "replace") if each == "-" else each for each in lists)
    names = expand(text)
    if way == "fold":
        return fold(names) + "\n"
    return "".join(name + "\n" for name in names)


def _forms(found: Inventory) -> str:
    from distrun.hosts.ranges import fold

    lines = [f"folded    {fold(found.names)}\n", f"expanded  {' '.join(found.names)}\n"]
    if len(found.order) > len(found.names):
        lines.append(f"cycle     {' '.join(found.order)}\n")
    return "".join(lines)


def as_object(found: Inventory) -> dict[str, object]:
    """Return the inventory as the JSON object of this command."""
    from distrun.hosts.ranges import fold

    return {
        "source": found.source,
        "hosts": [{**dataclasses.asdict(spec), "labels": list(spec.labels)} for spec in found.specs],
        "order": list(found.order),
        "folded": fold(found.names),
        "warnings": list(found.warnings),
    }


def table(found: Inventory) -> Table:
    """Return one row for each host; columns of which no host has anything are left out."""
    from rich.markup import escape
    from rich.table import Table

    cells = [_cells(spec) for spec in found.specs]
    shown = [name for name in cells[0] if name in ("HOST", "ROLE") or any(row[name] for row in cells)]
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in shown:
        # A name that is broken is no name: the other columns give way.
        made.add_column(name, overflow="fold", no_wrap=name == "HOST")
    for row in cells:
        made.add_row(*(escape(row[name]) for name in shown))
    return made


def _cells(spec: HostSpec) -> dict[str, str]:
    others = [(name, getattr(spec, name)) for name in OTHERS]
    return {
        "HOST": spec.name,
        "USER": spec.user,
        "PORT": "" if spec.port is None else str(spec.port),
        "SLOTS": "" if spec.slots is None else str(spec.slots),
        "MAX": "" if spec.max_slots is None else str(spec.max_slots),
        "GPUS": spec.gpus,
        "ROLE": spec.role or "any",
        "ADDR": spec.addr,
        "IFACE": spec.iface,
        "MORE": " ".join(
            f"{name}={','.join(value) if isinstance(value, tuple) else value}" for name, value in others if value
        ),
    }
