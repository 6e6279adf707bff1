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
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_results import FOLDER as RESULTS
from gpu_results import commit_here, today
from round import FOLDER, ROOT, RUN_TIMEOUT_S, SCRIPTS, reports_of, short, slowest

OURS, GLOO, BUCKET, MXNET = "distrun", "gloo", "gloo-bucket", "mxnet"


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


WORKS = (
    Work("4 B", "4", goal_ms=0.3, goals=((GLOO, 1.0),)),
    Work("4 KB", "4096", goal_ms=0.3, goals=((GLOO, 1.0),)),
    Work("64 KB", "65536", goal_ms=0.45, goals=((GLOO, 0.6),)),
    Work("1 MB", str(1 << 20), 40, goal_ms=0.9, goals=((GLOO, 0.6),)),
    Work("4 MB", str(4 << 20), 40, goal_ms=3, goals=((GLOO, 0.6),)),
    Work("4 MB, -s 2", str(4 << 20), 40, servers=2, goal_ms=3, goals=((GLOO, 0.6),)),
    Work("4 B, one worker", "4", workers=1),
    Work("barrier", "barrier", goal_ms=0.3),
    Work("1,000 keys, one call", "small:list", 6, goals=((BUCKET, 0.25), (MXNET, 0.025))),
    Work("1,000 keys, wait=False", "small:later", 4, goals=((MXNET, 1 / 3),)),
    Work("ResNet-50, key by key", "resnet50:each", 10, goals=((MXNET, 1 / 3),)),
)


def between_hosts(work: Work) -> Work:
    """Return a work with its goal between hosts: not slower than gloo."""
    return replace(work, goal_ms=None, goals=((GLOO, 1.0),) if work.code.isdigit() and work.workers == 2 else ())


Found = dict[str, dict[str, list[float | None]]]
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
    rounds, least, one_key, each_key = "latency_round.py", "small_round.py", "[0-9]+", "[0-9]+|.*:each"
    known = [
        System(OURS, own, (rounds, OURS), serves=True),
        System(GLOO, torch, (rounds, GLOO)),
        System(BUCKET, torch, (rounds, BUCKET), codes="small:list"),
        System(MXNET, mxnet, (rounds, MXNET), ("--ps", "command"), serves=True),
        System("pyzmq", own, (least, "ping-pong"), reports=1, codes=one_key),
        System("sketch-tcp", own, (least, "tcp"), ranks=3, codes=one_key),
    ]
    if not on_hosts:
        known.append(System("sketch", own, (least, "unix"), ranks=0, codes=each_key))
        known.append(System("sketch-threads", own, (least, "threads"), ranks=0, codes=one_key))
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
                found.setdefault(name, {}).setdefault(system.name, []).append(seconds)
            say("run %d, %s" % (run + 1, system.name))
    return found


def ratios_of(found: Found, work: str, peer: str) -> list[float]:
    """Return our time divided by a peer's, run by run."""
    pairs = zip(found[work].get(OURS, []), found[work].get(peer, []), strict=False)
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs is not None]


def milliseconds(found: Found, work: str, system: str) -> float | None:
    """Return the median of the runs; None: there is none."""
    times = [each for each in found[work].get(system, []) if each is not None]
    return statistics.median(times) * 1e3 if times else None


def table(columns: Sequence[str], found: Found, works: Sequence[Work]) -> str:
    """Return milliseconds a round, in brackets ours divided by the peer's, and the goals with what was reached."""

    def cell(work: str, name: str) -> str:
        if name not in found[work]:
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


HEADING, BETWEEN_HOSTS = "A small round", "A small round between 2 hosts"
SECTION = """\
Measured by `benchmarks/latency.py`: calls that wait, one after the other. `4 B` to `4 MB`: `pushpull` of one key of two
workers through one server; MXNet 1.9.1 does the same, gloo's `all_reduce` sums between the workers. `1,000 keys`: of
1 KB, in one call of all keys, or by a push and a pull of each key with `wait=False` (MXNet's never wait) and a wait for
all at the end; gloo-bucket joins them into one tensor. `key by key`: the 161 tensors of ResNet-50, a push and a pull of
each, one after the other; MXNet waits at the end. `--where` shows where the time of one round goes.

%s

Milliseconds a round, and in brackets distrun's time divided by that system's (below 1.00: distrun is faster): the
median of the ratios of the runs, and their range.

%s

%s
* Commit `%s`
* %d runs, in which the systems take turns. A run's time is the median of its rounds after the warm-up; a round takes as
  long as its slowest worker.
%s"""
LOCAL = """\
Limits, not peers: `pyzmq` is a message there and back between two processes over TCP. A `sketch` is two workers and a
server in a few lines of Python: they send a head and a value, add, and have no names, rounds, deaths or credentials
(`benchmarks/peers/small_round.py`). Heads and small values go over Unix sockets, larger values through shared memory;
the server keeps no value. `sketch-threads`: a worker hands each call to its second thread; `sketch-tcp`: all goes over
TCP."""
LAB = """\
The hosts are those of `scripts/lab`: network namespaces of one machine with virtual cables, so all processes share its
cores. The server and a worker are on one host, the other worker on the other. Limits, not peers: `pyzmq` is a message
there and back; `sketch-tcp` is two workers and a server in a few lines of Python, which send a head and a value, add,
and have no names, rounds, deaths or credentials (`benchmarks/peers/small_round.py`). The goal: not slower than gloo."""


