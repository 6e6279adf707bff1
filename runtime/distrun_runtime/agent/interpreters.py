"""The interpreters of tasks that need modules (bundled servers): found, new enough, and able to import them."""

from __future__ import annotations

import json
from typing import Dict, Iterator, List, NamedTuple, Tuple

from distrun_runtime.agent import tasks
from distrun_runtime.agent.activation import folder
from distrun_runtime.agent.errand import FD, NOT_FOUND, TIMED_OUT, Command, Done
from distrun_runtime.agent.refusal import Refusal
from distrun_runtime.agent.share import Share

OLDEST = (3, 10)
LIMIT_S = 60.0
PACKAGES = {"zmq": "pyzmq"}
"""What pip calls a module, where that differs."""

# Read by whatever Python is there: nothing in it is newer than 2.7.
_PROBE = """\
import json, os, sys
fd, names = int(sys.argv[1]), sys.argv[2:]
missing = []
if sys.version_info >= (3, 10):
    for name in names:
        try:
            __import__(name)
        except BaseException as err:
            missing.append([name, "%s: %s" % (type(err).__name__, err)])
version = ".".join(str(part) for part in sys.version_info[:3])
os.write(fd, json.dumps([version, sys.executable, missing]).encode("ascii"))
"""


class Probe(NamedTuple):
    """One interpreter to look at."""

    name: str
    """argv[0] of the tasks."""
    command: Command
    needs: Tuple[str, ...]


def probes(share: Share) -> Iterator[Probe]:
    """Yield a probe for each distinct interpreter (name, path it is looked for in, modules) of tasks with needs."""
    seen = set()
    for task in share.plan.tasks:
        if not task.needs:
            continue
        env = share.environment(task, task.env)
        key = (task.argv[0], task.needs, task.cwd, env.get(b"PATH"), env.get(b"PYTHONPATH"))
        if key not in seen:
            seen.add(key)
            name, needs = tasks.words(task)[0], [tasks.exact(module) for module in task.needs]
            argv = (name, b"-c", _PROBE.encode("ascii"), FD, *needs)
            yield Probe(task.argv[0], Command(argv, env, tasks.exact(folder(task.cwd)), LIMIT_S), task.needs)


def judge(probe: Probe, done: Done, host: str) -> str:
    """Return `VERSION PATH` of an interpreter that will do.

    Raises:
        Refusal: kind python (not there, does not run, too old) or module (named, with what pip calls them).
    """
    name, modules = probe.name, ", ".join(probe.needs)
    other = "name another interpreter with --python, python= in the hosts file, or --activate"
    if done.fault == NOT_FOUND:
        where = "" if "/" in name else " (in no folder of the tasks' PATH)"
        if name == "python":
            other = "type python3 in the command, if that is what this host has, or " + other
        raise Refusal("python", "there is no program %s on %s%s" % (name, host, where), other)
    try:
        version, path, missing = _parsed(done.result)
    except ValueError:
        if done.fault == TIMED_OUT:
            what = "%s on %s did not import %s within %g s" % (name, host, modules, LIMIT_S)
            raise Refusal("module", "\n".join([what, *done.last_lines.splitlines()]), other) from None
        how = "" if done.code is None else " (exit code %d)" % done.code
        what = "%s on %s is no Python that works%s" % (name, host, how)
        raise Refusal("python", "\n".join([what, *done.last_lines.splitlines()]), other) from None
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(str(part) for part in OLDEST)
        text = "%s on %s is Python %s; servers and scheduler need %s or newer" % (path or name, host, version, oldest)
        raise Refusal("python", text, other)
    if missing:
        import shlex  # for what is typed only

        program = shlex.quote(path or name)
        text = "%s on %s (Python %s) cannot import %s" % (path or name, host, version, ", ".join(missing))
        lines = ["%s: %s" % each for each in missing.items()]
        packages = " ".join(PACKAGES.get(module, module) for module in missing)
        fix = "on %s: %s -m pip install %s" % (host, program, packages)
        # Many systems let pip write to virtual environments only (PEP 668).
        fix += "\nor there: %s -m venv ~/v && ~/v/bin/pip install %s   and then --activate venv:~/v" % (
            program,
            packages,
        )
        fix += "\nor " + other
        raise Refusal("module", "\n".join([text, *lines]), fix)
    return "%s %s" % (version, path)


def _parsed(result: bytes) -> Tuple[str, str, Dict[str, str]]:
    value: List[object] = json.loads(result.decode("ascii"))
    version, path, missing = value
    assert isinstance(missing, list)
    return str(version), str(path or ""), {str(name): str(why) for name, why in missing}
