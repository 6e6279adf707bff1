"""Notes which functions of ours a process enters. Python imports it at its start where PYTHONPATH names this folder.

The process writes them to the file `$WALK_OUT.PID.json` when it ends: names of functions by module, and of classes
that are made (`class NAME`). If WALK_STEPS is set, it is watched several times instead: at each signal NEXT it writes
what it has entered since the last one to `$WALK_OUT.PID.N.json`, N = 0, 1, 2...
"""

import atexit
import itertools
import json
import os
import signal
import sys
import threading

NEXT = signal.SIGRTMIN + 8

OURS = ("distrun.", "distrun_runtime.")
NEW_LOCALS = 2  # inspect.CO_NEWLOCALS: a function's code has it, that of a class does not
seen = {}
windows = itertools.count()


def note(frame, event, argument):
    code = frame.f_code
    # What is in no file of ours is made by dataclasses and named tuples.
    if event == "call" and code.co_name != "<module>" and "distrun" in code.co_filename:
        module = frame.f_globals.get("__name__") or ""
        if module.startswith(OURS):
            kind = "" if code.co_flags & NEW_LOCALS else "class "
            seen.setdefault(module, set()).add(kind + getattr(code, "co_qualname", code.co_name))


def write(entered, ending):
    """Write what was entered. A reader that finds the file finds all of it."""
    name = "%s.%d.%s" % (os.environ["WALK_OUT"], os.getpid(), ending)
    with open(name + ".part", "w") as file:
        json.dump({module: sorted(names) for module, names in list(entered.items())}, file)
    os.rename(name + ".part", name)


def write_all():
    """Write what was seen from the start on."""
    write(seen, "json")


def write_window(*_):
    """Write what was seen since the last window, and begin a new one."""
    global seen
    entered, seen = seen, {}  # first: what other threads enter while this is written is in the new one
    write(entered, "%d.json" % next(windows))


def leave(code, real=os._exit):
    write_all()
    real(code)


if os.environ.get("WALK_OUT"):
    if os.environ.get("WALK_STEPS"):
        signal.signal(NEXT, write_window)
    else:
        atexit.register(write_all)
        os._exit = leave
    threading.setprofile(note)
    sys.setprofile(note)
