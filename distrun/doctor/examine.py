"""Examines hosts: asks each what it has, and has them connect to each other; `checks` judges the answers."""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrun import __version__
from distrun.doctor import checks, making
from distrun.doctor.checks import (
    BAD,
    HERE,
    OK,
    ON,
    SERVER_PYTHON,
    WARN,
    CheckRow,
    DoctorRequest,
    ExaminedHost,
    needed_for_venv,
    version,
)
from distrun.fleet import Fleet
from distrun.fleet.commands import Ran, run
from distrun.fleet.questions import HostAnswer
from distrun.formats import grouped, quote
from distrun.hosts.ranges import fold
from distrun_runtime.contract.enrolment import with_port
from distrun_runtime.contract.facts import duration
from distrun_runtime.contract.plan import ACTIVATE_S, SERVER_MODULES
from distrun_runtime.coordinator.failures import Problem

if TYPE_CHECKING:
    from distrun.backends.base import Backend
    from distrun.doctor.checks import ExaminedHost
    from distrun_runtime.contract.plan import Host


PROBE_S = 60.0
"""A probe runs a few programs that may each take up to ten seconds."""
LISTEN_S = 20.0
CONNECT_S = 5.0
"""How long connections to all peers together may take."""
PROGRAM_S = 5.0
ALL_UP_TO = 16
"""So many hosts are tried each with each; more in a ring, and each with the first."""

OTHER_ANSWER = "something else answered there"

Pair = tuple[str, str]
"""From, to."""


@dataclass(frozen=True)
class DoctorReport:
    """What was found."""

    rows: tuple[CheckRow, ...]
    facts: Mapping[str, Mapping[str, Any]]
    """By host, as its agent told them."""
    examined: tuple[ExaminedHost, ...] = ()


def examine(backend: Backend, hosts: Sequence[Host], request: DoctorRequest) -> DoctorReport:
    """Examine all hosts at once. Nothing on them is changed."""
    limit_s = PROBE_S + (ACTIVATE_S if request.activate else 0.0)
    with Fleet(backend, hosts) as fleet:
        probed = fleet.ask("probe", lambda name: questions(name, hosts, request), limit_s)
        examined = [_examined(fleet, name, each, request) for name, each in probed.items()]
        ports = _ports(fleet, hosts, examined, request)
    rows = this_machine(backend.needs_hosts)
    for host in examined:
        rows += checks.check(host, request)
    rows += ports + checks.between(examined, request)
    return DoctorReport(tuple(rows), {host.name: host.facts for host in examined}, tuple(examined))


def questions(name: str, hosts: Sequence[Host], request: DoctorRequest) -> dict[str, str]:
    """Return what a host's agent is asked to look at: what a launch would make of it. No side effects."""
    host = next(each for each in hosts if each.name == name)
    others = [each.address or each.name for each in hosts if each.name != name]
    interface = host.interface or request.interface
    asked = {
        "python": request.pythons.get(name, ""),
        "activate": request.activate,
        "cwd": request.workdirs.get(name, "") or request.cwd,
        "dst": request.dst,
        "address": host.address,
        "interface": interface,
        "subnet": "" if interface else request.subnet,
        "toward": others[0] if others else "",
    }
    return {key: value for key, value in asked.items() if value}


def _examined(fleet: Fleet, name: str, answer: HostAnswer | Problem, request: DoctorRequest) -> ExaminedHost:
    hello = fleet.agents.hellos.get(name)
    offset = None if hello is None else float(hello.facts.get("time", hello.arrived)) - hello.arrived
    return ExaminedHost(
        name,
        facts=answer.value if isinstance(answer, HostAnswer) else {},
        problem=answer if isinstance(answer, Problem) else None,
        is_met=hello is not None,
        noise=" ".join(each.text for each in fleet.agents.warnings if each.host == name),
        offset_s=offset,
    )


def _ports(
    fleet: Fleet, hosts: Sequence[Host], examined: Sequence[ExaminedHost], request: DoctorRequest
) -> list[CheckRow]:
    """Have the hosts listen and connect to each other; return what came of it."""
    addresses = {each.name: str(each.facts["network"]["address"]) for each in examined if each.facts}
    names = [name for name, address in addresses.items() if address]
    if len(names) < 2:
        return []
    opened = fleet.ask(
        "listen", lambda name: {"address": addresses[name], "port_range": request.port_range}, LISTEN_S, names
    )
    rows = [
        CheckRow(name, "data ports", BAD, each.text, "--port-range A-B with free ports, or another --interface")
        for name, each in opened.items()
        if isinstance(each, Problem)
    ]
    listening = {name: int(each.value["port"]) for name, each in opened.items() if isinstance(each, HostAnswer)}
    nonces = {pair: secrets.token_hex(16) for pair in pairs(names) if pair[1] in listening}

    def targets(name: str) -> dict[str, Any]:
        each = [
            {"host": to, "address": addresses[to], "port": listening[to], "nonce": nonce}
            for (source, to), nonce in nonces.items()
            if source == name
        ]
        return {"targets": each, "limit_s": CONNECT_S}

    connected = fleet.ask("connect", targets, CONNECT_S + LISTEN_S, names)
    closed = fleet.ask("close", {}, LISTEN_S, names)
    results: dict[Pair, str] = {}
    for source, to in nonces:
        told = connected[source]
        if isinstance(told, HostAnswer) and isinstance(closed[to], HostAnswer):
            results[source, to] = str(told.value["results"].get(to, "was not tried"))
    arrived = {name: each.value["nonces"] for name, each in closed.items() if isinstance(each, HostAnswer)}
    places = {name: with_port(addresses[name], port) for name, port in listening.items()}
    return rows + port_rows(nonces, results, arrived, places)


