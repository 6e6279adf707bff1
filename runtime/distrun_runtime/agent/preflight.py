"""Preflight: what an agent prepares and checks between `begin` and `ready`, and again for `settle`.

In this order: the folders of tasks, the runtime, the GPUs, the environment that `--activate` makes, the interpreters of
tasks that need modules, the program of the user's command, its script and what that imports. What comes after the GPUs
may come with the files that are copied to the host. Then it is checked after the copy: that is `settle`. Otherwise it
is checked before, so that nothing is copied in vain.

`steps` and `settle` are generators: each yields what it wants (a `Command` to be run, a runtime to be sent, or time in
seconds) and is sent the result. `Preflight` does these things for the agent's loop. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import re
import selectors
import sys
import time
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Generator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Union,
)

from distrun_runtime.agent.commands import FD, NOT_FOUND, SCRIPT, TIMED_OUT, Command, CommandResult, RunningCommand
from distrun_runtime.agent.interpreters import ABOUT, TELL, chosen, command, in_no_folder, parsed, typed
from distrun_runtime.agent.share import Share, cannot_run_in, exact, programs, working_folder
from distrun_runtime.contract import facts
from distrun_runtime.contract.plan import ACTIVATE_S, Plan, Sync
from distrun_runtime.errors import PreflightFailure, RuntimeFault

if TYPE_CHECKING:
    from distrun_runtime.contract.folder import PreparedFolder

_END = b"distrun-end"
_DUMP = (
    f'import os\nwith os.fdopen({FD.decode()}, "wb") as f:\n'
    ' f.write(b"".join(k + b"=" + v + b"\\0" for k, v in os.environb.items()) + b"distrun-end")'
)
# The second way is for an environment in which our interpreter does not start (LD_LIBRARY_PATH).
_SCRIPT = """%s
__distrun_code=$?
[ $__distrun_code -eq 0 ] || exit $__distrun_code
unset __distrun_code
%s -I -S -c %s || { env -0 && printf distrun-end; } >&%s
"""
_OF_THE_SHELL = (b"SHLVL", b"PWD", b"OLDPWD", b"BASH_EXECUTION_STRING")
"""Variables of the shell itself, which would mislead a task. So would `_`."""


class Need(NamedTuple):
    """The archive of the runtime is wanted; it is sent as bytes."""

    digest: str


Steps = Generator[Union[Command, Need, float], Any, Share]
TRY_S = 0.1
"""Between two calls of `NodeLock.take`, until it has its turn or `TURN_S` are over."""


def steps(share: Share) -> Steps:
    """Prepare and check what the plan asks of this host before files are copied; return the share with what was found.

    Raises:
        PreflightFailure: the host cannot take its part.
        OSError: of the system, in a step that expected none.
    """
    plan = share.plan
    if len(plan.places) < 2:  # on this node
        share = yield from _shared(share)
    else:
        lock, until = NodeLock(share.folder), time.monotonic() + TURN_S
        try:
            while not lock.take() and time.monotonic() < until:
                yield TRY_S
            share = yield from _shared(share)
        finally:
            lock.release()
    if plan.gives_gpus:
        from distrun_runtime.agent import helper  # most jobs give their tasks none

        share = yield from helper.looked(share)
    return share if _may_be_copied(share) else (yield from _environment(share, may_come=plan.sync is not None))


def _shared(share: Share) -> Steps:
    """Make or find what all places of a node share: the folders of tasks, and the runtime."""
    plan = share.plan
    if plan.sync is not None or any(task.cwd for task in plan.tasks):
        check_folders(plan, share.host)
    folder, digest = plan.runtime.path, plan.runtime.digest
    if digest and not folder:
        from distrun_runtime.agent import cache

        folder = cache.find(digest) or cache.keep(digest, (yield Need(digest)), share.folder)
    return share._replace(runtime=folder)


def settle(share: Share) -> Steps:
    """Activate and check what may have come with the files. Returns and raises as `steps`."""
    if share.plan.sync is not None:
        _check_cwds(share.plan, share.host, copied=True)
    return share if share.has_environment else (yield from _environment(share))


def _may_be_copied(share: Share) -> bool:
    """Return whether the environment of tasks, or an interpreter with its modules, may come with the files."""
    plan = share.plan
    if plan.sync is None or not (plan.activate or plan.imports or any(task.needs for task in plan.tasks)):
        return False
    if plan.sync.brings:
        return True
    paths = list(plan.sync.activated)
    for task in plan.tasks:
        if task.needs or plan.imports:
            env, program = share.environment(task, task.env), task.argv[0] if task.needs else plan.program
            paths += [program] if "/" in program else []
            paths += os.fsdecode(b":".join(env.get(name, b"") for name in (b"PATH", b"PYTHONPATH"))).split(":")
    return any(path and is_copied(path, plan) for path in paths)


def _environment(share: Share, may_come: bool = False) -> Steps:
    """Activate and check interpreters and programs. `may_come`: files are copied afterwards."""
    plan = share.plan
    if plan.activate:
        command = activation(plan.activate, share.base, share.marks, share.cwd)
        share = share._replace(base=activated((yield command), command, share.host))
        if share.devices is not None:
            from distrun_runtime.agent import helper

            share = helper.chosen(share)  # the activation may have set which are visible
    if any(task.needs for task in plan.tasks):
        share = yield from chosen(share)
    if plan.program:
        yield from _look_for_program(share, may_come)
    return share._replace(has_environment=True)


class Preflight:
    """Takes the steps of one agent, to `ready` or to `settled`, and runs the command that the current one waits for."""

    def __init__(
        self,
        todo: Steps,
        selector: selectors.BaseSelector,
        *,
        ask_for: Callable[[str], None],
        on_done: Callable[[Share], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        """`ask_for` gets the digest of a runtime. One of `on_done` and `on_failed` is called at the end."""
        self._steps: Optional[Steps] = todo
        self._selector = selector
        self._ask_for = ask_for
        self._on_success = on_done
        self._on_failed = on_failed
        self._command: Optional[RunningCommand] = None
        self._needed = ""
        self._resume_at = math.inf
        """When the steps go on that let time pass."""
        self._archive = bytearray()

    @property
    def is_over(self) -> bool:
        """Whether it ended, by success or failure or because it was cancelled."""
        return self._steps is None

    @property
    def deadline(self) -> float:
        """When `expire` is to be called; infinite: never."""
        return self._command.deadline if self._command is not None else self._resume_at

    def proceed(self, result: Any = None) -> None:
        """Take the next step, given the result of the last one."""
        if self._steps is None:
            return
        self._resume_at = math.inf
        try:
            wanted = self._steps.send(result)
        except StopIteration as end:
            self._steps = None
            self._on_success(end.value)
        except (RuntimeFault, OSError) as err:
            self._steps = None
            self._on_failed(err)
        else:
            if isinstance(wanted, Need):
                self._needed = wanted.digest
                self._ask_for(wanted.digest)
            elif isinstance(wanted, float):
                self._resume_at = time.monotonic() + wanted
            else:
                self._command = RunningCommand(wanted, self._selector, self._on_done)
                self._command.start()

    def take_runtime(self, digest: str, piece: bytes, offset: int = 0, is_last: bool = True, fault: str = "") -> bool:
        """Take a piece of the archive that was asked for; return False if none was, or another.

        `fault`: why there will be no further pieces although they are missing.
        """
        if self._steps is None or not self._needed or digest != self._needed:
            return False
        self._archive[offset:] = piece
        if fault:
            self.cancel()
            self._on_failed(RuntimeFault(f"the runtime was not sent whole: {fault}"))
        elif is_last:
            archive, self._archive, self._needed = bytes(self._archive), bytearray(), ""
            self.proceed(archive)
        return True

    def reaped(self, pid: int, status: int) -> None:
        """Note the end of a child, if it was the command's."""
        if self._command is not None:
            self._command.reaped(pid, status)

    def expire(self) -> None:
        """Kill the command, whose time is over; or go on."""
        if self._command is not None:
            self._command.expire()
        else:
            self.proceed()

    def cancel(self) -> None:
        """Take no further step; kill the command."""
        if self._steps is not None:
            self._steps.close()
        self._steps, self._resume_at = None, math.inf
        if self._command is not None:
            self._command.cancel()
            self._command = None

    def _on_done(self, done: CommandResult) -> None:
        self._command = None
        self.proceed(done)


