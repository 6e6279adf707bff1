"""What benchmarks on a GPU have found: rows, the file that keeps them, and the tables of docs/benchmarks.md.

The file is written after each part of a run, so that what was measured stays when the run is cut off. Nothing here
needs a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"
FORMAT = 1

DONE, FAILED, CUT = "done", "failed", "out of time"
"""How a part ends; of the last one what was found before stands."""

NOT_MEASURED = "not measured"

TEXT_LENGTH = 4000
"""Of what a part has printed, so many characters are kept: the last ones."""
GRACE_S = 5.0
"""A process that is to end has so long before it is killed."""


@dataclass(frozen=True)
class Goal:
    """A goal, and which rows say whether it is reached."""

    work: str
    text: str


GOALS: dict[str, Goal] = {
    "sums": Goal("sum of k = 2, 4, 8 arrays of 1 GB, against the copy bandwidth", "90 %"),
    "model": Goal("sum of ResNet-50's tensors, against the copy bandwidth", "75 % by events; 0.3 ms wall at k = 2"),
    "peers": Goal(
        "sums against `torch.add(out=)` at k = 2, naive sums of torch and cupy at k = 4, 8, `torch._foreach_add_`",
        "0.97x; 1.6x, 2x; 1x",
    ),
    "codecs": Goal("2-bit, 1-bit and fp16 kernels, against the copy bandwidth", "80 %"),
    "rules": Goal("sgd, adam, adamw against torch fused; other rules against `foreach`", "not slower"),
    "copies": Goal("copies out and in, against the measured bus", "90 % from 4 MiB"),
    "stores": Goal("`device` against `local`, from arrays on the GPU", "10x"),
    "calls": Goal(
        "calls of a `device` store: ResNet-50's tensors with sgd, k = 2; without a rule, k = 1, 4; the first `init`; a"
        " pair of 1 GB against torch",
        "1.5 ms; 1.2 ms, 3 ms; 1 s; not slower",
    ),
    "jobs": Goal("`dist_device_sync` against `dist_sync` at k = 1, 4", "not slower; 1.5x"),
    "round": Goal("a round of 2 workers and 2 servers on one GPU, against its bytes over the bus", "within 2x"),
    "cores": Goal(
        "a round in host memory on 16 cores: ResNet-50 by 2 and 4 workers, with `kv.empty`; vgg16; against gloo",
        "25, 35, 20 ms; 90 ms; 3x",
    ),
}
"""By the name of the section that measures it."""


@dataclass(frozen=True)
class Row:
    """One comparison. All times are medians of the runs, in seconds."""

    work: str
    against: str
    """A limit or a peer."""
    wall_s: float
    """Of one call and the wait for its end."""
    theirs_s: float
    ratios: list[float]
    """Theirs divided by ours, run by run: a part of the limit, or by how much we are faster."""
    goal: float | None = None
    """The least ratio that is wanted; None: the row is only shown."""
    event_s: float | None = None
    """Between two events on the GPU; the ratios are of these times where there are any."""
    moved_bytes: int = 0
    """Read and written, in the memory or over the bus that limits it."""
    error: float | None = None
    """Relative distance of the result from a float64 reference."""
    ours_s: list[float] = field(default_factory=list)
    """The times of the ratios, run by run; `their_runs_s` has the other's."""
    their_runs_s: list[float] = field(default_factory=list)
    theirs_wall_s: float | None = None
    """Of one call of theirs and the wait for its end."""
    waits: int = 0
    """Runs in which the GPU may have waited for the program, ours or theirs: by events, they took too long."""

    @property
    def ratio(self) -> float:
        """The median of the runs' ratios."""
        return statistics.median(self.ratios)

    @property
    def is_reached(self) -> bool | None:
        """Whether the goal is reached; None: there is none."""
        return None if self.goal is None else self.ratio >= self.goal


