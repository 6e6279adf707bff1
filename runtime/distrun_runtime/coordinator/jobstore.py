"""The job store: one folder a job under `$XDG_STATE_HOME/distrun/jobs`. SKELETON: signatures are settled."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional

from distrun_runtime.contract.plan import Plan
from distrun_runtime.coordinator.outcome import Outcome


class JobFolder:
    """One job's folder: plan.json, state.json, events.jsonl, launcher.json, outcome.json, logs/."""

    path: Path
    id: str

    def log_path(self, task: str) -> Path:
        """Return where the log of `task` is, or will be."""
        raise NotImplementedError

    def tail(self, task: str, lines: int) -> List[str]:
        """Return the last lines of a task's log, decoded, without newlines; [] if there is none."""
        raise NotImplementedError

    def plan(self) -> Plan:
        """Read plan.json."""
        raise NotImplementedError

    def state(self) -> Dict[str, Any]:
        """Read state.json (schema distrun.job/1), with "state" = "lost" when the launcher died before the end."""
        raise NotImplementedError

    def outcome(self) -> Optional[Dict[str, Any]]:
        """Read outcome.json; None while the job is not over."""
        raise NotImplementedError

    def launcher(self) -> Dict[str, Any]:
        """Read launcher.json: {"pid", "start", "host", "version"}."""
        raise NotImplementedError

    def finish(self, outcome: Outcome) -> None:
        """Write the end. The loop does this; call it only when a job ended before its loop ran."""
        raise NotImplementedError


class JobStore:
    """All jobs of this user. `root` is `$XDG_STATE_HOME/distrun`; None: find it."""

    def __init__(self, root: Optional[Path] = None) -> None:
        raise NotImplementedError

    def new_id(self, name: str = "") -> str:
        """Return an id that no job of the store has: `calm-otter-7f3`, or `NAME-7f3`."""
        raise NotImplementedError

    def create(self, plan: Plan, run_dir: Optional[Path] = None) -> JobFolder:
        """Make the folder of `plan.job`, state starting, this process as its launcher."""
        raise NotImplementedError

    def find(self, wanted: str) -> JobFolder:
        """Return the job with that id, unique beginning of an id, or exact name. Raises NoSuchJob."""
        raise NotImplementedError

    def list(self) -> List[JobFolder]:
        """Return all jobs, newest first."""
        raise NotImplementedError