# Folders of tasks


def check_folders(plan: Plan, host: str) -> None:
    """Check the folders of the plan's tasks, and make the one that files will be copied to.

    Raises:
        PreflightFailure: one is missing, cannot be made or used, or has too little room.
    """
    if plan.sync is not None:
        from distrun_runtime.contract.folder import FolderUnfit

        try:
            prepare_folder(plan, plan.sync, f" on {host}")
        except FolderUnfit as err:
            raise PreflightFailure(err.kind, str(err), err.fix) from None
    _check_cwds(plan, host, copied=False)


def prepare_folder(plan: Plan, sync: Sync, on: str, mark: str = "") -> PreparedFolder:
    """Make the folder that files are copied to. `on`, `mark`, what it returns and raises: as `folder.prepare`."""
    from distrun_runtime.contract.folder import prepare  # most jobs copy no files

    size, files, delete, source = sync.size, sync.files, sync.delete, sync.identity
    return prepare(plan.cwd, on, size=size, files=files, delete=delete, source=source, mark=mark)


def is_copied(path: str, plan: Plan) -> bool:
    """Return whether a path is where files are copied to, or below it; a relative one is seen from there."""
    if plan.sync is None:
        return False
    place = os.path.normpath(os.path.expanduser(plan.cwd))
    path = os.path.normpath(os.path.join(place, os.path.expanduser(path)))
    return (path + os.sep).startswith(place.rstrip(os.sep) + os.sep)