def section(results: dict[str, Any]) -> tuple[str, str]:
    """Return heading and text of the section of docs/benchmarks.md that is made of a file of results."""
    facts, found = results["facts"], results["seconds"]
    works = [work for work in WORKS if work.name in found]
    if facts["hosts"]:
        works = [between_hosts(work) for work in works]
    text = table(facts["systems"], found, works)
    note = "* %s\n" % facts["note"] if facts["note"] else ""
    body = SECTION % (
        LAB if facts["hosts"] else LOCAL,
        text,
        facts["circumstances"],
        facts["commit"],
        facts["runs"],
        note,
    )
    return BETWEEN_HOSTS if facts["hosts"] else HEADING, body


def newest(on_hosts: bool) -> Path | None:
    """Return the newest file of results, of which the page is made."""
    found = sorted(RESULTS.glob("latency-hosts-2*.json" if on_hosts else "latency-2*.json"))
    return found[-1] if found else None


def measured_in_lab(options: argparse.Namespace) -> Found:
    """Run this program in a lab of two hosts, as their launcher; return what it has measured."""
    from launch import lab_of

    share = {Path(sys.prefix), Path(sys.base_prefix), options.peers} - {Path("/usr"), Path("/usr/local")}
    with (
        lab_of(2, [each for each in share if each.exists()]) as lab,
        tempfile.TemporaryDirectory(dir=ROOT / "benchmarks") as folder,
    ):
        kept = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--hosts", ",".join(lab.hosts), "--runs", str(options.runs)]
        command += ["--peers", str(options.peers), "--results", str(kept), "--works", *options.works]
        command += ["--systems", *options.systems] if options.systems else []
        argv, env = lab.enter_argv(*command, cwd=str(ROOT)), lab.launcher_env(os.environ)
        subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, check=False)
        if not kept.exists():
            sys.exit(1)
        return dict(json.loads(kept.read_text())["seconds"])


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("latency.py: " + text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print the table, and write results and page if asked to."""
    names = [work.name for work in WORKS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--works", nargs="+", metavar="WORK", choices=names, default=names, help="rows, as in the table (default: all)"
    )
    parser.add_argument("--systems", nargs="+", help="only these columns (default: all that are there)")
    parser.add_argument("--runs", type=int, default=5, help="runs of every system (default 5)")
    parser.add_argument("--hosts", default="", help="`lab`, or H1,H2 that ssh reaches and that have .venv as here")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where scripts/install made them")
    parser.add_argument("--results", type=Path, help="keep what was measured in this file, too")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results and docs/benchmarks.md")
    parser.add_argument("--where", action="store_true", help="show where the time of one round goes, and nothing else")
    parser.add_argument("--bytes", type=int, default=4, help="with --where: of the key (default 4)")
    parser.add_argument("--rounds", type=int, default=300, help="with --where (default 300)")
    parser.add_argument("--functions", type=int, default=25, help="with --where: so many of each side (default 25)")
    parser.add_argument("-n", "--workers", type=int, default=2, help="with --where (default 2)")
    options = parser.parse_args()
    options.peers = options.peers.resolve()
    if options.bytes < 4 or options.bytes % 4 or min(options.rounds, options.runs, options.workers) < 1:
        parser.error("--bytes is a multiple of 4; --rounds, --runs and --workers are at least 1")

    if options.where:
        from latency_where import where

        print(where(options.bytes, options.workers, options.rounds, options.functions))
        return
    known = systems(options.peers, bool(options.hosts))
    names = [system.name for system in known]
    if missing := [name for name in options.systems or () if name not in names]:
        parser.error("--systems: no %s here; there are: %s" % (", ".join(missing), "; ".join(names)))
    columns = [system for system in known if not options.systems or system.name in options.systems]
    if options.hosts == "lab":
        found = measured_in_lab(options)
    else:
        works = [work for work in WORKS if work.name in options.works]
        found = measure_all(columns, works, options.runs, options.hosts)
    import report

    facts = {
        "hosts": bool(options.hosts),
        "systems": [system.name for system in columns],
        "runs": options.runs,
        "date": today(),
        "commit": commit_here(),
        "circumstances": report.circumstances("latency.py", "--peers", "--note", "--results"),
        "note": options.note,
    }
    results = {"format": 1, "facts": facts, "seconds": found}
    kept = [options.results] if options.results else []
    if options.write:
        kept.append(RESULTS / ("latency-%s%s.json" % ("hosts-" if options.hosts else "", today())))
    for path in kept:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    heading, body = section(results)
    print("\n".join(line for line in body.splitlines() if line[:1] == "|"))
    if options.write:
        report.write(heading, body)
    # What failed stands in the table and was said; the run as a whole did not succeed then.
    sys.exit(1 if any(None in runs for its in found.values() for runs in its.values()) else 0)


if __name__ == "__main__":
    main()
