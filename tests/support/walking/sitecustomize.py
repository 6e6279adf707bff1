"""Notes which functions of ours a process enters. Python imports it at its start where PYTHONPATH names this folder.

The process writes them to the file `$WALK_OUT.PID` as JSON when it ends: names of functions by module, and of classes
that are made (`class NAME`). If WALK_STEPS is set, it writes those between two signals instead: at CLEAR it forgets
what it has seen, at WRITE it writes. It answers CLEAR with a file, too: `$WALK_OUT.PID.cleared`.
"""

import atexit
import json
import os
import signal
import sys
import threading

CLEAR = signal.SIGRTMIN + 8
WRITE = signal.SIGRTMIN + 9

OURS = ("distrun.", "distrun_runtime.")
NEW_LOCALS = 2  # inspect.CO_NEWLOCALS: a function's code has it, that of a class does not
seen = {}


def note(frame, event, argument):
    code = frame.f_code
    # What is in no file of ours is made by dataclasses and named tuples.
    if event == "call" and code.co_name != "<module>" and "distrun" in code.co_filename:
        module = frame.f_globals.get("__name__") or ""
        if module.startswith(OURS):
            kind = "" if code.co_flags & NEW_LOCALS else "class "
            seen.setdefault(module, set()).add(kind + getattr(code, "co_qualname", code.co_name))


def path():
    return "%s.%d" % (os.environ["WALK_OUT"], os.getpid())


def write_file(name, text):
    """Whoever sees the file finds all of it."""
    with open(name + ".part", "w") as file:
        file.write(text)
    os.rename(name + ".part", name)


def write(*_):
    write_file(path() + ".json", json.dumps({module: sorted(names) for module, names in list(seen.items())}))


def clear(*_):
    seen.clear()
    write_file(path() + ".cleared", "")


def leave(code, real=os._exit):
    write()
    real(code)


if os.environ.get("WALK_OUT"):
    if os.environ.get("WALK_STEPS"):
        signal.signal(CLEAR, clear)
        signal.signal(WRITE, write)
    else:
        atexit.register(write)
        os._exit = leave
    threading.setprofile(note)
    sys.setprofile(note)
