"""Hints for typical mistakes on the command line: what to type instead. Each needs evidence: none may be wrong."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from distrun import formats
from distrun.cli.common import TYPED
from distrun.request import COMMAND, is_secret
from distrun_runtime.contract import facts
from distrun_runtime.contract.plan import ROLES, WORKER

if TYPE_CHECKING:
    from distrun_runtime.coordinator.failures import Outcome

SOURCES = 300
"""Files of a script's folder that are searched for the name of an option, at most."""
SOURCE_SIZE = 1 << 20

FOREIGN: Mapping[str, tuple[str, str]] = {
    "--p3": ("--num-servers", "Leave it out: every store sends by priority."),
    "--host": ("--hosts", "Did you mean --hosts A,B (names of hosts), or -H FILE (a hosts file)?"),
    **dict.fromkeys(("--host-file", "--machinefile", "--machine-file"), ("--hostfile", "Did you mean -H FILE?")),
    **dict.fromkeys(("--cluster", "--mode"), ("--launcher", "Did you mean --launcher NAME?")),
    **dict.fromkeys(("--jobname", "--job-name"), ("--name", "Did you mean --name NAME?")),
    **dict.fromkeys(
        ("--np", "--nproc_per_node", "--nproc-per-node", "--nnodes", "--num_nodes", "--num_processes", "--num-proc"),
        ("--num-workers", "Did you mean -n N, the number of all workers?"),
    ),
    "--workers": ("--num-workers", "Did you mean -n N?"),
    "--servers": ("--num-servers", "Did you mean -s N?"),
    "--gpus": ("--gpus-per-worker", "Did you mean --gpus-per-worker N?"),
    "--tail": ("--lines", "Did you mean -n N, the last N lines?"),
    "--host-ip": ("--interface", "Did you mean --interface NAME, or --subnet CIDR?"),
    "--log-level": ("--verbose", "Did you mean -v, or -q?"),
    "--sge-log-dir": ("--run-dir", "Leave it out, or did you mean --run-dir DIR? Jobs keep their logs there."),
    **dict.fromkeys(
        ("--files", "--archives"), ("--sync-extra", "Did you mean --sync-extra SRC[:DST], with --sync-dst-dir DIR?")
    ),
    **dict.fromkeys(
        ("--master_addr", "--master_port", "--master-addr", "--master-port", "--rdzv-backend", "--rdzv-endpoint"),
        ("--num-workers", "Leave it out: workers are given MASTER_ADDR and MASTER_PORT."),
    ),
    "--max-restarts": ("--num-workers", "Workers are not restarted. To launch a job again: distrun rerun JOB"),
    **dict.fromkeys(("--workdir", "--working-dir"), ("--sync-dst-dir", "Did you mean --sync-dst-dir DIR?")),
    "-x": ("--env", "Did you mean --env NAME?"),
}
"""Options of launch.py, dmlc-submit, mpirun, torchrun and others: the option of ours without which the hint would not
fit, and the hint."""

ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("ps", "ls", "list", "jobs", "queue", "squeue"), "status"),
    **dict.fromkeys(("get", "show", "describe", "info"), "status {JOB}"),
    **dict.fromkeys(("run", "submit", "start", "create", "apply"), "launch"),
    **dict.fromkeys(("cancel", "stop", "delete", "scancel"), "kill {JOB}"),
    **dict.fromkeys(("tail", "follow"), "logs {JOB} -f"),
    **dict.fromkeys(("prune", "clean"), "gc"),
    **dict.fromkeys(("restart", "resubmit"), "rerun {JOB}"),
}
"""Commands of docker, kubectl, Slurm, Ray and SkyPilot: what to type here. In the place of JOB comes what was typed."""

_ASSIGNMENT = r"(?s)([A-Za-z_][A-Za-z0-9_]*)="
_INTERPRETER = r"(?:.*/)?(?:python|pypy|bash|sh|zsh|dash)[\d.]*\Z"
_UNKNOWN = r"unrecognized arguments|[Nn]o such option|[Uu]nknown (?:command line )?(?:option|flag|argument)"


class Behind(NamedTuple):
    """An option of ours behind the command."""

    name: str
    text: str
    """With its value, as it was typed."""
    at: int
    """Index of its word in the command."""
    size: int
    """Words: 2 with a value of its own."""


