"""Measure what a round costs a slow link between hosts: time beside plain TCP, and bytes in and out of a host.

    scripts/lab up 2
    scripts/lab fault rate h1 1000000; scripts/lab fault rate h2 1000000        # kbit/s
    scripts/lab shell python benchmarks/links.py --hosts h1,h2 --links "1 Gbit/s" --write

The systems take turns, run by run; a run's time is the median of its rounds, each as long as its slowest worker. Bytes
are those that the kernel counts on a host's interfaces, headers included, of both systems alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from round import FOLDER, RUN_TIMEOUT_S, reports_of, short, slowest

TCP = "tcp"


@dataclass(frozen=True)
class Work:
    """One row of the table."""

    workers: int = 1
    """On each host."""
    form: str = "pushpull"
    """Or `push`, of which each round ends with a barrier."""
    compression: str = "none"
    adds: bool = True
    """Whether workers of one host add before anything leaves it."""


WORKS = {
    "1 worker": Work(),
    "4 workers": Work(4),
    "4 workers, DISTRUN_HOST_SUMS=0": Work(4, adds=False),
    "push, 1 worker": Work(1, "push"),
    "push, 1 worker, 2bit": Work(1, "push", "2bit"),
}


@dataclass(frozen=True)
class Run:
    """What one run has found."""

    seconds: float
    """A round."""
    sent: float
    """Bytes a round that left a host; of the host with most."""
    received: float


Found = dict[str, list[Run]]


def command_of(work: Work | None, options: argparse.Namespace, hosts: int) -> list[str]:
    """Return how a run is started; None: plain TCP, with one rank a host."""
    workers, servers = (hosts, 0) if work is None else (hosts * work.workers, hosts)
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "--hosts", options.hosts]
    command += ["--sync-dst-dir", FOLDER, "-n", str(workers), "-s", str(servers), "--timeout", str(RUN_TIMEOUT_S)]
    command += ["--env", "OMP_NUM_THREADS=1"]
    if work is None:
        return [*command, sys.executable, "tcp_round.py", options.model, str(options.rounds)]
    command += ["--env", "DISTRUN_HOST_SUMS=%d" % work.adds]
    how = [options.model, str(options.rounds), work.compression, work.form]
    return [*command, sys.executable, "link_round.py", *how]


def measure(work: Work | None, options: argparse.Namespace) -> Run:
    """Run once; end the program with a word why if that failed."""
    hosts = len(options.hosts.split(","))
    command = command_of(work, options, hosts)
    reports = reports_of(command, "a round", hosts * (1 if work is None else work.workers), on_hosts=True)
    if reports is None:
        sys.exit(1)
    seconds = slowest([each["times_s"] for each in reports])
    return Run(seconds, *(max(each["moved"][way] for each in reports) for way in (0, 1)))


def measure_all(options: argparse.Namespace) -> Found:
    """Return the runs by the name of the work, and plain TCP's."""
    found: Found = {}
    for number in range(options.runs):
        for name, work in [(TCP, None), *((each, WORKS[each]) for each in options.works)]:
            run = measure(work, options)
            found.setdefault(name, []).append(run)
            sizes = (run.seconds * 1e3, run.sent / 1e6, run.received / 1e6)
            say("run %d, %s: %.0f ms a round, %.1f MB out, %.1f MB in" % (number + 1, name, *sizes))
    return found


def table(found: Found, works: Sequence[str]) -> str:
    """Return milliseconds a round, TCP's time divided by them, and bytes divided by TCP's."""

    def of_ratios(ratios: list[float]) -> str:
        return "%s (%s-%s)" % tuple(map(short, (statistics.median(ratios), min(ratios), max(ratios))))

    rows = ["| round | distrun | tcp | rate / TCP's rate | bytes out / TCP's | bytes in / TCP's |", "|---" * 6 + "|"]
    for name in works:
        pairs = list(zip(found[name], found[TCP], strict=True))
        ours, theirs = (statistics.median(each.seconds for each in runs) * 1e3 for runs in zip(*pairs, strict=True))
        cells = ["%.0f" % ours, "%.0f" % theirs]
        cells.append(of_ratios([tcp.seconds / run.seconds for run, tcp in pairs]))
        cells.append(of_ratios([run.sent / tcp.sent for run, tcp in pairs]))
        cells.append(of_ratios([run.received / tcp.received for run, tcp in pairs]))
        rows.append("| %s | %s |" % (name, " | ".join(cells)))
    return "\n".join(rows)


HEADING = "A round over links of %s, %d hosts"
SECTION = """\
Measured by `benchmarks/links.py`. The hosts are those of `scripts/lab`: network namespaces of one machine, so all
processes share its cores; each sends at most %s. On each host are a server and one or four workers. A round is one
`pushpull` of all tensors of `%s`; `push`: a push of all of them and a barrier. TCP moves the bytes that a sum over the
hosts needs at least, 2 (n - 1) / n times the values out of each host and in, by plain connections, and does nothing
with them: a limit, not a peer. With four workers on a host it moves as much: one sum a host.

Milliseconds a round; TCP's time divided by distrun's (the goal is 0.95); and the bytes that left a host and came in,
divided by TCP's (the goal is 1.02). A `push` moves half as much as a `pushpull` each way. The goal for `2bit` is a
tenth of the time without compression. Medians of the runs' ratios, and their ranges.

%s

%s
* %d runs, in which the works take turns. A run's time is the median of %d rounds after the warm-up.
%s"""


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("links.py: " + text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print the table, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", required=True, help="H1,H2...: hosts that ssh reaches, which have .venv as here")
    parser.add_argument("--links", required=True, help="what limits them, for the heading of the section")
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS), help="rows (default: all)")
    parser.add_argument("--model", default="resnet50", help="one of peers/shapes.py (default resnet50)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds a run (default 5, after 6 to warm up)")
    parser.add_argument("--runs", type=int, default=3, help="runs of every work (default 3)")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()

    text = table(measure_all(options), options.works)
    print(text)
    if options.write:
        import report

        heading = HEADING % (options.links, len(options.hosts.split(",")))
        note = "* %s\n" % options.note if options.note else ""
        body = (text, report.circumstances("links.py", "--note"), options.runs, options.rounds, note)
        report.write(heading, SECTION % (options.links, options.model, *body))


if __name__ == "__main__":
    main()
