"""Checks the interpreters of tasks that need modules (bundled servers): their version, and whether they import those.

If the interpreter of the command cannot import them, servers use the environment that `distrun doctor --fix` made on
the host, if there is one. Workers never use it.

    $XDG_DATA_HOME/distrun/servers/python3.11-x86_64   a link to an environment that is whole

Hosts may share that folder and have their interpreters in different places. If the interpreter of that environment is
not on this host, it is made under another name here: `python3.11-x86_64-3f2a9c`.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Dict, Generator, Iterator, List, Mapping, Optional, Sequence, Tuple

from distrun_runtime.agent.commands import FD, NOT_FOUND, TIMED_OUT, Command, CommandResult
from distrun_runtime.agent.share import Share, exact, words, working_folder
from distrun_runtime.contract import environ, private
from distrun_runtime.contract.plan import Host, Task
from distrun_runtime.errors import PreflightFailure

OLDEST = (3, 10)
LIMIT_S = 60.0
PACKAGES = {"PIL": "pillow", "cv2": "opencv-python", "sklearn": "scikit-learn", "yaml": "pyyaml", "zmq": "pyzmq"}
"""What pip calls a module, where that differs."""
WITHOUT = "add -s 0 if the command does not use the store"
OTHER = "name another interpreter with --python, python= in the hosts file, or --activate"

# Read by whatever Python is there: nothing in it is newer than 2.7.
ABOUT = """\
import gc, json, os, sys
gc.disable()  # it ends soon
fd, names = int(sys.argv[1]), sys.argv[2:]
found = {"version": ".".join(str(part) for part in sys.version_info[:3]), "path": sys.executable or ""}
if sys.version_info >= (3, 4):
    from importlib.util import find_spec
    found["is_own"] = sys.prefix != sys.base_prefix or os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
    found["lacks"] = [name for name in ("pip", "venv", "ensurepip") if find_spec(name) is None]
"""
TELL = """\
os.write(fd, json.dumps(found).encode("ascii"))
os._exit(0)  # to take down an interpreter that has imported numpy takes a tenth of what it did
"""
_LOOK = f"""\
{ABOUT}
if sys.version_info >= (3, 10):
    for name in names:
        try:
            found[name] = str(getattr(__import__(name), "__version__", "?"))
        except BaseException as err:
            found[name], found[name + "_error"] = "", "%s: %s" % (type(err).__name__, err)
{TELL}"""


def chosen(share: Share) -> Generator[Command, CommandResult, Share]:
    """Check the interpreters of tasks with needs; return the share with those that they will use.

    Yields commands, and is sent how each ended.

    Raises:
        PreflightFailure: kind python (not there, does not run, too old) or module (named, with what pip calls them).
    """
    found: Dict[str, str] = {}
    instead: Dict[str, str] = {}
    for asked, tasks in _checks(share):
        name, needs = tasks[0].argv[0], tasks[0].needs
        look = told(asked, (yield asked), name, share.host)
        path = str(look["path"])
        if not fits(look, needs):
            for path in environments(str(look["version"])):
                other = parsed((yield asked._replace(argv=(os.fsencode(path), *asked.argv[1:]))))
                if other is not None and fits(other, needs):
                    look = other
                    instead.update((task.name, path) for task in tasks)
                    break
            else:
                raise _failure(share, tasks[0], look)
        found[name] = f"{look['version']} {path}"
    tasks = [each._replace(argv=(instead.get(each.name, each.argv[0]), *each.argv[1:])) for each in share.plan.tasks]
    return share._replace(python=found, plan=share.plan._replace(tasks=tuple(tasks)))


def command(
    name: bytes,
    needs: Sequence[str],
    env: Mapping[bytes, bytes],
    cwd: bytes,
    limit_s: float = LIMIT_S,
    *,
    look: str = _LOOK,
) -> Command:
    """Return the command that looks at an interpreter; `told` reads its result."""
    modules = [exact(module) for module in needs]
    return Command((name, b"-c", look.encode("ascii"), FD, *modules), env, cwd, limit_s)


def told(asked: Command, done: CommandResult, name: str, host: str) -> Dict[str, Any]:
    """Return what an interpreter told: `version`, `path`, and by module its version (with `MODULE_error` if empty).

    Also `is_own`: it belongs to a virtual environment or to conda, so that pip may install there. `lacks`: which of
    pip, venv and ensurepip it has not.

    Raises:
        PreflightFailure: there is none, or it does not work.
    """
    found = parsed(done)
    if found is not None:
        return found
    if done.fault == NOT_FOUND:
        other = "type python3 in the command, if that is what this host has, or " * (name == "python") + OTHER
        raise PreflightFailure("python", f"there is no program {name} on {host}{in_no_folder(name)}", other)
    if done.fault == TIMED_OUT:
        modules = ", ".join(os.fsdecode(each) for each in asked.argv[4:])
        what, kind = f"{name} on {host} did not import {modules} within {asked.limit_s:g} s", "module"
    else:
        how = "" if done.code is None else f" (exit code {done.code})"
        what, kind = f"{name} on {host} is not a working Python{how}", "python"
    raise PreflightFailure(kind, "\n".join([what, *done.last_lines.splitlines()]), OTHER)


def fits(look: Mapping[str, Any], needs: Sequence[str]) -> bool:
    """Return whether servers can use an interpreter."""
    return is_new(look) and not missing(look, needs)


def is_new(look: Mapping[str, Any]) -> bool:
    """Return whether an interpreter is new enough for servers."""
    return tuple(int(part) for part in str(look["version"]).split(".")[:2]) >= OLDEST


def missing(look: Mapping[str, Any], needs: Sequence[str]) -> List[str]:
    """Return the modules that an interpreter cannot import."""
    return [module for module in needs if not look.get(module)]


def place(version: str, path: str) -> str:
    """Return where the environment of servers is, or would be made, for the Python of that version at `path`."""
    usual = os.path.join(_home(), _name(version))
    if not os.path.islink(usual) or os.path.exists(os.path.join(usual, "bin", "python")):
        return usual
    import hashlib  # rarely needed

    return f"{usual}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:6]}"


def environments(version: str) -> Iterator[str]:
    """Yield the interpreters of the environments for servers: that version's first, then newer before older ones."""
    first, machine = _name(version), re.escape(os.uname().machine)
    rows: List[Tuple[bool, int, int, str]] = []
    try:
        for name in os.listdir(_home()) if private.is_ours(os.lstat(_home())) else ():
            match = re.fullmatch(r"python(\d+)\.(\d+)-" + machine + "(-[0-9a-f]{6})?", name)
            if match is not None:
                rows.append((name.startswith(first), int(match.group(1)), int(match.group(2)), name))
    except OSError:
        return
    for _, _, _, name in sorted(rows, reverse=True):
        path = os.path.join(_home(), name)
        try:
            if private.is_ours(os.stat(path)):  # what is in it will be executed
                yield os.path.join(path, "bin", "python")
        except OSError:  # a link to nothing
            continue


