"""Measures small blocking rounds beside gloo, MXNet, pyzmq and the least that a round costs, and where the time goes.

    scripts/install peers                         # once: the peers' virtual environments
    python benchmarks/latency.py --write          # all systems that are there; docs/benchmarks.md
    python benchmarks/latency.py --where          # processor time, system calls and functions of one round
    python benchmarks/latency.py --hosts lab      # between two hosts of a lab (root)

The systems take turns, run by run; a run's value is the median of its rounds, each of which takes as long as its
slowest worker. Ratios are those of the two values of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from round import FOLDER, ROOT, RUN_TIMEOUT_S, SCRIPTS, reports_of, short, slowest

OURS, GLOO, BUCKET, MXNET = "distrun", "gloo", "gloo-bucket", "mxnet"
ROLES = ("worker", "server")
COPYING = {
    "copyto",
    "tobytes",
    "copy",
    "memmove",
    "send",
    "send_multipart",
    "recv",
    "recv_into",
    "recvmsg",
    "sendmsg",
    "concatenate",
}
"""C functions that copy values or messages. Assignments to slices copy too, and are not seen."""


@dataclass(frozen=True)
class Work:
    """One row of the table."""

    name: str
    code: str
    """What `latency_round.py` calls it; bytes of a key, if digits."""
    rounds: int = 200
    workers: int = 2
    servers: int = 1
    goal_ms: float | None = None
    goals: tuple[tuple[str, float], ...] = ()
    """Our time divided by a peer's, at most."""


def _works() -> dict[str, Work]:
    works = [
        Work("4 B", "4", goal_ms=0.3, goals=((GLOO, 1.0),)),
        Work("4 KB", "4096", goal_ms=0.3, goals=((GLOO, 1.0),)),
        Work("64 KB", "65536", goal_ms=0.45, goals=((GLOO, 0.6),)),
        Work("1 MB", str(1 << 20), 40, goal_ms=0.9, goals=((GLOO, 0.6),)),
        Work("4 MB", str(4 << 20), 40, goal_ms=3, goals=((GLOO, 0.6),)),
        Work("4 MB, -s 2", str(4 << 20), 40, servers=2, goal_ms=3, goals=((GLOO, 0.6),)),
        Work("4 B, one worker", "4", workers=1),
        Work("barrier", "barrier", goal_ms=0.3),
        Work("1,000 keys of 1 KB, one call", "small:list", 20, goals=((BUCKET, 0.25), (MXNET, 0.025))),
        Work("1,000 keys of 1 KB, wait=False", "small:later", 10, goals=((MXNET, 1 / 3),)),
        Work("ResNet-50, key by key", "resnet50:each", 5, goals=((MXNET, 1 / 3),)),
    ]
    return {each.name: each for each in works}


WORKS = _works()
"""By name."""

Found = dict[tuple[str, str], list[float | None]]
"""Seconds of each run, by names of work and system; None: it failed."""


@dataclass(frozen=True)
class System:
    """One column of the table: how its rounds are started."""

    name: str
    python: str
    words: tuple[str, ...]
    """The script of `peers` and its arguments before the works."""
    launch: tuple[str, ...] = ()
    """Options for a job with servers."""
    serves: bool = False
    """Whether jobs have servers."""
    ranks: int | None = None
    """Processes of a job, where they are not the workers of the work; 0: the script forks all of them itself."""
    reports: int | None = None
    """How many of them report, where that are not the workers of the work."""
    codes: str = ".*"
    """Pattern of the works that it has."""

    def takes_part(self, work: Work) -> bool:
        """Whether it has such a work."""
        is_ours = self.name == OURS
        return is_ours or (work.workers == 2 and re.fullmatch(self.codes, work.code) is not None)

    def job(self, work: Work) -> tuple[int, int]:
        """Return the workers and servers of the job that has a work. Works of one job are measured in one run of it."""
        return work.workers, work.servers if self.serves else 0


