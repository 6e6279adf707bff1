"""Measure what the numbers of a running job cost its coordinator.

    python benchmarks/metrics_coordinator.py --write     # docs/benchmarks.md; no root, no other hosts; 2 minutes

The coordinator is the one that is shipped; agents answer by a script, on a virtual clock (`simulation.py` in
tests/support). Each host has 8 workers and 8 GPUs. Figures are processor time of the coordinator's loop for each second
of the job, without its transport: no ssh, no TLS, no sockets.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from simulation import Clock, SimulatedJob, job_plan  # noqa: E402

from distrun_runtime.contract import control  # noqa: E402
from distrun_runtime.coordinator import messages  # noqa: E402
from distrun_runtime.coordinator.loop import PING_S  # noqa: E402

WORKERS_A_HOST = 8
SIZES = ((16, 0.01), (1000, 0.10))
"""Hosts, and what of a core the coordinator may use for them."""
BEATS = 15
WAYS = ("not measured", "measured", "and shown")


HEADING = "Metrics: the coordinator"
SECTION = """\
What the [numbers](metrics.md) of a running job cost its coordinator: processor time of its loop, as a share of one
core. Each host has %d workers and 8 GPUs, and agents measure every second, those of 1000 hosts every 10 s. Agents are
simulated (`tests/support/simulation.py`); ssh, TLS and sockets are not counted. *Not measured*: pings and ticks only.
*And shown*: a client watches, for which snapshots are made and encoded.

%s

%s
* medians of %d runs
%s"""


class Viewer:
    """A watcher that wants every snapshot, and encodes it as it would be sent (as `coordinator.service.Service`)."""

    def __init__(self) -> None:
        self.count = self.size = 0

    def opened(self, put: Any) -> None:
        """Want all."""
        put(messages.MetricsWanted(True))

    def event(self, value: Mapping[str, Any]) -> None:
        """Want no events."""

    def state(self, value: Mapping[str, Any]) -> None:
        """Want no states."""

    def stack(self, number: int, members: Mapping[str, Any]) -> None:
        """Have asked for none."""

    def metrics(self, value: Mapping[str, Any]) -> None:
        """Encode a snapshot."""
        self.count += 1
        self.size = len(control.encode(control.JobNumbers(value)))


@dataclass(frozen=True)
class Share:
    """What of a core the coordinator's loop used, by WAYS."""

    shares: tuple[float, ...]
    snapshot: int
    """Bytes of the last snapshot."""
    shown_a_second: float


def share_of(hosts: int, measures: bool, viewer: Viewer | None) -> float:
    """Return what of a core the coordinator used while the job ran."""
    with tempfile.TemporaryDirectory() as folder:
        plan = job_plan(hosts, workers=WORKERS_A_HOST * hosts)
        job = SimulatedJob(plan, Path(folder), Clock(), beats=BEATS, measures=measures, watcher=viewer)
        outcome = job.run()
    assert outcome.exit_code == 0, outcome.message
    return job.phases["beat"].cpu_s / PING_S


def measure(hosts: int, runs: int) -> Share:
    """Return the medians of some runs."""
    viewer = Viewer()
    found = [
        (share_of(hosts, False, None), share_of(hosts, True, None), share_of(hosts, True, viewer)) for _ in range(runs)
    ]
    shares = tuple(statistics.median(each[way] for each in found) for way in range(len(WAYS)))
    return Share(shares, viewer.size, viewer.count / runs / (BEATS * PING_S))


def table(found: Mapping[int, Share]) -> str:
    """Return the figures as Markdown."""
    lines = ["| hosts | tasks | goal | " + " | ".join(WAYS) + " | snapshots |", "|---:|---:|---:|---:|---:|---:|---|"]
    for hosts, goal in SIZES:
        if hosts not in found:
            continue
        each = found[hosts]
        shares = " | ".join(f"{share:.2%}" for share in each.shares)
        shown = f"{each.snapshot / 1000:.0f} kB, {each.shown_a_second:.1f} a second"
        lines.append(f"| {hosts} | {WORKERS_A_HOST * hosts} | {goal:.0%} | {shares} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, and write the section if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--hosts", nargs="+", type=int, default=[hosts for hosts, _ in SIZES], help="(default: 16 1000)"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of every figure (default 3)")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()

    share_of(2, True, None)  # imports and caches
    found = {hosts: measure(hosts, options.runs) for hosts in options.hosts}
    print(table(found))
    if options.write:
        import report

        note = f"* {options.note}\n" if options.note else ""
        lines = report.circumstances("metrics_coordinator.py", "--note")
        report.write(HEADING, SECTION % (WORKERS_A_HOST, table(found), lines, options.runs, note))


if __name__ == "__main__":
    main()
