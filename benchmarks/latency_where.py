"""Shows what a round of one key costs: threads, system calls, calls of functions. `latency.py --where` prints it.

The job runs once for each kind of cost, as one would spoil the others: recorded functions take several times as long.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from round import ROOT, RUN_TIMEOUT_S, SCRIPTS

ROLES = ("worker", "server")
COPYING = {
    *("copyto", "copy", "tobytes", "memmove", "concatenate"),
    *("send", "send_multipart", "sendmsg", "recv", "recv_into", "recvmsg"),
}
"""C functions that copy values or messages. Assignments to slices copy too, and are not seen."""

Line = dict[str, Any]
"""Of `where_round.py`, or `calls.py`."""


def where(size: int, workers: int, rounds: int, shown: int) -> str:
    """Return tables of what one round of a key of `size` bytes costs, with `shown` functions of each side."""
    parts = [threads_table(job_seen("threads", size, workers, rounds), rounds)]
    if shutil.which("strace"):
        parts.append(system_calls_table(job_seen("system", size, workers, rounds), rounds))
    else:
        say("system calls are left out: no strace. To have it:  apt-get install strace")
    seen = job_seen("calls", size, workers, rounds)
    parts += [calls_table(seen, rounds), files_table(seen, rounds)]
    parts += [functions_table(role, seen, rounds, shown) for role in ROLES]
    return "\n\n".join(parts)


def job_seen(what: str, size: int, workers: int, rounds: int) -> list[Line]:
    """Return the lines of `where_round.py` in a job with one server; end the program if it failed."""
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "--launcher", "local"]
    command += ["-n", str(workers), "-s", "1", "--timeout", str(RUN_TIMEOUT_S), "--env", "OMP_NUM_THREADS=1"]
    if what == "calls":
        command += ["--env", "PYTHONPATH=%s" % SCRIPTS, "--server-import", "calls"]
    command += [sys.executable, str(SCRIPTS / "where_round.py"), str(size), str(rounds), what]
    with tempfile.TemporaryDirectory() as state:
        env = {**os.environ, "XDG_STATE_HOME": state}
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    if result.returncode:
        say("exit code %d from:  %s\n%s" % (result.returncode, shlex.join(command), result.stderr[-2000:]))
        sys.exit(1)
    # Lines of several processes may come in one.
    return [json.loads(each) for each in re.findall(r"\{[^{}]*\}", result.stdout)]


def threads_table(lines: Sequence[Line], rounds: int) -> str:
    """Return what each thread of the job takes in a round."""
    rows = begun("process", "thread", "CPU us", "waits for a processor, us", "sleeps", "driven out")
    seen = sorted((each for each in lines if "used" in each), key=lambda each: (each["who"], each["process"]))
    for each in seen:
        used = [value / rounds for value in each["used"]]
        if used[0] >= 1:
            rows.append(
                "| %s %s | %s | %.0f | %.0f | %.1f | %.1f |" % (each["who"], each["process"], each["thread"], *used)
            )
    total = [sum(each["used"][at] for each in seen) / rounds for at in range(4)]
    rows.append("| all |  | %.0f | %.0f | %.1f | %.1f |" % tuple(total))
    times = [time_s for each in lines for time_s in each.get("times_s", ())]
    return "%s\n\nA round of rank 0: %.2f ms." % ("\n".join(rows), statistics.median(times) * 1e3)


def system_calls_table(lines: Sequence[Line], rounds: int) -> str:
    """Return how often worker 0 and the server make each system call in a round."""
    rows = begun("process", "all", "of them")
    for each in lines:
        if "why" in each:
            rows.append("| %s |  | strace cannot follow it: %s |" % (each["who"], each["why"]))
            continue
        counts = [(name, count / rounds) for name, count in each["calls"]]
        rows.append("| %s | %.1f | %s |" % (each["who"], sum(count for _, count in counts), listed(counts)))
    return "\n".join(rows)


def calls_table(lines: Sequence[Line], rounds: int) -> str:
    """Return how many functions each thread calls in a round, and which of them copy."""
    rows = begun("process", "thread", "Python calls", "C calls", "CPU us, recorded", "copies")
    for each in lines:
        python, c = (count / rounds for count in each["python_c"])
        copies = [(row[0], row[2] / rounds) for row in each["functions"] if not row[1] and is_copy(row[0])]
        if python + c >= 0.5:
            cells = (each["who"], each["thread"], python, c, each["own_ns"] / rounds / 1e3, listed(copies))
            rows.append("| %s | %s | %.0f | %.0f | %.0f | %s |" % cells)
    return "\n".join(rows)


def is_copy(name: str) -> bool:
    """Whether a C function copies values or messages."""
    return name.rpartition(".")[2] in COPYING


def files_table(lines: Sequence[Line], rounds: int) -> str:
    """Return the files with most processor time of their own; C functions count to the file that calls them."""
    rows = begun("process", "thread", "file", "own us, recorded", "part")
    for each in lines:
        for name, taken_ns in each["files"][:12]:
            share = taken_ns / each["own_ns"] * 100
            if share >= 2:
                cells = (each["who"], each["thread"], name, taken_ns / rounds / 1e3, share)
                rows.append("| %s | %s | `%s` | %.0f | %.0f %% |" % cells)
    return "\n".join(rows)


def functions_table(role: str, lines: Sequence[Line], rounds: int, shown: int) -> str:
    """Return the functions of a process with most processor time of their own, over all its threads."""
    its = [each for each in lines if each["who"] == role]
    sums: dict[str, list[int]] = {}
    """Calls, nanoseconds, nanoseconds with what it calls."""
    for name, _, *numbers in (row for each in its for row in each["functions"]):
        sums[name] = [old + new for old, new in zip(sums.get(name, (0, 0, 0)), numbers, strict=True)]
    total_ns = sum(each["own_ns"] for each in its) or 1
    rows = begun("%s: function" % role, "calls", "own us, recorded", "part", "with what it calls, us")
    for name, (count, own_ns, whole_ns) in sorted(sums.items(), key=lambda item: -item[1][1])[:shown]:
        cells = (name, count / rounds, own_ns / rounds / 1e3, own_ns / total_ns * 100, whole_ns / rounds / 1e3)
        rows.append("| `%s` | %.1f | %.1f | %.1f %% | %.1f |" % cells)
    return "\n".join(rows)


def begun(*names: str) -> list[str]:
    """Return the head of a table."""
    return ["| %s |" % " | ".join(names), "|---" * len(names) + "|"]


def listed(counts: Iterable[tuple[str, float]]) -> str:
    """Return names and counts as one text, without those that hardly ever occur."""
    return ", ".join("%s %.1f" % pair for pair in counts if pair[1] >= 0.05)


def say(text: str) -> None:
    """Tell what went wrong."""
    print("latency.py: " + text, file=sys.stderr, flush=True)