def systems(peers: Path, on_hosts: bool) -> list[System]:
    """Return ours and those whose environment is there; say which are left out."""
    own, torch, mxnet = sys.executable, str(peers / "torch/bin/python"), str(peers / "mxnet/bin/python")
    rounds, least, one_key = "latency_round.py", "small_round.py", "[0-9]+"
    known = [
        System(OURS, own, (rounds, OURS), serves=True),
        System(GLOO, torch, (rounds, GLOO)),
        System(BUCKET, torch, (rounds, BUCKET), codes="small:list"),
        System(MXNET, mxnet, (rounds, MXNET), ("--ps", "command"), serves=True),
        System("pyzmq", own, (least, "ping-pong"), reports=1, codes=one_key),
        System("sketch, tcp", own, (least, "tcp"), ranks=3, codes=one_key),
    ]
    if not on_hosts:
        known.append(System("sketch", own, (least, "unix"), ranks=0, codes=one_key))
        known.append(System("sketch, two threads", own, (least, "threads"), ranks=0, codes=one_key))
    for system in known:
        if not os.access(system.python, os.X_OK):
            say("%s is left out: no %s. To have it:  scripts/install peers" % (system.name, system.python))
    return [system for system in known if os.access(system.python, os.X_OK)]


def command_of(system: System, job: tuple[int, int], works: Sequence[Work], hosts: str) -> list[str]:
    """Return how a system measures some works in one job."""
    script, *arguments = system.words
    codes = {work.code: work.rounds for work in works}
    measured = ["%s=%d" % each for each in codes.items()]
    program = [system.python, script if hosts else str(SCRIPTS / script), *arguments, *measured]
    if system.ranks == 0:
        return program
    ranks, servers = system.ranks or job[0], job[1]
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "--timeout", str(RUN_TIMEOUT_S)]
    command += ["--hosts", hosts, "--sync-dst-dir", FOLDER] if hosts else ["--launcher", "local"]
    command += ["-n", str(ranks), "-s", str(servers), *system.launch, "--env", "OMP_NUM_THREADS=1"]
    return [*command, *program]


def measure(system: System, works: Sequence[Work], hosts: str) -> dict[str, float | None]:
    """Run a system once over these works; return the median seconds of each, by its name. None, and said: it failed."""
    jobs: dict[tuple[int, int], list[Work]] = {}
    for work in works:
        jobs.setdefault(system.job(work), []).append(work)
    found: dict[str, float | None] = {}
    for job, its in jobs.items():
        codes = {work.code for work in its}
        count = (job[0] if system.reports is None else system.reports) * len(codes)
        reports = reports_of(command_of(system, job, its, hosts), system.name, count, bool(hosts))
        times: dict[str, list[list[float]]] = {}
        for each in reports or []:
            times.setdefault(each["work"], []).append(each["times_s"])
        for work in its:
            found[work.name] = slowest(times[work.code]) if work.code in times else None
    return found


def measure_all(columns: Sequence[System], works: Sequence[Work], runs: int, hosts: str) -> Found:
    """Return the runs' values by the names of work and system."""
    found: Found = {}
    for run in range(runs):
        for system in columns:
            taking_part = [work for work in works if system.takes_part(work)]
            for name, seconds in measure(system, taking_part, hosts).items():
                found.setdefault((name, system.name), []).append(seconds)
            say("run %d, %s" % (run + 1, system.name))
    return found


def ratios_of(found: Found, work: str, peer: str) -> list[float]:
    """Return our time divided by a peer's, run by run."""
    pairs = zip(found.get((work, OURS), []), found.get((work, peer), []), strict=False)
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs is not None]


def milliseconds(found: Found, work: str, system: str) -> float | None:
    """Return the median of the runs; None: there is none."""
    times = [each for each in found.get((work, system), []) if each is not None]
    return statistics.median(times) * 1e3 if times else None