def no_such_command(words: Sequence[str], known: Iterable[str]) -> str:
    """Return what may have been meant by a command that does not exist, and the words behind it."""
    if words[0] in ELSEWHERE:
        job = words[1] if len(words) == 2 and not words[1].startswith("-") else "JOB"
        return f"Type: distrun {ELSEWHERE[words[0]].format(JOB=formats.quote(job))}"
    import difflib

    near = difflib.get_close_matches(words[0], list(known), n=1)
    return f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}."


def no_such_option(err: click.NoSuchOption) -> str:
    """Return what may have been meant by an unknown option; empty if nothing is near."""
    assert err.ctx is not None
    known = [name for each in err.ctx.command.params for name in (*each.opts, *each.secondary_opts)]
    needed, text = FOREIGN.get(err.option_name, ("", ""))
    if needed in known:
        return text
    import difflib  # for a mistake only

    bare = {name.lstrip("-"): name for name in known if name.startswith("--")}
    near = difflib.get_close_matches(err.option_name.lstrip("-"), list(bare), n=1, cutoff=0.7)
    return f"Did you mean {bare[near[0]]}?" if near else ""


def missing(err: click.MissingParameter) -> str:
    """Return what to type where a required option of `launch` stands behind the command; empty if it does not."""
    ctx, param = err.ctx, err.param
    # No other command has a required option and a command behind its options. By its name: its module imports this one.
    if ctx is None or param is None or ctx.command.name != "launch":
        return ""
    parsed = ctx.command.make_parser(ctx).parse_args(list(ctx.obj[TYPED]))[0]
    command = list(parsed["command"]) if isinstance(parsed.get("command"), (list, tuple)) else []
    found = list(behind(command, ctx.command.params))
    if not any(each.name in param.opts for each in found):
        file = parsed.get("file")
        if isinstance(file, str):
            return f"{param.opts[0]} N, or {param.name} = N above all tables of {file}"
        if command and command[0].endswith(".toml"):
            return f"for a job file, type distrun launch -f {formats.quote(command[0])}"
        return f"{param.opts[0]} N, the number of workers"
    # Behind a quoted command everything is distrun's; else what is not missing may be the script's own.
    script = _script(command)
    ours = [
        each
        for each in found
        if " " in command[0] or each.name in param.opts or (script and not _is_mentioned(each.name, script))
    ]
    return _reordered(ctx, command, ours)


def _reordered(ctx: click.Context, command: Sequence[str], moved: Sequence[Behind]) -> str:
    words: list[str] = ctx.obj[TYPED]
    before = words[: len(words) - len(command)]
    taken = {index for each in moved for index in range(each.at, each.at + each.size)}
    options = [command[index] for index in sorted(taken)]
    rest = [word for index, word in enumerate(command) if index not in taken]
    line = " ".join(map(_shown, ["distrun", str(ctx.info_name), *before, *options, *rest]))
    return f"options of distrun come before the command: {line}"


def behind(command: Sequence[str], params: Sequence[click.Parameter]) -> Iterator[Behind]:
    """Yield the options of ours that stand behind a command's first word, or behind an interpreter's options."""
    takes = {
        name: isinstance(option, click.Option) and not option.is_flag and not option.count
        for option in params
        for name in (*option.opts, *option.secondary_opts)
        if name.startswith("-")
    }
    at = 1
    while at < len(command) and re.match(_INTERPRETER, command[0]) and command[at].startswith("-"):
        at += 1  # `python -s`, `bash -n`
    while at < len(command):
        name, equals, value = command[at].partition("=")
        size = 1
        if name in takes:
            size = 2 if takes[name] and not equals else 1
            words = [_shown(word) for word in ([value] if equals else command[at + 1 : at + size])]
            text = "=".join((name, *words)) if equals else " ".join((name, *words))
            yield Behind(name, text, at, min(size, len(command) - at))
        at += size


def misplaced(command: Sequence[str], ctx: click.Context) -> str:
    """Return a note on options of ours behind a script: launch.py took them for its own.

    Only if neither the script nor what lies beside it mentions the option. Reads the files.
    """
    script = _script(command)
    if not script:
        return ""
    ours = [each for each in behind(command, ctx.command.params) if not _is_mentioned(each.name, script)]
    if not ours:
        return ""
    given, who = " ".join(each.text for each in ours), os.path.basename(script)
    advice = f"if it is meant for distrun, type it before {command[0]}"
    return f"`{given}` stands behind the command, so {who} gets it; {advice}"


