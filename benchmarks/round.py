"""Push and pull every tensor of a model, beside MXNet and gloo on the same machine, and write the table.

    scripts/install peers                       # once: the peers' virtual environments
    python benchmarks/round.py --write          # all systems that are there; docs/benchmarks.md

A round is what a training step moves: a gradient from every worker, the sum back to every worker. All systems are
started by `distrun launch --launcher local`, by turns: run 1 of every system, then run 2 of every system, so that
a disturbance of the machine meets all of them. A round takes as long as its slowest worker; a run's value is the median
of its rounds. Ratios are those of the two values of one run. Every gradient is rewritten before a round, and every
element of every result is read after it; neither is in the times.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benchmarks" / "peers"
OURS = "distrun"
PEERS = ("mxnet", "gloo", "gloo-bucket", "mpi", "mpi-bucket")
LIMIT = "copies"
"""What a round on one machine cannot do without."""


@dataclass(frozen=True)
class Work:
    """One row of the table."""

    model: str
    form: str = "list"
    """`list`: one pushpull of all keys. `two`: a push and a pull of all keys. `keys`: calls for each key that do not
    wait; all are waited for at the end. `priorities`: the same, and each key has a priority of its own. `loop`: the
    same, and distrun's pulls wait, each for its own. `empty`: as `list`, with arrays of `kv.empty`. `view`: gradients
    of `kv.empty` are pushed, results read through `kv.view`."""
    peers: tuple[str, ...] = PEERS
    repeated: int = 1
    """By how much more rounds a run has: short ones vary more."""


WORKS = {
    "resnet50": Work("resnet50", peers=(*PEERS, LIMIT)),
    "vgg16": Work("vgg16", peers=(*PEERS, LIMIT)),
    "one": Work("one"),
    "small": Work("small", repeated=5),
    "resnet50, kv.empty": Work("resnet50", "empty", (*PEERS, LIMIT)),
    "resnet50, kv.view": Work("resnet50", "view", (*PEERS, LIMIT)),
    "vgg16, kv.empty": Work("vgg16", "empty", (*PEERS, LIMIT)),
    "vgg16, kv.view": Work("vgg16", "view", (*PEERS, LIMIT)),
    "resnet50 in two calls": Work("resnet50", "two", ("mxnet",)),
    "resnet50 by priority": Work("resnet50", "priorities", ("mxnet",)),
    "resnet50 in a loop": Work("resnet50", "loop", ("mxnet",)),
    "small in two calls": Work("small", "two", ("mxnet",), 5),
    "small by key": Work("small", "keys", ("mxnet",), 5),
    "small by priority": Work("small", "priorities", ("mxnet",), 5),
    "small in a loop": Work("small", "loop", ("mxnet",), 5),
    "many": Work("many", peers=()),
}
RUN_TIMEOUT_S = 600
FOLDER = "/tmp/distrun-round"
"""Where the scripts are on other hosts."""


OURS_ALONE = {"empty": "list", "view": "list", "loop": "priorities"}
"""Forms that only we have, and what the peers do meanwhile."""

MPIRUN = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np")

Found = dict[tuple[str, str], list[Optional[float]]]
"""Seconds of each run, by names of work and system; None: it failed."""


@dataclass(frozen=True)
class System:
    """One column of the table: how a round of it is started."""

    name: str
    python: str
    script: str
    launch: tuple[str, ...]
    """What `distrun launch` needs to know: who serves."""
    arguments: tuple[str, ...] = ()
    """In place of the work's form."""
    is_limit: bool = False
    """It is no peer: it moves the bytes of a round and does nothing with them."""
    takes_form: bool = False
    """It has the same forms as ours."""
    by_mpirun: bool = False
    """Open MPI's own launcher starts it; only by that its processes know each other."""

    @property
    def is_there(self) -> bool:
        """Whether all that it needs is installed."""
        return os.access(self.python, os.X_OK) and not (self.by_mpirun and shutil.which(MPIRUN[0]) is None)


def systems(peers: Path, servers: int) -> list[System]:
    """Return ours and those peers whose environment is there; say which are left out."""
    serve = ("-s", str(servers))
    known = [
        System(OURS, sys.executable, "distrun_round.py", serve),
        System("mxnet", str(peers / "mxnet/bin/python"), "mxnet_round.py", (*serve, "--ps", "command")),
        System("gloo", str(peers / "torch/bin/python"), "gloo_round.py", ("-s", "0"), ("plain",)),
        System("gloo-bucket", str(peers / "torch/bin/python"), "gloo_round.py", ("-s", "0"), ("bucket",)),
        System("mpi", str(peers / "mpi/bin/python"), "mpi_round.py", (), ("plain",), by_mpirun=True),
        System("mpi-bucket", str(peers / "mpi/bin/python"), "mpi_round.py", (), ("bucket",), by_mpirun=True),
        System(LIMIT, sys.executable, "copies_round.py", ("-s", "0"), is_limit=True, takes_form=True),
    ]
    for system in known:
        if not system.is_there:
            how = "scripts/install %s" % ("mpi" if system.by_mpirun else "peers")
            say("%s is left out: no %s. To have it:  %s" % (system.name, system.python, how))
    return [system for system in known if system.is_there]


