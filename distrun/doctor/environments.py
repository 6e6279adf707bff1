"""`distrun doctor --fix`: an environment with what servers need, on each host whose Python lacks it.

It is kept in the user's data folder of the host, one for each version of Python and kind of processor
(`distrun_runtime.agent.interpreters` says where, and has servers use it). Workers never use it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrun.doctor import making
from distrun.doctor.checks import ON, SERVER_PYTHON, needed_for_venv, version
from distrun.fleet import Problem, Ran, run
from distrun.hosts import fold
from distrun.shell import quote
from distrun_runtime.contract.duration import duration
from distrun_runtime.contract.plan import SERVER_MODULES

if TYPE_CHECKING:
    from distrun.backends.base import Backend
    from distrun.doctor.checks import ExaminedHost
    from distrun_runtime.contract.plan import Host

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
class Wanted:
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


def wanted(examined: Sequence[ExaminedHost]) -> list[Wanted]:
    """Return the environments that are missing and can be made. Pure."""
    found = []
    for host in examined:
        python = host.facts.get("python", {})
        if not python or python.get("error") or version(python["version"]) < SERVER_PYTHON:
            continue
        is_missing = not all(python.get(name) for name in SERVER_MODULES) and not python["environment"]
        if is_missing and not needed_for_venv(host):
            found.append(Wanted(host.name, python["path"], python["version"], python["place"]))
    return found


def told(rows: Sequence[Wanted]) -> list[str]:
    """Return what will be done, a line for each kind of it. Pure."""
    alike: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        alike.setdefault((row.python, row.place), []).append(row.host)
    text = "%s: %s -m venv makes %s, and pip installs %s there"
    return [text % (fold(hosts), python, place, ", ".join(PACKAGES)) for (python, place), hosts in alike.items()]


def make(
    backend: Backend,
    hosts: Sequence[Host],
    rows: Sequence[Wanted],
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
        backend,
        [host for host in hosts if host.name in argv],
        argv,
        limit_s=LIMIT_S,
        on_output=hear,
        activate=activate,
    )
    return [outcome(row, ran[row.host]) for row in rows]


def outcome(row: Wanted, ran: Ran | Problem) -> Made:
    """Return what came of one environment. Pure."""
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
        text = "{} (Python {}, numpy {}, zmq {})".format(
            *tuple(value[name] for name in ("path", "version", *SERVER_MODULES))
        )
        return Made(row.host, text, is_made=True, facts=value)
    what, fix = STEPS[value["step"]]
    words = pip_words(value["words"]) if value["step"] == "pip" else value["words"]
    return Made(row.host, f"{what}:\n{words}", fix=fix, script=by_hand(row))


def pip_words(words: str) -> str:
    """Return the errors among the last lines of pip, after why it reached no index. Pure."""
    why = re.search(r"\[Errno -?\d+\] [\w ]+", words)
    errors = [line for line in words.splitlines() if line.startswith("ERROR")]
    return "\n".join([why.group(), *errors]) if why and errors else "\n".join(errors) or words


def by_hand(row: Wanted) -> str:
    """Return shell text that tries the same, for the user to see what happens. Pure."""
    packages = " ".join(PACKAGES)
    return f'at=$(mktemp -d) && {quote(row.python)} -m venv "$at" && "$at"/bin/pip install {packages}; rm -r "$at"'