@dataclass
class Part:
    """What one part of a run has found: a section of the benchmarks, or a check."""

    name: str
    state: str = CUT
    seconds: float = 0.0
    text: str = ""
    """An error, or the end of what the part has printed."""
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Part:
        """Return the part that `as_json` has written."""
        rows = [Row(**row) for row in given["rows"]]
        return cls(given["name"], given["state"], given["seconds"], given["text"], rows)

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return dataclasses.asdict(self)


@dataclass
class Results:
    """A file of results: where it was measured, on what, and the parts so far."""

    facts: dict[str, Any]
    """`gpu`, `date`, `commit`, `driver`, `cupy`, `torch` and what else `gpu.facts` says."""
    parts: dict[str, Part] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return what a file holds.

        Raises:
            ValueError: it is of another format.
        """
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("format") != FORMAT:
            raise ValueError("%s: expected results of format %d, found %r" % (path, FORMAT, found.get("format")))
        return cls(found["facts"], {each["name"]: Part.of(each) for each in found["parts"]})

    @classmethod
    def begun(cls, path: Path, facts: dict[str, Any], parts: Sequence[str], *, is_same_run: bool = False) -> Results:
        """Return results to which these parts will be added: those of the file, if it is of the same commit and GPU.

        Arguments:
            is_same_run: the file is of this run. Others count only if their commit says which files were measured.
        """
        kept: dict[str, Part] = {}
        if path.exists():
            found = cls.read(path)
            is_known = is_same_run or re.fullmatch(r"[0-9a-f]{40}", str(facts.get("commit")))
            if is_known and all(found.facts.get(name) == facts.get(name) for name in ("gpu", "commit", "small")):
                kept = {name: part for name, part in found.parts.items() if name not in parts}
        return cls(facts, kept)

    def write(self, path: Path) -> None:
        """Write the file whole, in place of what was there."""
        parts = [dataclasses.replace(each, text=without_places(each.text)).as_json() for each in self.parts.values()]
        text = {"format": FORMAT, "facts": self.facts, "parts": parts}
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
        os.replace(fresh, path)


def without_places(text: str) -> str:
    """Return a text without the machine's paths: of this checkout, of temporary files and of the home folder."""
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/[\w.-]+", "TEMPORARY", text.replace(str(ROOT), "CHECKOUT"))
    home = os.path.expanduser("~")  # "/" or "~" where there is none
    return text.replace(home, "HOME") if len(home) > 1 else text


def path_of(facts: Mapping[str, Any], folder: Path = FOLDER) -> Path:
    """Return where results are kept: `gpu-NAME-DATE.json`; `try-NAME-DATE.json`, if arrays are small."""
    name = re.sub(r"[^a-z0-9]+", "-", str(facts["gpu"]).lower()).strip("-")
    return folder / ("%s-%s-%s.json" % ("try" if facts.get("small") else "gpu", name, facts["date"]))


def newest(folder: Path = FOLDER) -> list[Path]:
    """Return the newest file of each GPU."""
    found = {}
    for path in sorted(folder.glob("gpu-*.json"), key=lambda path: path.stem[-10:]):
        found[path.stem[:-11]] = path
    return sorted(found.values())


def today() -> str:
    """Return the date, for a file's name."""
    return datetime.date.today().isoformat()


def commit_here(root: Path = ROOT) -> str:
    """Return the commit of a checkout, with `+changes` if its files are not those; `unknown` where git knows none."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return "unknown"  # a copy inside of another checkout
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run_limited(command: Sequence[str], limit_s: float, **options: Any) -> tuple[int | None, str]:
    """Run a command; return its exit code and the end of what it printed. No code: it ran past the limit and was ended.

    Arguments:
        options: for Popen.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **options
    )
    code: int | None = None
    try:
        output, _ = process.communicate(timeout=max(0.0, limit_s))
        code = process.returncode
    except subprocess.TimeoutExpired:
        output = _ended(process)
    except BaseException:
        _ended(process)
        raise
    return code, output[-TEXT_LENGTH:]