def table(columns: Sequence[str], found: Found, works: Sequence[Work]) -> str:
    """Return milliseconds a round, in brackets ours divided by the peer's, and the goals with what was reached."""

    def cell(work: str, name: str) -> str:
        if (work, name) not in found:
            return ""
        time_ms = milliseconds(found, work, name)
        if time_ms is None:
            return "failed"
        text = "%.3f" % time_ms if time_ms < 1 else "%.2f" % time_ms if time_ms < 100 else "%.0f" % time_ms
        ratios = ratios_of(found, work, name) if name != OURS else []
        if not ratios:
            return text
        return text + " (%s, %s-%s)" % tuple(map(short, (statistics.median(ratios), min(ratios), max(ratios))))

    rows = ["| work | %s | goal |" % " | ".join(columns), "|---" * (len(columns) + 2) + "|"]
    for work in works:
        cells = [cell(work.name, name) for name in columns]
        rows.append("| %s | %s | %s |" % (work.name, " | ".join(cells), goals_text(work, found)))
    return "\n".join(rows)


def goals_text(work: Work, found: Found) -> str:
    """Return a work's goals, each with whether it is reached, if it could be measured."""
    ours = milliseconds(found, work.name, OURS)
    parts = []
    if work.goal_ms is not None:
        parts.append(("at most %g ms" % work.goal_ms, None if ours is None else ours <= work.goal_ms))
    for peer, most in work.goals:
        ratios = ratios_of(found, work.name, peer)
        is_reached = statistics.median(ratios) <= most if ratios else None
        parts.append(("at most %s of %s" % (short(most), peer), is_reached))
    return "; ".join(text + {True: ": reached", False: ": missed", None: ""}[state] for text, state in parts)


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("latency.py: " + text, file=sys.stderr, flush=True)


# Where the time of a round goes


def job_seen(size: int, rounds: int, what: str) -> list[dict[str, Any]]:
    """Return the lines of `where_round.py`; end the program if it failed."""
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "--launcher", "local"]
    command += ["-n", "2", "-s", "1", "--timeout", str(RUN_TIMEOUT_S), "--env", "OMP_NUM_THREADS=1"]
    if what == "calls":
        command += ["--env", "PYTHONPATH=%s" % SCRIPTS, "--server-import", "calls"]
    command += [sys.executable, str(SCRIPTS / "where_round.py"), str(size), str(rounds), what]
    with tempfile.TemporaryDirectory() as state:
        env = {**os.environ, "XDG_STATE_HOME": state}
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    if result.returncode:
        say("exit code %d from:  %s\n%s" % (result.returncode, shlex.join(command), result.stderr[-2000:]))
        sys.exit(1)
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def where(size: int, rounds: int, shown: int) -> str:
    """Return what one round of one key costs, as tables."""
    parts = [threads_table(job_seen(size, rounds, "threads"), rounds)]
    if shutil.which("strace"):
        parts.append(system_calls_table(job_seen(size, rounds, "system"), rounds))
    else:
        say("system calls are left out: no strace. To have it:  apt-get install strace")
    seen = job_seen(size, rounds, "calls")
    parts.append(calls_table(seen, rounds))
    parts += [functions_table(who, [each for each in seen if each["who"] == who], rounds, shown) for who in ROLES]
    return "\n\n".join(parts)


def threads_table(lines: Sequence[dict[str, Any]], rounds: int) -> str:
    """Return what each thread of the job takes in a round."""
    rows = ["| process | thread | CPU us | waiting for a processor, us | sleeps | driven out |", "|---" * 6 + "|"]
    seen = sorted((each for each in lines if "used" in each), key=lambda each: (each["who"], each["process"]))
    for each in seen:
        used = [value / rounds for value in each["used"]]
        if used[0] >= 1:
            who = "%s %s" % (each["who"], each["process"])
            rows.append("| %s | %s | %.0f | %.0f | %.1f | %.1f |" % (who, each["thread"], *used))
    total = [sum(each["used"][at] for each in seen) / rounds for at in range(4)]
    rows.append("| all | | %.0f | %.0f | %.1f | %.1f |" % tuple(total))
    times = [time_s for each in lines for time_s in each.get("times_s", ())]
    return "\n".join(rows) + "\n\nA round of rank 0: %.2f ms." % (statistics.median(times) * 1e3)


