"""An environment that shell text makes, such as a virtual environment's: run once, its variables taken over.

A login shell reads the text from a descriptor, so that no process list shows it; then our own interpreter tells the
variables over a pipe. What either prints is noise.
"""

from __future__ import annotations

import os
import sys
from typing import Dict, Mapping

from distrun_runtime.agent.errand import FD, NOT_FOUND, SCRIPT, TIMED_OUT, Command, Done
from distrun_runtime.agent.places import expand
from distrun_runtime.agent.refusal import Refusal
from distrun_runtime.contract.plan import ACTIVATE_S

_END = b"distrun-end"
_DUMP = (
    'import os\nwith os.fdopen(%(fd)s, "wb") as f:\n'
    ' f.write(b"".join(k + b"=" + v + b"\\0" for k, v in os.environb.items()) + b"distrun-end")'
) % {"fd": FD.decode()}
# The second way is for an environment in which our interpreter does not start (LD_LIBRARY_PATH).
_TEXT = """%s
__distrun_code=$?
[ $__distrun_code -eq 0 ] || exit $__distrun_code
unset __distrun_code
%s -I -S -c %s || { env -0 && printf distrun-end; } >&%s
"""
_OF_THE_SHELL = (b"_", b"SHLVL", b"PWD", b"OLDPWD", b"BASH_EXECUTION_STRING")
"""What tells of that shell and would only mislead."""


def command(script: str, base: Mapping[bytes, bytes], marks: Mapping[str, str], cwd: str) -> Command:
    """Return what runs `script` in `base`; `marks` are what its processes are known by."""
    text = _TEXT % (script, _quoted(sys.executable), _quoted(_DUMP), FD.decode())
    env = dict(base)
    env.update((os.fsencode(name), os.fsencode(value)) for name, value in marks.items())
    argv = (b"bash", b"-l", b"/dev/fd/" + SCRIPT)
    return Command(argv, env, os.fsencode(cwd), ACTIVATE_S, text.encode("utf-8", "surrogateescape"))


def folder(cwd: str) -> str:
    """Return where the text runs: in the tasks' folder if it is there, else where the agent is."""
    path = expand(cwd)
    return path if os.path.isdir(path) and os.access(path, os.X_OK) else ""


def environment(done: Done, asked: Command, host: str) -> Dict[bytes, bytes]:
    """Return the environment that the activation left.

    Raises:
        Refusal: it failed, took too long or told nothing; with its last words.
    """
    words = "\n" + done.last_lines if done.last_lines else ""
    if done.fault == NOT_FOUND:
        raise Refusal("activation", "--activate needs bash, and there is none on %s" % host)
    if done.code is None:
        what = "did not end within %g s" % asked.limit_s if done.fault == TIMED_OUT else "cannot be run"
        raise Refusal("activation", "activation on %s %s%s" % (host, what, words), _fix(host))
    if done.code != 0:
        how = "exit code %d" % done.code if done.code > 0 else "signal %d" % -done.code
        raise Refusal("activation", "activation on %s failed (%s)%s" % (host, how, words), _fix(host))
    if not done.result.endswith(_END):
        raise Refusal(
            "activation", "activation on %s ended without telling its variables%s" % (host, words), _fix(host)
        )
    pairs = (entry.partition(b"=") for entry in done.result[: -len(_END)].split(b"\0"))
    found = {name: value for name, equals, value in pairs if equals and name}
    for name in _OF_THE_SHELL:
        found.pop(name, None)
        if name in asked.env and name != b"_":
            found[name] = asked.env[name]
    return found


def _fix(host: str) -> str:
    return "try it there by hand: ssh %s, then bash -l and the text of --activate" % host


def _quoted(text: str) -> str:
    """Return text as one word of a shell."""
    return "'%s'" % text.replace("'", "'\\''")