def _check_cwds(plan: Plan, host: str, copied: bool) -> None:
    """Check the folders in which tasks run: those that come with the files, or the others. Raises PreflightFailure."""
    for cwd in dict.fromkeys(task.cwd for task in plan.tasks if task.cwd and is_copied(task.cwd, plan) == copied):
        folder = os.path.expanduser(cwd)
        # Not `folder.expand`: that takes a relative path from the home directory, and its error speaks of
        # --sync-dst-dir.
        if folder.startswith("~"):  # as it stands it would be a folder `~NAME` below the home directory
            text = f"there is no user {cwd.partition('/')[0]} on {host}"
            raise PreflightFailure("folder", text, "give a directory of a user that all hosts have")
        fix = "" if plan.backend == "local" else "copy it there with --sync-dst-dir DIR, or mount it"
        why = cannot_run_in(folder, f" on {host}")
        if why:
            raise PreflightFailure("folder", f"{cwd} {why}", fix)


# Activation


def activation(script: str, base: Mapping[bytes, bytes], marks: Mapping[str, str], cwd: str) -> Command:
    """Return the command that runs the shell text of `--activate`, in the environment `base` and the folder of tasks.

    A login shell reads the text from a descriptor, so that no process list shows it. Then our own interpreter writes
    the variables to a pipe. What either prints is ignored unless it fails. `marks` are variables that identify its
    processes.
    """
    import shlex  # only for this

    text = _SCRIPT % (script, shlex.quote(sys.executable), shlex.quote(_DUMP), FD.decode())
    env = dict(base)
    env.update((os.fsencode(name), os.fsencode(value)) for name, value in marks.items())
    argv = (b"bash", b"-l", b"/dev/fd/" + SCRIPT)
    return Command(argv, env, os.fsencode(working_folder(cwd)), ACTIVATE_S, text.encode("utf-8", "surrogateescape"))


def activated(done: CommandResult, asked: Command, host: str) -> Dict[bytes, bytes]:
    """Return the environment that the activation made.

    Raises:
        PreflightFailure: it failed, took too long or told nothing; with the end of what it printed.
    """
    if done.fault == NOT_FOUND:
        raise PreflightFailure(
            "activation", f"--activate needs bash, and there is none on {host}", "install bash there"
        )
    if done.code is None:
        what = f"did not end within {asked.limit_s:g} s" if done.fault == TIMED_OUT else "cannot be run"
    elif done.code != 0:
        what = f"failed ({f'exit code {done.code}' if done.code > 0 else f'signal {-done.code}'})"
    elif not done.result.endswith(_END):
        what = "ended without telling its variables"
    else:
        pairs = (entry.partition(b"=") for entry in done.result[: -len(_END)].split(b"\0"))
        found = {name: value for name, equals, value in pairs if equals and name not in (b"", b"_", *_OF_THE_SHELL)}
        return {**found, **{name: asked.env[name] for name in _OF_THE_SHELL if name in asked.env}}
    text = "\n".join([f"activation on {host} {what}", *done.last_lines.splitlines()])
    fix = f"try it there by hand: ssh {host}, then bash -l and the text of --activate"
    raise PreflightFailure("activation", text, fix)


# Looks for the program of the user's command and for its script, and asks the program, a Python, for the modules that
# the script imports. Only what is certain is a failure.


_FIND = f"""\
import sys
if sys.path[:1] == [""]:
    del sys.path[0]  # a script has its own folder there, not the working directory
{ABOUT}
found["has_script"] = os.path.exists(names.pop(0))
if sys.version_info >= (3, 4):
    def is_missing(name):
        try:
            return find_spec(name) is None
        except Exception:
            return False  # as of a module that took its own place
    found["missing"] = [name for name in names if is_missing(name)]
{TELL}"""


