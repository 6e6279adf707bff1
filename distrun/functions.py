"""Calls a function on the workers of a job, and returns what it returned on each.

    import work
    with launch_function(work.train, 0.1, workers=4, hosts=["h1", "h2"], sync_dst_dir="~/job") as job:
        first, *others = job.results()

A worker imports the function by the name of its module. Arguments and results are JSON values, bytes and arrays of
numpy or torch, and an exception comes as texts: nothing is pickled, so no host can run code here by what it returns.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from distrun.errors import DistrunError, UsageError
from distrun.jobs import Job, Jobs
from distrun.requesting import Request
from distrun_runtime import calling
from distrun_runtime.contract import environ
from distrun_runtime.contract.plan import WORKER
from distrun_runtime.errors import KVError

Result = TypeVar("Result")
ARGUMENTS_SIZE = 120_000
"""Characters that packed arguments may take: Linux limits one variable to 128 KiB."""


class FunctionError(DistrunError):
    """The function raised an exception on a worker."""

    def __init__(self, rank: int, where: str, told: Mapping[str, str]) -> None:
        self.rank = rank
        self.type = told["type"]
        """Name of the exception's class."""
        self.text = told["text"]
        self.traceback = told["traceback"]
        """What Python would print of it."""
        hint = ""
        if self.type == "ModuleNotFoundError":
            hint = "workers need it where they start, or installed: sync_dst_dir='~/job' copies this folder to hosts"
        super().__init__(f"{where}: {self.type}: {self.text}\n\n{self.traceback}", hint)


class FunctionJob(Job, Generic[Result]):
    """A job whose workers call a function. `FunctionJob(job.folder)` is that of a job that was launched before."""

    def results(self, timeout_s: float | None = None) -> list[Result]:
        """Wait until the job is over; return what the function returned, by the ranks of the workers.

        Tuples come as lists, and arrays and tensors in host memory.

        Raises:
            TimeoutError: the job is not over after `timeout_s`.
            FunctionError: the function raised an exception; that of the worker that failed first.
            DistrunError: the job failed otherwise, or a result is lost.
        """
        code = self.wait(timeout_s)
        readers = {str(row["name"]): (calling.ResultReader(), -1) for row in self.tasks if row["role"] == WORKER}
        for piece in self.logs(WORKER):
            reader, attempt = readers[piece.task]
            if piece.stream in ("out", ""):
                if piece.attempt != attempt:  # a task that was started again tells it again
                    reader = calling.ResultReader()
                    readers[piece.task] = reader, piece.attempt
                reader.feed(piece.data)
        outcome = self.outcome or {}
        texts = {name: text for name, (reader, _) in readers.items() if (text := reader.text()) is not None}
        if code:
            culprit = outcome.get("culprit") or {}
            answer = self._answer(culprit.get("task", ""), texts)
            if "error" in answer:
                rank = next(row["rank"] for row in self.tasks if row["name"] == culprit["task"])
                raise FunctionError(rank, f"{culprit['task']} on {culprit['host']}", answer["error"])
            raise DistrunError(f"job {self.id}: {outcome.get('message')}", f"distrun logs {self.id}")
        results = []
        for name in readers:
            answer = self._answer(name, texts)
            if "value" not in answer:
                raise DistrunError(f"job {self.id}: {name} has told no result, and ended with code 0", self._hint(name))
            results.append(answer["value"])
        return results

    def _answer(self, name: str, texts: Mapping[str, bytes]) -> Mapping[str, Any]:
        """Return what a worker told, `value` or `error`; nothing if there is none."""
        if name not in texts:
            return {}
        try:
            found = calling.unpack(texts[name], f"the result of {name}")
        except KVError as err:
            raise DistrunError(f"job {self.id}: {err}", self._hint(name)) from err
        return found if isinstance(found, dict) else {}

    def _hint(self, name: str) -> str:
        return f"did the function end the process, or is its output above log_limit? see: distrun logs {self.id} {name}"


def launch_function(
    function: Callable[..., Result],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    workers: int = 1,
    servers: int = 0,
    hosts: str | Sequence[str] | None = None,
    env: Mapping[str, object] | None = None,
    python: str = "",
    jobs: Jobs | None = None,
    **options: Any,
) -> FunctionJob[Result]:
    """Launch a job whose workers each call `function(*args, **kwargs)`.

    Each worker has its rank in DISTRUN_RANK, and may open a store if there are servers.

    Args:
        function: a function at the top of a module, or of a class there, which workers can import by its name.
        *args: JSON values, bytes, and arrays of numpy or torch; at most about 90 KB, with `kwargs`, when compressed.
        kwargs: arguments by name.
        workers, servers, hosts, env: as for `Request`.
        python: the Python of workers and servers; empty: this one on this machine, else the python3 of the host.
        jobs: launches it; None: `Jobs()`.
        **options: as for `Request`.

    Raises:
        UsageError: workers could not import the function; arguments of other types, or too large; or what
            `Jobs.launch` raises.
    """
    name = _name(function)
    try:
        packed = calling.pack([list(args), dict(kwargs or {})], f"the arguments of {name}")
    except KVError as err:
        raise UsageError(str(err)) from err
    if len(packed) > ARGUMENTS_SIZE:
        raise UsageError(
            f"the arguments of {name} take {len(packed)} bytes when packed, expected at most {ARGUMENTS_SIZE}",
            "write large arrays to a file that workers can read, and give its path",
        )
    jobs = jobs or Jobs()
    given = {**(env or {}), calling.CALL: packed}
    if folder := _folder(function.__module__):
        others = given.get("PYTHONPATH") or environ.text("PYTHONPATH")
        given["PYTHONPATH"] = f"{folder}{os.pathsep}{others}" if others else folder
    if python:
        options["python"] = python
    command = [python or "python3", "-m", calling.__name__, name]
    asked = Request(command, workers=workers, servers=servers, hosts=hosts, env=given, **options).resolve(jobs.say)
    if not python and asked.launcher == "local":
        here = (sys.executable, *command[1:])
        asked = dataclasses.replace(asked, command=here, given={**asked.given, "command": here})
    job = jobs.launch(asked)
    return FunctionJob(job.folder, job.say, job.is_owned)


def _name(function: Callable[..., Any]) -> str:
    """Return the name of a function for workers, `MODULE:NAME`. Raises UsageError: it has none."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if path == "<lambda>" or (path and "<locals>" in path):
        kind = "a lambda" if path.endswith("<lambda>") else f"{path}, which is defined within a function,"
        raise UsageError(
            f"launch_function: {kind} has no name by which workers could import it",
            "write it with def at the top of a module",
        )
    if module == "__main__":
        raise UsageError(
            f"launch_function: workers cannot import {path} from __main__, which is this program",
            f"move it to a file, such as work.py in this folder, and type: from work import {path}",
        )
    name = f"{module}:{path}"
    try:
        found = calling.resolve(name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if not module or not path or found != function:
        raise UsageError(
            f"launch_function: expected a function that workers can import by its name, found {function!r:.80}",
            "give the function of a module, and what a method or partial binds as arguments",
        )
    return name


def _folder(module: str) -> str:
    """Return the folder that has a module's outermost package, if workers do not look there by themselves."""
    file = getattr(sys.modules[module], "__file__", None)
    if not file:
        return ""
    path = Path(file).absolute()
    folder = path.parents[module.count(".") + (path.stem == "__init__")]
    here = Path.cwd()
    is_installed = folder.name in ("site-packages", "dist-packages") or folder == Path(sysconfig.get_path("stdlib"))
    if folder == here or is_installed:
        return ""
    return str(folder.relative_to(here) if here in folder.parents else folder)