def afterwards(command: Sequence[str], outcome: Outcome, tail: Sequence[str], ctx: click.Context) -> str:
    """Return a hint for a command that failed, from how it failed and its last lines; empty if nothing is known."""
    if outcome.problems and all(each.kind == facts.PROGRAM for each in outcome.problems):
        return _not_found(command, ctx)
    culprit = outcome.culprit
    given = ROLES if ctx.params["ps"] == COMMAND else (WORKER,)  # the roles that run the command
    if culprit is None or not culprit.task.startswith(given):
        return ""
    if culprit.code == facts.EXIT_NOT_FOUND and culprit.reason:
        return _not_found(command, ctx)
    text = "\n".join(tail)
    was_not_found = culprit.code == facts.EXIT_NOT_FOUND and len(command) == 1
    if was_not_found and re.search(r"\bpython: (command )?not found", text):
        return "many systems have no python, only python3: type that in the command"
    if culprit.code and re.search(_UNKNOWN, text):
        for each in behind(command, ctx.command.params):
            if re.search(rf"(?<![\w-]){re.escape(each.name)}(?![\w-])", text):
                return (
                    f"`{each.text}` stands behind the command, which got it; if it is meant for distrun, type it "
                    f"before {command[0]}"
                )
    return ""


def _not_found(command: Sequence[str], ctx: click.Context) -> str:
    first = command[0]
    if " " in first:
        found = list(behind(command, ctx.command.params))
        if found:
            return _reordered(ctx, command, found)
        return (
            f"{formats.quote(first)} is taken for one program with blanks in its name: give all words in one pair of "
            "quotes, or none"
        )
    if first in formats.BUILTINS:
        return f"{first} is the shell's own; give the command as one quoted word"
    if re.match(_ASSIGNMENT, first):
        given = takewhile(lambda word: re.match(_ASSIGNMENT, word), command)
        words = " ".join(f"--env {_shown(word)}" for word in given)
        return f"{_shown(first)} is not a program: to set variables, type {words} before the command"
    if "/" not in first and os.path.isfile(first):
        return f"{first} is a file of this directory, which is not searched for programs: type {_runs(first)}"
    return ""


def _shown(word: str) -> str:
    """Return a word for a message; of an assignment to a secret the value is left out."""
    name, equals, _ = word.partition("=")
    return name + "=..." if equals and is_secret(name) else formats.quote(word)


def _runs(name: str) -> str:
    """Return what runs a file of the current directory."""
    path = formats.quote("./" + name)
    if os.access(name, os.X_OK):
        return path
    programs = {".py": "python3", ".sh": "bash"}
    program = programs.get(os.path.splitext(name)[1], "")
    return f"{program} {formats.quote(name)}" if program else f"{path} after chmod +x {formats.quote(name)}"


def _script(command: Sequence[str]) -> str:
    """Return the file that a command runs if it is an interpreter with a script, or a script; empty if it is neither.

    Other programs, such as mpirun or docker, have options of their own that are called like ours.
    """
    if len(command) < 2:
        return ""
    first = command[0]
    if re.match(_INTERPRETER, first):
        words = [word for word in command[1:] if not word.startswith("-")]
        return words[0] if words and os.path.isfile(words[0]) else ""
    return first if first.endswith((".py", ".sh")) and os.path.isfile(first) else ""


def _is_mentioned(option: str, script: str) -> bool:
    """Whether the script, or a Python file in its folder or below, has the option's name in it.

    Of a long option also `"name"` and a field `name: int`, from which libraries make options.
    """
    bare = re.sub(rb"[-_]", b"[-_]", os.fsencode(option[2:])) if option.startswith("--") else b"(?!)"
    exact = rb"(?<![\w-])%s(?![\w-])" % re.escape(os.fsencode(option))
    needle = re.compile(rb"%s|[\"']%s[\"']|^\s*%s\s*:" % (exact, bare, bare), re.MULTILINE)
    paths = _sources(Path(script))
    for path in islice(paths, SOURCES):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if needle.search(file.read(SOURCE_SIZE)):
                return True
    return next(paths, None) is not None  # there are more: it cannot be known


def _sources(script: Path) -> Iterator[Path]:
    yield script
    for at, folders, names in os.walk(script.parent):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith(".py"):
                yield Path(at, name)