def _name(version: str) -> str:
    return f"python{'.'.join(version.split('.')[:2])}-{os.uname().machine}"


def how_to_install(look: Mapping[str, Any], modules: Sequence[str]) -> str:
    """Return shell text that installs modules for servers and workers; empty where venv lacks what it needs.

    Many systems let pip write to virtual environments only (PEP 668), so it does not install anywhere else.
    """
    import shlex  # for a message only

    path, packages = shlex.quote(str(look["path"])), " ".join(PACKAGES.get(module, module) for module in modules)
    if look["is_own"] and "pip" not in look["lacks"]:
        return f"{path} -m pip install {packages}"
    if "ensurepip" in look["lacks"] or "venv" in look["lacks"]:
        return ""
    return f"{path} -m venv ~/venv && ~/venv/bin/pip install {packages}"


def _home() -> str:
    named = environ.text("XDG_DATA_HOME")
    data = named if os.path.isabs(named) else os.path.join(os.path.expanduser("~"), ".local", "share")
    return os.path.join(data, "distrun", "servers")


def _checks(share: Share) -> Iterator[Tuple[Command, List[Task]]]:
    """Yield each distinct interpreter (name, path it is looked for in, modules): its check, and the tasks it is for."""
    alike: Dict[Tuple[object, ...], List[Task]] = {}
    for task in share.plan.tasks:
        if task.needs:
            env = share.environment(task, task.env)
            key = (task.argv[0], task.needs, task.cwd, env.get(b"PATH"), env.get(b"PYTHONPATH"))
            alike.setdefault(key, []).append(task)
    for tasks in alike.values():
        env, cwd = share.environment(tasks[0], tasks[0].env), exact(working_folder(tasks[0].cwd))
        yield command(words(tasks[0])[0], tasks[0].needs, env, cwd), tasks


def _failure(share: Share, task: Task, look: Mapping[str, Any]) -> PreflightFailure:
    """Return why a task cannot use an interpreter that works, with everything that the user can do."""
    plan, path, version = share.plan, look["path"] or task.argv[0], look["version"]
    needs_store = any(task.env.get("DISTRUN_SERVER_IMPORT") for task in plan.tasks)
    fixes = [] if needs_store else [WITHOUT]
    if not is_new(look):
        oldest = ".".join(str(part) for part in OLDEST)
        text = f"{path} on {share.host} is Python {version}; servers and scheduler need {oldest} or newer"
        return PreflightFailure("python", text, "\n".join([*fixes, ("or " if fixes else "") + OTHER]))
    modules = missing(look, task.needs)
    text = f"{path} on {share.host} (Python {version}) cannot import {', '.join(modules)}"
    lines = [f"{module}: {look[module + '_error']}" for module in modules]
    fixes += [f"for servers: {plan.doctor} --fix"] if plan.doctor else []
    script = typed(share, look, modules)
    fixes += [f"for servers and workers: {script}"] if script else []
    return PreflightFailure("module", "\n".join([text, *lines]), "\n".join([*fixes, "or " + OTHER]))


def typed(share: Share, look: Mapping[str, Any], modules: Sequence[str]) -> str:
    """Return what the user types to install modules on this host; empty where venv lacks what it needs."""
    host = next((each for each in share.plan.hosts if each.name == share.host), Host(share.host))
    script = how_to_install(look, modules)
    return host.typed(script) + (", then --activate venv:~/venv" if "~/venv" in script else "") if script else ""


def in_no_folder(program: str) -> str:
    """Return where a program was looked for that is not there, as the end of a sentence."""
    return "" if "/" in program else " (in no folder of the tasks' PATH)"


def parsed(done: CommandResult) -> Optional[Dict[str, Any]]:
    """Return what an interpreter told; None: nothing that can be read."""
    try:
        value: Dict[str, Any] = json.loads(done.result.decode("ascii"))
        return value if value["version"] and "path" in value else None
    except (ValueError, LookupError, TypeError):
        return None