def this_machine(uses_ssh: bool) -> list[CheckRow]:
    """Return the rows of this machine. Runs `ssh -V` and `rsync --version`."""
    text = f"distrun {__version__}, python {platform.python_version()} {sys.executable}"
    found = [CheckRow(HERE, "this machine", OK, text)]
    if uses_ssh:
        sudo = "" if os.geteuid() == 0 else "sudo "
        install = f"{sudo}apt-get update && {sudo}apt-get install -y "
        for name, argv, need in (
            ("ssh", ["ssh", "-V"], "rsync, --transport openssh and parts of the ssh configuration need it"),
            ("rsync", ["rsync", "--version"], "--sync-dst-dir needs it"),
        ):
            version = first_line(argv)
            package = "openssh-client" if name == "ssh" else name
            if not version:
                found.append(CheckRow(HERE, "this machine", WARN, f"no {name}: {need}", install + package))
            elif version.startswith("openrsync"):
                fix = "brew install rsync"
                found.append(CheckRow(HERE, "this machine", WARN, version + " lacks what --sync-dst-dir needs", fix))
            else:
                found.append(CheckRow(HERE, "this machine", OK, version))
    return found


def first_line(argv: Sequence[str]) -> str:
    """Return the first line that a program prints, empty if there is none, or no such program."""
    if shutil.which(argv[0]) is None:
        return ""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROGRAM_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    return " ".join(lines[0].split()) if lines and done.returncode == 0 else ""


def pairs(names: Sequence[str]) -> list[Pair]:
    """Return who connects to whom, both ways, each pair once."""
    if len(names) <= ALL_UP_TO:
        return [(one, other) for one in names for other in names if one != other]
    first = names[0]
    ring = zip(names, [*names[1:], first], strict=True)
    star = [pair for name in names[1:] for pair in ((first, name), (name, first))]
    return list(dict.fromkeys([*ring, *star]))


def port_rows(
    nonces: Mapping[Pair, str],
    results: Mapping[Pair, str],
    arrived: Mapping[str, Sequence[str]],
    places: Mapping[str, str],
) -> list[CheckRow]:
    """Return a row for each host that was to be reached.

    Args:
        nonces: what each pair's first was to leave with its second.
        results: why it could not, "" if it could, by pair; a pair that is missing was not tried.
        arrived: the nonces that each host found.
        places: `address:port` where each host listened; rows come in this order.
    """
    rows = []
    for name in places:
        tried = {pair: nonce for pair, nonce in nonces.items() if pair[1] == name and pair in results}
        found = arrived.get(name, ())
        reasons = ((results[pair] or ("" if tried[pair] in found else OTHER_ANSWER), pair[0]) for pair in tried)
        wrong = grouped((reason, source) for reason, source in reasons if reason)
        if wrong:
            text = "; ".join(f"{fold(who)} cannot reach {places[name]}: {why}" for why, who in wrong.items())
            fix = "open the data ports between the hosts (a firewall?), name open ones by --port-range A-B, or choose "
            rows.append(CheckRow(name, "data ports", BAD, text, fix + "another network by --interface or --subnet"))
        elif tried:
            peers = f"all {len(tried)} asked" if len(tried) > 1 else "its peer"
            rows.append(CheckRow(name, "data ports", OK, f"reached by {peers}"))
    return rows


# `distrun doctor --fix`: an environment with what servers need, on each host whose Python lacks it.
#
# It is kept in the user's data folder of the host, one for each version of Python and kind of processor
# (`distrun_runtime.agent.interpreters` says where, and has servers use it). Workers never use it.


