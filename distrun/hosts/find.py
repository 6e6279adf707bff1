"""Finds the hosts of a job: in options, then the environment, then the queue system. Reads files and stdin."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import BinaryIO

from distrun.errors import HostsError, UsageError
from distrun.hosts import grammar, ranges
from distrun.hosts.grammar import FORMATS, Fault, Finding, HostSpec, Inventory, error_of
from distrun.hosts.parse import parse, parse_list

STDIN = "<stdin>"
FILES = ("DEEPLEARNING_WORKERS_PATH", "DISTRUN_HOSTFILE")
"""Variables that name a hosts file."""
GRID_ENGINE = "PE_HOSTFILE"
SLURM_NODES = "SLURM_JOB_NODELIST"
SLURM_TASKS = "SLURM_TASKS_PER_NODE"
VARIABLES = (*FILES, GRID_ENGINE, SLURM_NODES)
"""Variables that give hosts, the first one first."""
WAYS = f"-H FILE, --hosts A,B, or one of the variables {', '.join(VARIABLES)}"

_LARGEST = 16 * 2**20
_SLURM_COUNT = r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?"


def find(hostfile: str | None, hosts: str | None, env: Mapping[str, str], *, form: str = "auto") -> Inventory | None:
    """Return the hosts of a job; None if none are named. Each file, and stdin, is read once.

    Arguments:
        hostfile: -H, a path or `-` for stdin.
        hosts: --hosts, a list.
        env: the environment.
        form: one of `grammar.FORMATS`.

    Raises:
        HostsError: all that is wrong with them.
        UsageError: both options, or an unknown form.
    """
    if form not in FORMATS:
        raise UsageError(f"--hostfile-format: expected one of {', '.join(FORMATS)}, found {form!r}")
    if hostfile is not None and hosts is not None:
        raise UsageError("-H/--hostfile and --hosts contradict each other", "give one of them")
    if hostfile is not None:
        return of_file(hostfile, form="sge" if form == "auto" and hostfile == env.get(GRID_ENGINE) else form)
    if hosts is not None:
        return parse_list(hosts, form=form)
    for name in FILES:
        if env.get(name):
            return of_file(env[name], form=form, hint=f"the file is named by the variable {name}")
    if env.get(GRID_ENGINE):
        return of_file(env[GRID_ENGINE], form="sge", hint=f"the file is named by the variable {GRID_ENGINE}")
    if env.get(SLURM_NODES):
        return _slurm(env[SLURM_NODES], env.get(SLURM_TASKS, ""))
    return None


def _slurm(nodes: str, tasks: str) -> Inventory:
    """Return the hosts of an allocation of Slurm, as of `n[01-04],x1` and `2(x3),1`.

    `tasks` says how many fit on each, in the same order; it may be empty.

    Raises:
        HostsError: the node list is none.
    """
    try:
        names = list(dict.fromkeys(ranges.expand(nodes)))
    except HostsError as err:
        raise HostsError(str(err).replace(ranges.SOURCE + ":", f"${SLURM_NODES}:"), count=err.count) from None
    counts = _per_node(tasks)
    warnings: tuple[str, ...] = ()
    if tasks.strip() and len(counts) != len(names):
        text = f"{len(counts)} values in {grammar.quote(tasks)} for {len(names)} nodes: ignored"
        warnings = (Finding("$" + SLURM_TASKS, 1, 1, "W121", text).head,)
    slots = dict(zip(names, counts, strict=True)) if len(counts) == len(names) else {}
    specs = tuple(HostSpec(name, slots=slots.get(name)) for name in names)
    return Inventory("$" + SLURM_NODES, specs, tuple(names), warnings)


def _per_node(text: str) -> list[int]:
    """Return the counts of `2(x3),1`: 2, 2, 2, 1. Empty, if it is something else. No side effects."""
    counts: list[int] = []
    for item in text.strip().split(","):
        match = re.fullmatch(_SLURM_COUNT, item)
        if match is None or not int(match[1]) or len(counts) + int(match[2] or 1) > ranges.LIMIT:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def of_file(path: str, *, form: str = "auto", hint: str = "") -> Inventory:
    """Return the hosts of a file; `-` is stdin.

    Raises:
        HostsError: it cannot be read, or all that is wrong in it.
    """
    return parse(read(path, hint), STDIN if path == "-" else path, form=form, read=_included)


def read(path: str, hint: str = "") -> str:
    """Return the text of a hosts file; `-` is stdin.

    Raises:
        HostsError: E100, E118.
    """
    try:
        return _stdin() if path == "-" else _text(path)
    except Fault as fault:
        advice = ". Pass -H FILE, --hosts a,b or set DISTRUN_HOSTFILE" if fault.code == "E100" else ""
        source = STDIN if path == "-" else path
        raise error_of([Finding(source, 0, 0, fault.code, fault.text + advice)], hint) from None


def _included(path: str) -> str:
    return _text(os.path.expanduser(path))


def _stdin() -> str:
    return _decoded(sys.stdin.buffer, "stdin")


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return _decoded(file, path)
    except FileNotFoundError:
        raise Fault(0, "E100", f"hosts file not found: {path!r} (cwd {_cwd()})") from None
    except (OSError, ValueError) as err:
        raise _unreadable(path, getattr(err, "strerror", None) or str(err)) from None


def _decoded(file: BinaryIO, name: str) -> str:
    data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise _unreadable(name, f"it is larger than {_LARGEST // 2**20} MiB")
    if b"\0" in data:
        raise _unreadable(name, "it is not UTF-8 text")
    # Anything may stand in a comment; in a name, bytes that are no UTF-8 are refused where they stand.
    return data.decode("utf-8", "surrogateescape")


def _unreadable(name: str, why: str) -> Fault:
    return Fault(0, "E118", f"cannot read the hosts file {name!r}: {why}")


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "that does not exist any more"
