"""`distrun launch --launcher tsp`: the queue of one machine, Debian's task-spooler; each job of it is one place."""

import re
import socket
from typing import NamedTuple

from distrun.backends import engine

PLACE = "here"
ROW = re.compile(r"(\d+)\s+(\w+)\s.*?\[(distrun-[a-z0-9-]+)\]")
MISSING = "install it:  apt install task-spooler"


class Row(NamedTuple):
    """What `tsp` lists of a job of distrun's: 7, `running`, and what the job is called."""

    id: str
    state: str
    marker: str


class TaskSpooler(engine.Engine):
    """This user's queue on this machine. A job takes one slot of it, and all its tasks run there."""

    name = "tsp"

    def render(self, submission: engine.Submission) -> engine.Script:
        agent = submission.bootstrap.command(submission.python, PLACE, str(submission.secret_file))
        return engine.Script(commands=(("tsp", "-n", "-L", submission.marker, *agent),))

    def look(self, handle: engine.Handle) -> engine.QueueStatus:
        rows = listed()
        mine = [row for row in rows if row.marker == handle.id]
        if not mine:
            return engine.QueueStatus(engine.ENDED, "it is not in the queue")
        if mine[0].state == "running":
            return engine.QueueStatus(engine.RUNNING, "", (engine.Grant(PLACE, socket.gethostname()),))
        before = rows.index(mine[0])
        return engine.QueueStatus(engine.QUEUED, f"{before} of distrun's jobs are before it")

    def cancel(self, handle: engine.Handle) -> None:
        for row in listed():
            if row.marker == handle.id:
                # What runs gets SIGTERM, and the agent ends its tasks; what waits is taken out.
                tsp("-k" if row.state == "running" else "-r", row.id)

    def find(self) -> list[engine.FoundJob]:
        return [engine.FoundJob(engine.Handle(self.name, row.marker), row.marker, row.state) for row in listed()]

    def examine(self) -> list[engine.CheckResult]:
        return [engine.CheckResult(True, f"tsp runs {tsp('-S').strip()} at once; tsp -S N changes that")]


def listed() -> list[Row]:
    """Return distrun's jobs that wait or run."""
    found = [Row(*match.groups()) for match in map(ROW.match, tsp().splitlines()) if match]
    return [row for row in found if row.state not in ("finished", "skipped")]


def tsp(*words: str) -> str:
    """Return what tsp prints. Raises EngineError with what it says."""
    return engine.ask(("tsp", *words), MISSING)