def _look_for_program(share: Share, may_come: bool) -> Generator[Command, CommandResult, None]:
    """Check the program that tasks of the user's run. Yields commands, and is sent how each ended.

    Raises:
        PreflightFailure: it, its script or a module is not there (kinds `facts.PROGRAM`, `SCRIPT` and `IMPORT`).
    """
    plan, seen = share.plan, set()
    name, sync = os.path.expanduser(exact(plan.program)), plan.sync if may_come else None
    for task in plan.tasks:
        env = share.environment(task, task.env)
        paths = tuple(programs(name, task.cwd, env))
        if task.needs or paths in seen:
            continue
        seen.add(paths)
        why = _why_absent(paths, plan, sync)
        if why is not None:
            shown = re.sub("(?s)=.*", "=...", plan.program)  # the value of an assignment may be a secret
            text = f"there is no program {shown} on {share.host}{in_no_folder(plan.program)}{why}"
            brings = "install it there, give its path, or put its folder on PATH by --activate"
            is_script = "/" not in shown and shown.endswith(
                (".py", ".sh")
            )  # as a rule of the job's folder, not of PATH
            fix = "" if "=" in shown else near(shown, () if is_script else paths) or brings
            raise PreflightFailure(facts.PROGRAM, text, fix)
        script = os.path.join(os.path.expanduser(exact(task.cwd)), exact(plan.script))
        why = _why_absent([script], plan, sync) if plan.script else None
        look: Dict[str, Any] = {}
        is_asked = bool(plan.imports) or why is not None
        if is_asked and any(map(os.path.exists, paths)):
            asked = command(name, (plan.script, *plan.imports), env, exact(working_folder(task.cwd)), look=_FIND)
            look = parsed((yield asked)) or {}
        # A program that enters a container may have the script there.
        is_certain = look.get("has_script") is False or os.path.exists(script)
        if why is not None and is_certain:
            where = "" if os.path.isabs(plan.script) else f" in {task.cwd}"
            fix = "copy it there with --sync-dst-dir DIR, or mount it" * (plan.backend != "local" and not plan.sync)
            text = f"there is no {plan.script}{where} on {share.host}{why}"
            raise PreflightFailure(facts.SCRIPT, text, near(plan.script, [script]) or fix)
        modules = look.get("missing")
        if modules:
            named = ", ".join(f"{module} ({plan.imports[module]})" for module in modules)
            text = f"{look['path']} on {share.host} (Python {look['version']}) has no module {named}"
            raise PreflightFailure(facts.IMPORT, text, typed(share, look, modules) or "install it there")


def _why_absent(paths: Sequence[bytes], plan: Plan, sync: Optional[Sync]) -> Optional[str]:
    """Return why none of these files is there when tasks start, as the end of a sentence; None if one may be.

    `sync`: files are copied before that.
    """
    why = ""
    for path in paths:
        text, stays = os.fsdecode(path), True
        if sync is not None and is_copied(text, plan):
            name = os.path.relpath(text, os.path.expanduser(plan.cwd))
            if name not in sync.lacks:
                return None
            stays, why = sync.lacks[name], ", and the files that are copied have none"
        if os.path.exists(path):
            if stays:
                return None
            why = " after the copy, because --sync-delete deletes it"
    return why


NAMES = 5000
"""How many names of a folder are compared with what was typed, at most: it takes some 40 µs each."""


def near(typed: str, paths: Sequence[bytes]) -> str:
    """Return a question for a file of a near name in place of one that is not there; empty if there is none."""
    import difflib  # for a mistake only

    names: List[str] = []
    for path in paths:
        with contextlib.suppress(OSError), os.scandir(os.path.dirname(path) or b".") as entries:
            names += [os.fsdecode(each.name) for each in itertools.islice(entries, NAMES)]
    folder, slash, name = typed.rpartition("/")
    found = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {folder}{slash}{found[0]}?" if found else ""


# The lock by which the places of one node take turns where they share something.
#
# They share the unpacked runtime, and the folder that files are copied to: one of them makes it, the others find it.
# The lock is a file in the user's private folder on the host, which stays there. The system releases it if its holder
# dies.


NAME = ".lock"
"""Begins with a dot, so that it is no job's."""
TURN_S = 30.0
"""How long an agent waits for its turn. Then it goes on without: what is shared is made so that this does no harm."""


class NodeLock:
    """One agent's handle of the lock. It never waits.

    `folder`: the agent's private folder, HOSTDIR/JOB/PLACE (`record`).
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(os.path.dirname(os.path.dirname(folder)), NAME)
        self._descriptor = -1

    def take(self) -> bool:
        """Take the lock, or go on without where none can be had; return False while another agent has it."""
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a full disk, a file system without locks
            self.release()
        return True

    def release(self) -> None:
        """Let the others have their turn. May be repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
