"""A queue system in a folder: real processes on this machine, what is to happen said by files. For tests of the base.

`$FOLDERQUEUE` is the folder. A job waits while there is a file `full`, with the text that says why. Each place is a
process that runs the rendered script; all of a job are ended by one group id. `refuse` makes it refuse jobs,
`silent` lets it answer nothing, `stays` keeps a cancelled job in the queue, `fault` is a fault in its code (once),
`why` holds `CODE TEXT`, its explanation of a failure. While there is a file `slow`, a question before the submission is
not answered; `asked` then has the number of the process that asks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from slowness import scaled

from distrun import formats
from distrun.backends.engine import (
    ENDED,
    QUEUED,
    RUNNING,
    CheckResult,
    Engine,
    EngineError,
    Explanation,
    FoundJob,
    Grant,
    Handle,
    Preparation,
    QueueStatus,
    Script,
    Submission,
)
from distrun_runtime.contract import process

ENTRY_POINT = "[distrun.backends]\nfolderqueue = folderqueue:FolderQueue\n"


def install(folder: Path) -> dict[str, str]:
    """Make `--launcher folderqueue` known to a command that gets these variables; its queue is `folder`."""
    info = folder / "site" / "folderqueue-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: folderqueue\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    path = f"{info.parent}:{Path(__file__).parent}"
    return {"PYTHONPATH": path, "FOLDERQUEUE": str(folder)}


class FolderQueue(Engine):
    name = "folderqueue"
    takes = ("--docker-image",)

    @property
    def folder(self) -> Path:
        return Path(os.environ["FOLDERQUEUE"])

    def _is(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            return None

    def _check(self) -> None:
        if self._is("silent") is not None:
            raise EngineError("folderqueue does not answer", "remove the file silent")

    def prepare(self, submission: Submission) -> Preparation:
        if self._is("slow") is not None:
            (self.folder / "asked.new").write_text(str(os.getpid()))
            (self.folder / "asked.new").rename(self.folder / "asked")
        while self._is("slow") is not None:
            time.sleep(0.05)
        return Preparation()

    def render(self, submission: Submission) -> Script:
        command = submission.bootstrap.command(submission.python, "env:PLACE", str(submission.secret_file))
        return Script({"job.sh": f"#!/bin/sh\nexec {formats.join(command)}\n"}, (("folderqueue", "job.sh"),))

    def submit(self, submission: Submission, script: Script) -> Handle:
        why = self._is("refuse")
        if why is not None:
            raise EngineError(f"folderqueue refused it: {why}", "remove the file refuse")
        places = [f"{group.role}-{rank}" for group in submission.groups for rank in range(group.count)]
        path = self.folder / f"{submission.marker}.json"
        path.write_text(json.dumps({"script": str(submission.folder / "job.sh"), "places": places, "pids": []}))
        return Handle(self.name, submission.marker)

    def look(self, handle: Handle) -> QueueStatus:
        self._check()
        if self._is("fault") is not None:
            (self.folder / "fault").unlink()
            1 / 0  # noqa: B018
        path = self.folder / f"{handle.id}.json"
        if not path.exists():
            return QueueStatus(ENDED, "unknown")
        job = json.loads(path.read_text())
        if job.get("cancelled") and self._is("stays") is None:
            path.unlink()
            return QueueStatus(ENDED, "cancelled")
        if not job["pids"]:
            why = self._is("full")
            if why is not None:
                return QueueStatus(QUEUED, why)
            job["pids"] = [self._start(job["script"], place) for place in job["places"]]
            path.write_text(json.dumps(job))
        living = [process.is_alive(process.Identity(*each)) for each in job["pids"]]
        if not any(living):
            return QueueStatus(ENDED, "all its processes have ended")
        grants = tuple(Grant(place, "here", {place.partition("-")[0]: 1}) for place in job["places"])
        gone = {
            place: "its process was killed"
            for place, is_there in zip(job["places"], living, strict=True)
            if not is_there
        }
        return QueueStatus(RUNNING, "", grants, gone)

    def _start(self, script: str, place: str) -> tuple[int, str]:
        with (self.folder / f"{place}.out").open("wb") as out:
            child = subprocess.Popen(
                [script],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "PLACE": place, "HOME": str(self.folder)},
                start_new_session=True,
            )
        return process.identity(child.pid)

    def cancel(self, handle: Handle) -> None:
        self._check()
        path = self.folder / f"{handle.id}.json"
        job = json.loads(path.read_text()) if path.exists() else {"pids": []}
        if self._is("stays") is not None:
            path.write_text(json.dumps({**job, "cancelled": True}))
            return
        for pid, start in job["pids"]:
            if process.is_alive(process.Identity(pid, start)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGTERM)
        until = time.monotonic() + scaled(20)
        while any(process.is_alive(process.Identity(*each)) for each in job["pids"]) and time.monotonic() < until:
            time.sleep(0.05)
        path.unlink(missing_ok=True)

    def explain(self, handle: Handle, place: str) -> Explanation | None:
        code, _, text = (self._is("why") or "").partition(" ")
        return Explanation(int(code), text) if code else None

    def find(self) -> Sequence[FoundJob]:
        self._check()
        paths = self.folder.glob("distrun-*.json")
        return [FoundJob(Handle(self.name, path.stem), path.stem, "there") for path in sorted(paths)]

    def examine(self) -> Sequence[CheckResult]:
        return [CheckResult(True, f"the queue is {self.folder}")]