def system_calls_table(lines: Sequence[dict[str, Any]], rounds: int) -> str:
    """Return how often a process makes each system call in a round."""
    rows = ["| process | all | of them |", "|---" * 3 + "|"]
    for each in lines:
        counts = [(name, count / rounds) for name, count in each["calls"]]
        text = ", ".join("%s %.1f" % pair for pair in counts if pair[1] >= 0.05)
        rows.append("| %s | %.1f | %s |" % (each["who"], sum(count for _, count in counts), text))
    return "\n".join(rows)


def calls_table(lines: Sequence[dict[str, Any]], rounds: int) -> str:
    """Return how many functions each thread calls in a round, and which of them copy."""
    rows = ["| process | thread | Python calls | C calls | CPU us, recorded | copies |", "|---" * 6 + "|"]
    for each in lines:
        python, c = (count / rounds for count in each["python_c"])
        copies = [
            (name, count / rounds)
            for name, is_python, count, *_ in each["functions"]
            if is_copy(name) and not is_python
        ]
        text = ", ".join("%s %.1f" % pair for pair in copies if pair[1] >= 0.05)
        if python + c >= 0.5:
            cells = (each["who"], each["thread"], python, c, each["own_ns"] / rounds / 1e3, text)
            rows.append("| %s | %s | %.0f | %.0f | %.0f | %s |" % cells)
    return "\n".join(rows)


def is_copy(name: str) -> bool:
    """Whether a C function copies values or messages."""
    return name.rpartition(".")[2] in COPYING


def functions_table(who: str, lines: Sequence[dict[str, Any]], rounds: int, shown: int) -> str:
    """Return the functions of a process with most processor time of their own, over all its threads."""
    calls: dict[str, int] = {}
    own_ns: dict[str, int] = {}
    whole_ns: dict[str, int] = {}
    for name, _, count, taken_ns, its_ns in (row for each in lines for row in each["functions"]):
        calls[name] = calls.get(name, 0) + count
        own_ns[name] = own_ns.get(name, 0) + taken_ns
        whole_ns[name] = whole_ns.get(name, 0) + its_ns
    total = sum(each["own_ns"] for each in lines) or 1
    rows = ["| %s: function | calls | own us | part | with what it calls, us |" % who, "|---" * 5 + "|"]
    for name in sorted(own_ns, key=lambda name: -own_ns[name])[:shown]:
        cells = (
            name,
            calls[name] / rounds,
            own_ns[name] / rounds / 1e3,
            own_ns[name] / total * 100,
            whole_ns[name] / rounds / 1e3,
        )
        rows.append("| `%s` | %.1f | %.1f | %.1f %% | %.1f |" % cells)
    return "\n".join(rows)


def main() -> None:
    """Measure, print the table, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS), help="rows (default: all)")
    parser.add_argument("--systems", nargs="+", help="only these columns (default: all that are there)")
    parser.add_argument("--runs", type=int, default=5, help="runs of every system (default 5)")
    parser.add_argument("--hosts", default="", help="H1,H2: between hosts that ssh reaches, which have .venv as here")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where scripts/install made them")
    parser.add_argument("--where", action="store_true", help="show where the time of one round goes, and nothing else")
    parser.add_argument("--bytes", type=int, default=4, help="with --where: of the key (default 4)")
    parser.add_argument("--rounds", type=int, default=300, help="with --where (default 300)")
    parser.add_argument("--functions", type=int, default=25, help="with --where: so many of each side (default 25)")
    options = parser.parse_args()

    if options.where:
        print(where(options.bytes, options.rounds, options.functions))
        return
    known = systems(options.peers.resolve(), bool(options.hosts))
    columns = [system for system in known if not options.systems or system.name in options.systems]
    works = [WORKS[name] for name in options.works]
    found = measure_all(columns, works, options.runs, options.hosts)
    print(table([system.name for system in columns], found, works))
    # What failed stands in the table and was said; the run as a whole did not succeed then.
    sys.exit(1 if any(seconds is None for runs in found.values() for seconds in runs) else 0)


if __name__ == "__main__":
    main()
