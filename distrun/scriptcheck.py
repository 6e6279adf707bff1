"""Looks at the Python script of a launch before anything is submitted, copied or started: is it there, can it be read?

Only what is certain is an error. What hosts may have otherwise, or another Python may take, is a warning. What the
script imports is found here, too (`--check-imports`), and agents look whether hosts have it.
"""

from __future__ import annotations

import os
import re
import subprocess
import warnings
from collections.abc import Mapping

from distrun.errors import PlacedError, UsageError
from distrun.formats import python_script, python_words
from distrun.hosts.grammar import Finding
from distrun.request import JobRequest, given
from distrun_runtime.agent.preflight import near
from distrun_runtime.contract.plan import WORKER

LIMIT_S = 20.0
"""How long the job's Python may take to read the script."""
_COMPILE = "import sys; compile(open(sys.argv[1], 'rb').read(), sys.argv[1], 'exec')"


class InvalidScriptError(PlacedError):
    """The script has a syntax error."""

    what = "the script"


def check(request: JobRequest) -> str:
    """Check the script that workers run, if the command is Python with one; return a warning, or an empty text.

    Reads the script. If this Python finds a syntax error, the job's Python is asked, if it is on this machine.

    Raises:
        UsageError: it is certain that the workers could not run it.
    """
    script = python_script(request.command, request.shell)
    is_here = request.launcher == "local"
    is_inside = not os.path.isabs(script) and not os.path.normpath(script).startswith("..")
    is_copied = bool(request.sync_rules and request.sync_dst_dir) and is_inside
    specs = request.hosts.specs if request.hosts else ()
    moves = request.activated is None or any(spec.workdir for spec in specs)
    path = os.path.join(request.cwd, script)
    if not script or moves or not (is_here or is_copied) or (request.sync_rules and request.sync_rules.extra):
        is_unread = request.check_imports and not (script and os.path.isfile(path))
        return "--check-imports: nothing is checked: the command is no `python SCRIPT` with a script here" * is_unread
    if not os.path.exists(path):
        where = "where the job starts" if is_here else "which is copied to the hosts"
        wrong = f"there is no {script} in {request.cwd}, {where}"
        hint = near(script, [os.fsencode(path)]) or "name a script that is there, or change to its folder"
        if not is_here:  # Hosts may have it already: agents look.
            return f"{wrong} ({hint})"
        error = UsageError(wrong, hint)
    elif (finding := _syntax(path, script)) is None:
        return ""
    elif not is_here or request.activate:  # Which Python that brings is not known.
        return f"{finding.head} (by this Python)"
    else:
        error = InvalidScriptError(str(finding))
    if not _fails(request, script):
        return ""
    if request.dry_run:
        return str(error)
    raise error


def _syntax(path: str, shown: str) -> Finding | None:
    """Return the first syntax error of a script by this Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(_text(path), path, "exec", dont_inherit=True)
    except SyntaxError as err:
        line = (err.text or "").partition("\n")[0]
        return Finding(shown, err.lineno or 1, err.offset or 1, "", f"{type(err).__name__}: {err.msg}", line)
    except (OSError, ValueError, RecursionError, MemoryError):
        pass  # running it shows the error
    return None


def _text(path: str) -> bytes:
    """Return the text of a script; empty if it is none: Python runs pipes, archives and compiled ones, too."""
    if not os.path.isfile(path):
        return b""
    with open(path, "rb") as file:
        text = file.read()
    return b"" if b"\0" in text else text


def _fails(request: JobRequest, script: str) -> bool:
    """Return whether the job's Python, on this machine, cannot read the script either."""
    env = {**request.outer, **{name: each.value for name, each in given(request.settings, WORKER).items()}}
    words = [python_words(request.command, request.shell)[0], "-c", _COMPILE, script]
    try:
        done = subprocess.run(
            words, env=env, cwd=request.cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"Error" in done.stderr and done.returncode == 1


def imports(request: JobRequest) -> Mapping[str, str]:
    """Return the modules that the script imports in any case, and where: `{"torch": "train.py:3"}`.

    It ends where more may be there than the job's Python has: with a module of the script's folder, which may change
    `sys.path`, and with what changes that or runs a program (pip). Empty if the script cannot be read. Runs nothing.
    """
    import ast  # only when it is asked for

    script = python_script(request.command, request.shell)
    path = os.path.join(request.cwd, script)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(_text(path)).body
        names = os.listdir(os.path.dirname(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    extra = request.sync_rules.extra if request.sync_rules else ()
    beside = {name.partition(".")[0] for name in (*names, *(each.name for each in extra))}
    found: dict[str, str] = {}
    for statement in body:
        if _BRINGS.search(ast.unparse(statement)):
            break
        names = []
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            names = [statement.module or ""]
        for name in names:
            module = name.partition(".")[0]
            if module in beside:
                return found
            found.setdefault(module, f"{script}:{statement.lineno}")
    return found


_BRINGS = re.compile(
    r"\bsys\.(path|modules|meta_path)|addsitedir|\bfrom (pip|site|subprocess|sys) import|\bsubprocess\."
    r"|\bpip\.|\bsystem\(|\bos\.(popen|exec|posix_spawn|spawn)|\bexec\(|exit\(|SystemExit"
)
"""What may bring modules, or end the script before it imports more."""