def _ended(process: subprocess.Popen[str]) -> str:
    """End a process and those that it started, which may hold a GPU's memory; return what they had printed."""
    output = ""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + GRACE_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            output = output or process.communicate(timeout=GRACE_S)[0]
        while _works(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not _works(process.pid):
            break
    return output


def _works(group: int) -> bool:
    """Tell whether a process of a group is there that has not ended."""
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = each.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that ends its own when it is told to, and wait for it."""
    process.terminate()
    try:
        process.wait(2 * GRACE_S + 1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# Tables


def goal_state(part: Part | None) -> str:
    """Return in words whether a section's goal is reached."""
    if part is None:
        return NOT_MEASURED
    wanted = [row for row in part.rows if row.goal is not None]
    missed = [row for row in wanted if not row.is_reached]
    if not wanted:
        return NOT_MEASURED + ("" if part.state == DONE else ": " + part.state)
    if part.state == DONE:
        return "%d of %d missed" % (len(missed), len(wanted)) if missed else "reached"
    counts = [(len(wanted) - len(missed), "reached"), (len(missed), "missed")]
    words = ", ".join("%d %s" % each for each in counts if each[0])
    return "not all measured (%s): %s" % (words, part.state)


def overview(found: Sequence[Results]) -> str:
    """Return the table of goals, with a column for each GPU."""
    names = [str(each.facts["gpu"]) for each in found] or ["a GPU"]
    rows = ["| work | goal | %s |" % " | ".join(names), "|---" * (2 + len(names)) + "|"]
    for name, goal in GOALS.items():
        cells = [goal_state(each.parts.get(name)) for each in found] or [NOT_MEASURED]
        rows.append("| %s | %s | %s |" % (goal.work, goal.text, " | ".join(cells)))
    return "\n".join(rows)


def table(rows: Sequence[Row]) -> str:
    """Return one section's rows."""
    lines = ["| work | GPU | wall | GB/s | against | theirs | ratio | goal | |", "|---" * 9 + "|"]
    for row in rows:
        taken = row.wall_s if row.event_s is None else row.event_s
        state = {True: "reached", False: "missed", None: ""}[row.is_reached]
        cells = [
            row.work,
            "" if row.event_s is None else milliseconds(row.event_s) + (" \\*" if row.waits else ""),
            milliseconds(row.wall_s),
            "%.0f" % (row.moved_bytes / taken / 1e9) if row.moved_bytes else "",
            row.against,
            milliseconds(row.theirs_s),
            "%.2f (%.2f-%.2f)" % (row.ratio, min(row.ratios), max(row.ratios)),
            "" if row.goal is None else "%g" % row.goal,
            state,
        ]
        lines.append("| %s |" % " | ".join(cells))
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    """Return a time with three digits or more."""
    return "%.3f" % (seconds * 1e3) if seconds < 0.0995 else "%.1f" % (seconds * 1e3)


def page(found: Sequence[Results], about: str) -> str:
    """Return the section of docs/benchmarks.md.

    Arguments:
        about: what is measured, and how.
    """
    text = [about, overview(found)]
    if not found:
        text.append(
            "No machine with a GPU was at hand, so none of these goals is measured yet.\n"
            "[gpu.md](gpu.md#check-a-machine) says how it is done."
        )
    for each in found:
        facts = each.facts
        text.append("### %s, %s" % (facts["gpu"], facts["date"]))
        known = [(name, facts[name]) for name in ("driver", "cuda", "cupy", "torch", "machine") if facts.get(name)]
        text.append("Commit `%s`. %s." % (facts["commit"], "; ".join("%s %s" % pair for pair in known)))
        for name, goal in GOALS.items():
            part = each.parts.get(name)
            if part is None:
                continue
            text.append("**%s**: %s." % (goal.work, goal_state(part)))
            if part.rows:
                text.append(table(part.rows))
    return "\n\n".join(text)
