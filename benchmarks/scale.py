"""Simulate the growth of a job to thousands of hosts: what one coordinator, scheduler and server have to do.

    python benchmarks/scale.py --write          # docs/benchmarks.md; no root, no other hosts; 5 minutes

Loops and decisions are those that are shipped; hosts and nodes answer by a script, on a virtual clock (`simulation.py`
and `simulated_store.py` in tests/support). So the figures are processor time of the one process in question, without
its transport: no ssh, no TLS, no sockets. docs/scale.md adds what these cost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from simulated_store import SimulatedServer, SimulatedStore  # noqa: E402
from simulation import Clock, SimulatedJob, job_plan  # noqa: E402

from distrun_runtime.coordinator.loop import PING_S  # noqa: E402

HOSTS = (100, 1000, 10_000)
HOSTS_A_SERVER = 10
LEAVES_UP_TO = 2000
"""With more hosts the end is computed from the messages that it takes: they are millions."""
SHARDS, FLOATS = 4, 1024
"""What one server has of the values, in the rounds."""


@dataclass(frozen=True)
class Row:
    """One simulation of everything, processor seconds."""

    launch_s: float
    beat_s: float
    end_s: float
    register_s: float
    roster_bytes: int
    barrier_s: float
    leave_s: float
    left: int
    """LEFT messages."""
    loss_s: float
    lost: int
    """LOST messages."""
    round_s: float


def servers_of(hosts: int) -> int:
    """Return how many servers a job of so many workers has here."""
    return max(1, hosts // HOSTS_A_SERVER)


def simulate(hosts: int) -> Row:
    """Run all simulations for a number of hosts, with a worker on each."""
    with tempfile.TemporaryDirectory() as folder:
        job = SimulatedJob(job_plan(hosts, servers_of(hosts)), Path(folder), Clock())
        outcome = job.run()
    assert outcome.exit_code == 0, outcome.message
    store = SimulatedStore(hosts, servers_of(hosts), Clock(), leaves=hosts <= LEAVES_UP_TO)
    store.run()
    failing = SimulatedStore(hosts, servers_of(hosts), Clock(), fails=True)
    failing.run()
    server = SimulatedServer(hosts, servers_of(hosts), SHARDS, FLOATS, Clock())
    server.run()
    leaves = store.network.sent["LEFT"]
    return Row(
        launch_s=job.phases["launch"].cpu_s,
        beat_s=job.phases["beat"].cpu_s,
        end_s=job.phases["end"].cpu_s,
        register_s=store.phases["register"].cpu_s,
        roster_bytes=store.network.sent_bytes["ROSTER"],
        barrier_s=store.phases["barrier"].cpu_s,
        leave_s=store.phases["end"].cpu_s if leaves else 0.0,
        left=leaves,
        loss_s=failing.phases["end"].cpu_s,
        lost=failing.network.sent["LOST"],
        round_s=server.phases["round"].cpu_s,
    )


def middle(rows: list[Row]) -> Row:
    """Return the medians of the members of some rows."""
    names = Row.__dataclass_fields__
    return Row(**{name: statistics.median(getattr(row, name) for row in rows) for name in names})


def coordinator_table(found: dict[int, Row]) -> str:
    """Return what the coordinator does."""
    rows = ["| hosts | launch, s | one beat of all, ms | part of a core | end, s |", "|---" * 5 + "|"]
    for hosts, row in found.items():
        part = row.beat_s / PING_S
        cells = (hosts, row.launch_s, row.beat_s * 1e3, part * 100, row.end_s)
        rows.append("| %d | %.2f | %.0f | %.1f %% | %.2f |" % cells)
    return "\n".join(rows)


def store_table(found: dict[int, Row]) -> str:
    """Return what the scheduler and a server do."""
    head = "workers", "servers", "registration, s", "rosters, MB", "barrier, ms", "end, s", "loss of one, s"
    rows = ["| %s | a round at one server, ms | us a worker |" % " | ".join(head), "|---" * 9 + "|"]
    each = [row.leave_s / row.left for row in found.values() if row.left]
    for hosts, row in found.items():
        messages = hosts * servers_of(hosts)
        end = "%.1f" % row.leave_s if row.left else "(%.0f)" % (each[-1] * messages) if each else ""
        cells = (hosts, servers_of(hosts), row.register_s, row.roster_bytes / 1e6, row.barrier_s * 1e3)
        more = (row.loss_s, row.round_s * 1e3, row.round_s / hosts * 1e6)
        rows.append("| %d | %d | %.2f | %.0f | %.0f | %s | %.2f | %.0f | %.0f |" % (*cells, end, *more))
    return "\n".join(rows)


HEADING = "Growth by simulation"
SECTION = """\
Measured by `benchmarks/scale.py`. One worker on each host, a server for each %d of them; loops and decisions as
shipped, hosts and nodes that answer by a script, no sockets. So this is processor time of the one process in question,
without ssh, TLS and sockets; [scale.md](scale.md) says what these add, and what breaks first.

The coordinator. Launch: from the first `hello` to the last `started`, with frames, job folder and states. Beat: a ping
to every agent and its answer, each %g s; part of a core: what that takes of one. End: from the first `exited` to the
last `bye`.

%s

The scheduler and one server. Registration: HELLO to ROSTER of all nodes; rosters: what is sent for that. End: all
workers say BYE, which every server is told; in brackets: computed from the row above. Loss of one: until all others
have ended by it. A round: every worker pushes and pulls %d shards of %d KB of one server, by one message and one
answer.

%s

%s
* Medians of %d runs.
%s"""


def say(text: str) -> None:
    """Tell how far it is."""
    print("scale.py: " + text, file=sys.stderr, flush=True)


def main() -> None:
    """Simulate, print the tables, and write the section if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", nargs="+", type=int, default=list(HOSTS), help="(default: 100 1000 10000)")
    parser.add_argument("--runs", type=int, default=1, help="runs of every row (default 1)")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()

    simulate(10)  # imports and caches
    found: dict[int, Row] = {}
    for hosts in options.hosts:
        rows = []
        for number in range(options.runs):
            rows.append(simulate(hosts))
            say("%d hosts, run %d: %s" % (hosts, number + 1, rows[-1]))
        found[hosts] = middle(rows)
    tables = coordinator_table(found), store_table(found)
    print("\n\n".join(tables))
    if options.write:
        import report

        note = "* %s\n" % options.note if options.note else ""
        lines = report.circumstances("scale.py", "--note")
        size = FLOATS * 4 // 1024
        body = SECTION % (HOSTS_A_SERVER, PING_S, tables[0], SHARDS, size, tables[1], lines, options.runs, note)
        report.write(HEADING, body)


if __name__ == "__main__":
    main()