REQUIREMENTS = ("numpy>=1.23", "pyzmq>=25")
"""What pip is asked for, as in pyproject.toml. Which index it asks is its own configuration's business."""
PACKAGES = tuple(requirement.partition(">")[0] for requirement in REQUIREMENTS)
LIMIT_S = 900.0
SEE = f"see what it says there: {ON}"
STEPS = {
    "folder": ("its folder cannot be used", "make it writable for this user only, or set XDG_DATA_HOME there"),
    "venv": ("python -m venv failed", SEE),
    "pip": (
        "pip failed",
        "if pip reaches no package index there, name one or a folder of wheels in its configuration (index-url, or"
        f" no-index and find-links, in ~/.config/pip/pip.conf), then type the same again\n{SEE}",
    ),
    "check": ("it was made, but does not work", f"type the same again\n{SEE}"),
    "shared": ("it was not made", "see what is said of that host"),
}
"""What failed and what to do about it, by step of `making`."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """One environment that is to be made."""

    host: str
    python: str
    """The interpreter that it is made by."""
    version: str
    place: str


@dataclass(frozen=True)
class Made:
    """What came of it on one host."""

    host: str
    text: str
    is_made: bool = False
    fix: str = ""
    """What to do, a line each; ON stands for what runs `script` on the host."""
    script: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Path and versions of the environment."""


def wanted(examined: Sequence[ExaminedHost]) -> list[EnvironmentSpec]:
    """Return the environments that are missing and can be made. No side effects."""
    found = []
    for host in examined:
        python = host.facts.get("python", {})
        if not python or python.get("error") or version(python["version"]) < SERVER_PYTHON:
            continue
        is_missing = not all(python.get(name) for name in SERVER_MODULES) and not python["environment"]
        if is_missing and not needed_for_venv(host):
            found.append(EnvironmentSpec(host.name, python["path"], python["version"], python["place"]))
    return found


def told(rows: Sequence[EnvironmentSpec]) -> list[str]:
    """Return what will be done, a line for each kind of it. No side effects."""
    alike = grouped(((row.python, row.place), row.host) for row in rows)
    return [
        f"{fold(hosts)}: {python} -m venv makes {place}, and pip installs {', '.join(PACKAGES)} there"
        for (python, place), hosts in alike.items()
    ]


def make(
    backend: Backend,
    hosts: Sequence[Host],
    rows: Sequence[EnvironmentSpec],
    *,
    activate: str = "",
    say: Callable[[str, str], None] = lambda host, line: None,
) -> list[Made]:
    """Make the environments, on all hosts at once.

    Args:
        backend: what reaches the hosts.
        hosts: all that are known; others than those of `rows` are left alone.
        rows: what to make.
        activate: shell text that is run before, as in a launch.
        say: is told what goes on, in a thread of its own: host and line.

    Raises:
        KeyboardInterrupt: after it was ended everywhere; nothing that is half made is used.
    """
    text = Path(making.__file__).read_text(encoding="utf-8")
    same = secrets.token_hex(8)
    argv = {row.host: (row.python, "-I", "-c", text, same, row.place, *REQUIREMENTS) for row in rows}
    heard: dict[str, bytes] = {}

    def hear(host: str, stream: str, data: bytes) -> None:
        if stream == "err":
            *lines, heard[host] = (heard.get(host, b"") + data).split(b"\n")
            for line in lines:
                say(host, line.decode("utf-8", "replace"))

    ran = run(
        backend, [host for host in hosts if host.name in argv], argv, limit_s=LIMIT_S, on_output=hear, activate=activate
    )
    return [outcome(row, ran[row.host]) for row in rows]


def outcome(row: EnvironmentSpec, ran: Ran | Problem) -> Made:
    """Return what came of one environment. No side effects."""
    if isinstance(ran, Problem):
        return Made(row.host, ran.text, fix=ran.fix or "type the same again")
    if ran.is_late:
        text = f"not done within {duration(LIMIT_S)}; what was begun is removed"
        return Made(row.host, text, fix=f"see what takes so long: {ON}", script=by_hand(row))
    try:
        value: dict[str, str] = json.loads(bytes(ran.out).decode("utf-8", "replace").strip().splitlines()[-1])
    except (ValueError, IndexError):
        lines = [line for line in bytes(ran.err).decode("utf-8", "replace").splitlines() if line.strip()]
        how = ran.reason or f"exit code {ran.code}"
        text = "\n".join([f"it did not end well ({how})", *lines[-3:]])
        return Made(row.host, text, fix=SEE, script=by_hand(row))
    if "path" in value:
        text = f"{value['path']} (Python {value['version']}, numpy {value['numpy']}, zmq {value['zmq']})"
        return Made(row.host, text, is_made=True, facts=value)
    what, fix = STEPS[value["step"]]
    words = pip_words(value["words"]) if value["step"] == "pip" else value["words"]
    return Made(row.host, f"{what}:\n{words}", fix=fix, script=by_hand(row))


def pip_words(words: str) -> str:
    """Return the errors among the last lines of pip, after why it reached no index. No side effects."""
    why = re.search(r"\[Errno -?\d+\] [\w ]+", words)
    errors = [line for line in words.splitlines() if line.startswith("ERROR")]
    return "\n".join([why.group(), *errors]) if why and errors else "\n".join(errors) or words


def by_hand(row: EnvironmentSpec) -> str:
    """Return shell text that tries the same, for the user to see what happens. No side effects."""
    packages = " ".join(PACKAGES)
    return f'at=$(mktemp -d) && {quote(row.python)} -m venv "$at" && "$at"/bin/pip install {packages}; rm -r "$at"'