def between_hosts(known: list[System]) -> list[System]:
    """Return those that can run on several hosts, and what the network allows."""
    limit = System("tcp", sys.executable, "tcp_round.py", ("-s", "0"), (), is_limit=True)
    return [*(system for system in known if not (system.by_mpirun or system.is_limit)), limit]


def threads(workers: int) -> int:
    """Return how many threads a process may use: each worker has its share of this machine's cores."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


def measure(system: System, work: Work, options: argparse.Namespace, timeout_s: float = RUN_TIMEOUT_S) -> float | None:
    """Run `system` once and return its median seconds a round; None, and a word why, if it failed."""
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix"]
    # Hosts have the same environments; the scripts go there.
    command += ["--hosts", options.hosts, "--sync-dst-dir", FOLDER] if options.hosts else ["--launcher", "local"]
    command += [
        "-n",
        str(options.workers),
        *system.launch,
        "--timeout",
        str(max(1, int(timeout_s))),
        "--env",
        "OMP_NUM_THREADS=%d" % threads(options.workers),
    ]
    if system.by_mpirun:
        command = [*MPIRUN, str(options.workers)]
    script = system.script if options.hosts else str(SCRIPTS / system.script)
    command += [system.python, script, work.model, str(options.rounds * work.repeated)]
    has_all = system.name == OURS or system.takes_form
    form = work.form if has_all else OURS_ALONE.get(work.form, work.form)
    command += [] if system.is_limit and not system.takes_form else list(system.arguments or (form,))
    reports = reports_of(command, "%s, %s" % (system.name, work.model), options.workers, bool(options.hosts))
    return None if reports is None else slowest([each["times_s"] for each in reports])


def reports_of(command: list[str], what: str, ranks: int, on_hosts: bool) -> list[dict[str, Any]] | None:
    """Run a job of a script of `peers` once and return what each rank reports; None, and a word why, if it failed."""
    # A job store of its own: a benchmark is nobody's job.
    with tempfile.TemporaryDirectory() as state:
        env = {**os.environ, "XDG_STATE_HOME": state, "OMP_NUM_THREADS": str(threads(ranks))}
        folder = SCRIPTS if on_hosts else ROOT
        result = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False)
    # mpirun may join the lines of two ranks.
    reports = [json.loads(each) for each in re.findall(r"\{[^{}]*\}", result.stdout)]
    if result.returncode != 0 or len(reports) != ranks:
        say("%s: exit code %d from:  %s" % (what, result.returncode, shlex.join(command)))
        say(result.stderr[-2000:])
        return None
    return reports


def slowest(times: list[list[float]]) -> float:
    """Return the median of the rounds, each of which takes as long as its slowest rank; `times`: of each rank."""
    return statistics.median(map(max, zip(*times, strict=True)))


def measure_all(columns: list[System], options: argparse.Namespace) -> Found:
    """Return the runs' values, seconds, by (work, system); None for what failed, nothing for what has no such work."""
    values: Found = {}
    for name in options.works:
        work = WORKS[name]
        taking_part = [system for system in columns if takes_part(system, work)]
        for run in range(options.runs):
            for system in taking_part:
                seconds = measure(system, work, options)
                values.setdefault((name, system.name), []).append(seconds)
                if seconds is not None:
                    say("%s, run %d, %s: %.1f ms a round" % (name, run + 1, system.name, seconds * 1e3))
    return values


def takes_part(system: System, work: Work) -> bool:
    """Whether there is such a work for a system; plain TCP takes part in all."""
    return system.name in (OURS, *work.peers) or (system.is_limit and not system.takes_form)


def table(columns: list[System], works: list[str], found: Found) -> str:
    """Return milliseconds a round, and in brackets ours divided by the peer's (below 1: we are faster)."""

    def cell(work: str, name: str) -> str:
        theirs = found.get((work, name))
        if theirs is None:
            return "" if name != OURS and name not in WORKS[work].peers else "failed"
        times = [each for each in theirs if each is not None]
        if not times:
            return "failed"
        ours = found.get((work, OURS), [])
        ratios = [
            mine / each for mine, each in zip(ours, theirs, strict=False) if mine is not None and each is not None
        ]
        text = "%.1f" % (statistics.median(times) * 1e3)
        if name == OURS or not ratios:
            return text
        return text + " (%s, %s-%s)" % tuple(map(short, (statistics.median(ratios), min(ratios), max(ratios))))

    names = [system.name for system in columns]
    rows = ["| work | %s |" % " | ".join(names), "|---" * (len(names) + 1) + "|"]
    rows += ["| %s | %s |" % (work, " | ".join(cell(work, name) for name in names)) for work in works]
    return "\n".join(rows)


def short(ratio: float) -> str:
    """Return a ratio with two decimals, and three below 0.1."""
    return "%.3f" % ratio if ratio < 0.0995 else "%.2f" % ratio


HEADING = "A round of push and pull"
SECTION = """\
Measured by `benchmarks/round.py`. A round moves every tensor of a model (float32) from every worker to the sum
and back: `resnet50` 161 tensors, 102 MB; `vgg16` 32 tensors, 553 MB; `one` a tensor of 67 MB; `small` 1,000 tensors
of 1 KB; `many` 100,000 tensors of 16 bytes. distrun and MXNet 1.9.1 (`dist_sync`, ps-lite) push and pull through
servers; gloo (torch.distributed) reduces among the workers, tensor by tensor or in buckets of 25 MB. Every process runs
on this one machine, and a system that needs more processes than the machine has cores is slowed by that.
distrun's launcher sets GLIBC_TUNABLES for distrun's own workers (see environment.md); all others run without it.

distrun and MXNet push and pull all keys in one call (`pushpull`); `in two calls`: a push of all keys, then a pull.
`by key`: a push and a pull for each key, none of which waits (distrun: `wait=False`), and a wait for all of them at the
end; `by priority`: the same, and key i has the priority -i; `in a loop`: the same, and distrun's pulls wait, each for
its own. `kv.empty`: distrun's gradients and outputs are arrays of
`kv.empty`; `kv.view`: its gradients are, and results are read where they are; the others do what they always do. mpi is
Open MPI's Allreduce between numpy arrays, through its own shared memory, tensor by tensor or in buckets of 25 MB.
copies makes the copies and additions that such a round needs, by numpy, with nothing else: a limit, not a peer.
Every gradient is rewritten before a round, and every element of every result is compared after it, outside
the measured time.

Milliseconds a round, and in brackets distrun's time divided by that system's (below 1.00: distrun is faster): the
median of the ratios of the runs, and their range. The goals: `small` 0.05 beside MXNet and 0.5 beside gloo with
buckets, `many` 500 ms, `small by key` 0.5 beside MXNet, `resnet50` 1.0 beside MXNet.

%s

%s
* %d workers, %d servers; %d runs, in which the systems take turns. A run's time is the median of %d rounds after the
  warm-up, of `small` five times as many; a round takes as long as its slowest worker.
%s"""

BETWEEN_HOSTS = "A round between %d hosts"
HOSTS_SECTION = """\
Measured by `benchmarks/round.py --hosts`, with the works and peers of "A round of push and pull". The hosts are those
of `scripts/lab`: network namespaces of one machine with virtual cables, so all processes share its cores, and no system
sends faster than these copy. Workers and servers take turns over the %d hosts. tcp moves the bytes of a round between
the hosts, the least that a sum over them needs, by plain TCP connections, and does nothing with them: a limit, not a
peer.

Milliseconds a round, and in brackets distrun's time divided by that system's (below 1.00: distrun is faster): the
median of the ratios of the runs, and their range.

%s

%s
* %d workers, %d servers; %d runs, in which the systems take turns. A run's time is the median of %d rounds after the
  warm-up; a round takes as long as its slowest worker.
%s"""


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("round.py: " + text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print the table, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS), help="rows (default: all)")
    parser.add_argument("--systems", nargs="+", help="only these columns (default: all that are there)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds a run (default 8, after 6 to warm up)")
    parser.add_argument("--runs", type=int, default=5, help="runs of every system (default 5)")
    parser.add_argument("-n", "--workers", type=int, default=2)
    parser.add_argument("-s", "--servers", type=int, default=2)
    parser.add_argument("--hosts", help="H1,H2...: between hosts that ssh reaches, which have .venv and .peers as here")
    parser.add_argument("--links", default="", help="with --hosts: what limits them, for the heading of the section")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where scripts/install made them")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()

    known = systems(options.peers, options.servers)
    if options.hosts:
        known = between_hosts(known)
    columns = [system for system in known if not options.systems or system.name in options.systems]
    found = measure_all(columns, options)
    text = table(columns, options.works, found)
    print(text)
    if options.write:
        import report

        counts = (options.workers, options.servers, options.runs, options.rounds)
        note = "* %s\n" % options.note if options.note else ""
        circumstances = report.circumstances("round.py", "--peers", "--note")
        if options.hosts:
            hosts = len(options.hosts.split(","))
            heading = BETWEEN_HOSTS % hosts + (", " + options.links if options.links else "")
            report.write(heading, HOSTS_SECTION % (hosts, text, circumstances, *counts, note))
        else:
            report.write(HEADING, SECTION % (text, circumstances, *counts, note))
    # What failed stands in the table and was said; the run as a whole did not succeed then.
    sys.exit(1 if any(seconds is None for runs in found.values() for seconds in runs) else 0)


if __name__ == "__main__":
    main()
