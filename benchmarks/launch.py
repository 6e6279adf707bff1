"""Measures how fast a job starts and ends on many hosts, beside other ways to run programs there.

    python benchmarks/launch.py --write         # as root: the hosts are the lab's; docs/benchmarks.md

Three jobs, each with one process on every host:

* python3 prints a line and sleeps until it is ended. Measured: from the start of the launcher to the first line of the
  last host, then from Ctrl-C until no process of it is left anywhere.
* `true`. Measured: from the start of the launcher to its end.
* On this machine: python3 prints a line, beside a bare `python3 -c pass`.

All systems take turns in every run, so that a disturbance of the machine meets all of them. What is not installed is
left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "lab"))

if TYPE_CHECKING:
    from hostlab import Lab, Process

OURS = "distrun"
WINDOW = 32
LIMIT_S = 120.0
SETTLE_S = 0.5
"""Between the last line and Ctrl-C, so that whoever still starts something has done so."""
TASK = ("/usr/bin/python3", "-c", "import time; print('up', flush=True); time.sleep(3600)")
TRUE = ("true",)
BARE = ("/usr/bin/python3", "-c", "pass")
HELLO = ("/usr/bin/python3", "-c", "print('up', flush=True)")
LOOP = str(ROOT / "benchmarks/peers/ssh_loop.py")
MPI_ENV = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# The launcher has two networks; without this mpirun may choose one at random.
MPI = ("mpirun.openmpi", "--mca", "oob_tcp_if_include", "10.77.0.0/16")


@dataclass(frozen=True)
class System:
    """One column: how it is started, with {hosts} and {count}; the task and its mark follow."""

    name: str
    argv: tuple[str, ...]
    program: str
    """What has to be installed."""

    def command(self, hosts: str, count: int, mark: str, task: tuple[str, ...] = TASK) -> list[str]:
        """Return the whole command."""
        words = [word.format(hosts=hosts, count=count, mark=mark) for word in self.argv]
        return [*words, *task, mark]


SYSTEMS = (
    System(
        OURS,
        (sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "-H", "{hosts}", "-n", "{count}", "-s", "0"),
        sys.executable,
    ),
    System("ssh loop", (sys.executable, LOOP, "{hosts}", str(WINDOW), "{mark}"), "ssh"),
    System("mpirun", (*MPI, "--hostfile", "{hosts}", "-np", "{count}"), MPI[0]),
    System("ssh a process", (sys.executable, LOOP, "{hosts}", "0", "{mark}"), "ssh"),
)


@dataclass(frozen=True)
class Run:
    """One run of one system. Seconds, bytes."""

    start_s: float
    end_s: float
    cpu_s: float
    """Processor time of the launcher and of all programs that it started where it runs."""
    memory: int
    """Memory of the launcher's own processes when all hosts were up; what they share counts once (PSS)."""
    left: int
    """Processes that were still there LIMIT_S after Ctrl-C, or came later."""
    whole_s: float
    """A job of `true`, from the start of the launcher to its end."""


def strangers(lab: Lab, before: set[int]) -> list[Process]:
    """Return what the launcher started: everything on hosts but sshd, and what is new where the launcher runs."""
    found = lab.processes()
    return [p for p in found if p.pid not in before and not (p.host != "launcher" and p.name.startswith("sshd"))]


def lines(child: subprocess.Popen[bytes], count: int) -> float:
    """Read the child's stdout until `count` lines have come; return when that was."""
    assert child.stdout is not None
    end, said, seen = time.monotonic() + LIMIT_S, b"", 0
    while seen < count:
        if not select.select([child.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            raise RuntimeError("after %g s only %d of %d hosts have said something" % (LIMIT_S, seen, count))
        data = os.read(child.stdout.fileno(), 65536)
        if not data:
            raise RuntimeError("it ended when %d of %d hosts had said something" % (seen, count))
        said += data  # a line may come in two pieces
        seen = said.count(b"up\n")
    return time.monotonic()


def child_of(pid: int) -> int:
    """Return the process that nsenter has started."""
    text = Path("/proc/%d/task/%d/children" % (pid, pid)).read_text().split()
    return int(text[0])


def memory_of(pid: int) -> int:
    """Return the memory of a process and its children, bytes; pages that several processes share count once."""
    total = 0
    for each in [pid, *map(int, Path("/proc/%d/task/%d/children" % (pid, pid)).read_text().split())]:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path("/proc/%d/smaps_rollup" % each).read_text().splitlines():
                total += int(line.split()[1]) * 1024 if line.startswith("Pss:") else 0
    return total


def wait_gone(pids: list[int]) -> None:
    """Wait until these processes have ended, at most LIMIT_S. Costs nothing while it waits."""
    end = time.monotonic() + LIMIT_S
    with contextlib.ExitStack() as stack:
        living = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                living[pid] = os.pidfd_open(pid)
                stack.callback(os.close, living[pid])
        for fd in living.values():
            select.select([fd], [], [], max(0.0, end - time.monotonic()))


def environment(lab: Lab, folder: Path) -> dict[str, str]:
    """Return the launcher's variables."""
    state = {"XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder.parent / "cache")}
    # As where it is installed: compiled once. Not into this checkout.
    compiled = {"PYTHONPYCACHEPREFIX": str(folder.parent / "pycache"), "PYTHONDONTWRITEBYTECODE": ""}
    return {**lab.launcher_env(os.environ), **state, **compiled, **MPI_ENV}


def measure_true(lab: Lab, system: System, listed: Path, count: int, folder: Path) -> float:
    """Run `true` once on every host; return the seconds until the launcher's end."""
    argv = lab.enter_argv(*system.command(str(listed), count, "mark", TRUE), cwd="/tmp")
    begun = time.monotonic()
    done = subprocess.run(
        argv, env=environment(lab, folder), stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False
    )
    took = time.monotonic() - begun
    if done.returncode:
        raise RuntimeError("%s: exit code %d; its words:\n%s" % (system.name, done.returncode, done.stderr.decode()))
    return took


def measure(lab: Lab, system: System, hosts: list[str], folder: Path) -> Run:
    """Run a system once over these hosts."""
    mark = "mark-" + secrets.token_hex(6)
    listed = folder / "hosts"
    listed.write_text("".join(host + "\n" for host in hosts))
    whole_s = measure_true(lab, system, listed, len(hosts), folder)
    before = {process.pid for process in lab.processes()}
    env = environment(lab, folder)
    # A session of its own: Ctrl-C goes to all of it, as from a terminal, and not to nsenter.
    argv = lab.enter_argv("setsid", *system.command(str(listed), len(hosts), mark), cwd="/tmp")
    with (folder / "err").open("wb") as err:
        begun = time.monotonic()
        child = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err)
    try:
        up = lines(child, len(hosts))
        time.sleep(SETTLE_S)
        launcher = child_of(child.pid)
        memory = memory_of(launcher)
        pids = [process.pid for process in strangers(lab, before)]
        ended = time.monotonic()
        os.killpg(launcher, signal.SIGINT)
        wait_gone(pids)
        _, status, usage = os.wait4(child.pid, 0)
        over = time.monotonic()
        child.returncode = os.waitstatus_to_exitcode(status)
        left = strangers(lab, before)
    except (RuntimeError, OSError) as error:
        raise RuntimeError("%s: %s; its words:\n%s" % (system.name, error, (folder / "err").read_text())) from error
    finally:
        for process in strangers(lab, before):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if child.stdout is not None:
            child.stdout.close()
        child.wait()
    return Run(up - begun, over - ended, usage.ru_utime + usage.ru_stime, memory, len(left), whole_s)


def measure_local(runs: int, home: Path) -> tuple[float, float, float, float]:
    """Run one worker on this machine; medians in seconds: its first line, the launcher's end, a bare python3, the
    ratio of the first line to a bare python3 of the same run."""
    state = {"XDG_STATE_HOME": str(home / "state"), "XDG_CACHE_HOME": str(home / "cache")}
    compiled = {"PYTHONPYCACHEPREFIX": str(home / "pycache"), "PYTHONDONTWRITEBYTECODE": ""}
    env = {**os.environ, **state, **compiled}
    launch = (sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "-n", "1", "-s", "0", *HELLO)
    found = []
    for number in range(runs + 1):
        bare = min(seconds(lambda: subprocess.run(BARE, check=True)) for _ in range(3))
        begun = time.monotonic()
        child = subprocess.Popen(launch, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        first = lines(child, 1) - begun
        if child.wait(LIMIT_S):
            raise RuntimeError("a local job ended with code %d" % child.returncode)
        if number:
            found.append((first, time.monotonic() - begun, bare, first / bare))
        if child.stdout is not None:
            child.stdout.close()
    first, end, bare, ratio = (statistics.median(values) for values in zip(*found, strict=True))
    return first, end, bare, ratio


def seconds(work: Callable[[], object]) -> float:
    """Return how long `work` takes."""
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


def measure_all(
    lab: Lab, columns: list[System], options: argparse.Namespace, home: Path
) -> dict[tuple[int, str], list[Run]]:
    """Return the runs by (hosts, system); one that failed is absent, and said. `home`: where all runs keep things."""
    found: dict[tuple[int, str], list[Run]] = {}
    for count in options.hosts:
        hosts = list(lab.hosts)[:count]
        for number in range(options.runs + 1):
            for system in columns:
                with tempfile.TemporaryDirectory(dir=home) as folder:
                    try:
                        run = measure(lab, system, hosts, Path(folder))
                    except RuntimeError as error:
                        say(str(error))
                        continue
                say(
                    f"{count} hosts, {system.name}, run {number}: start {run.start_s:.2f} s, end {run.end_s:.2f} s, "
                    f"true {run.whole_s:.2f} s, CPU {run.cpu_s:.2f} s, {run.memory / 1e6:.0f} MB, left {run.left}"
                )
                if number:  # the first one finds cold caches, here and on the hosts
                    found.setdefault((count, system.name), []).append(run)
    return found


def median(runs: list[Run], name: str) -> float:
    """Return the median of one member."""
    return statistics.median(float(getattr(run, name)) for run in runs)


def times(columns: list[System], counts: list[int], found: dict[tuple[int, str], list[Run]], name: str) -> str:
    """Return a table of medians, seconds; the last column is ours divided by the fastest other's. Pure."""
    names = [system.name for system in columns]
    rows = ["| hosts | %s | ratio |" % " | ".join(names), "|---" * (len(names) + 2) + "|"]
    for count in counts:
        values = {each: median(found[count, each], name) for each in names if (count, each) in found}
        others = [value for each, value in values.items() if each != OURS]
        cells = ["%.2f" % values[each] if each in values else "failed" for each in names]
        ratio = "%.2f" % (values[OURS] / min(others)) if others and OURS in values else ""
        rows.append("| %d | %s | %s |" % (count, " | ".join(cells), ratio))
    return "\n".join(rows)


def costs(columns: list[System], counts: list[int], found: dict[tuple[int, str], list[Run]]) -> str:
    """Return what a host costs: seconds from start to last line, CPU milliseconds and memory of the launcher. Pure."""
    names = [system.name for system in columns]
    head = ["hosts", "start, ms a host", "memory, MB", "memory, MB a host", *("CPU, %s" % name for name in names)]
    rows = ["| %s |" % " | ".join(head), "|---" * len(head) + "|"]
    least = found.get((min(counts), OURS), [])
    for count in counts:
        ours = found.get((count, OURS))
        if not ours:
            continue
        memory = median(ours, "memory")
        more = (memory - median(least, "memory")) / (count - min(counts)) if least and count > min(counts) else None
        cells = ["%d" % count, "%.0f" % (median(ours, "start_s") / count * 1e3), "%.0f" % (memory / 1e6)]
        cells.append("" if more is None else "%.2f" % (more / 1e6))
        for name in names:
            runs = found.get((count, name))
            cells.append("%.0f" % (median(runs, "cpu_s") / count * 1e3) if runs else "failed")
        rows.append("| %s |" % " | ".join(cells))
    return "\n".join(rows)


HEADING = "Starting and ending on many hosts"
SECTION = """\
Measured by `benchmarks/launch.py`. One process on each host: python3 prints a line and sleeps until it is ended;
the same for every system. The hosts are the lab's (`scripts/lab`): each has an address, an sshd and processes of its
own, and all share the cores of one machine, so what is measured is the processor time of both sides of ssh.

* ssh loop: the OpenSSH client, %d connecting at a time; after Ctrl-C, which ends nothing on the hosts, `pkill` on all
  of them in the same way.
* mpirun: Open MPI's.
* ssh a process: the scheme of launch.py, a shell and an ssh client for each process, all at once; after Ctrl-C
  the loop over the hosts, one after the other, that its users are told to type.

Seconds from the start to the first line of the last host; ratio: distrun's time divided by the fastest other's.

%s

Seconds from the start to the end of a job of `true`, which prints nothing.

%s

Seconds from Ctrl-C until no process of it is left on any host, launcher included.

%s

The launcher: its time and memory, and CPU milliseconds a host where it runs, with all programs that it starts there,
from the start to the end after Ctrl-C.

%s

One worker on this machine, which prints a line: %.0f ms to that line, %.0f ms to the end of the launcher. A bare
`python3 -c pass` takes %.0f ms; ratio to the first line: %.1f.

%s
* Median of %d runs after one that is not counted; the systems take turns. Load before: %s.
%s"""


@contextlib.contextmanager
def lab_of(count: int, share: Sequence[Path] = ()) -> Iterator[Lab]:
    """A lab of so many hosts, which see nothing of this checkout but these folders."""
    from hostlab import Lab, Options, Unavailable

    try:
        # mpirun starts its daemons from host to host, so these need the key.
        lab = Lab.up(count, Options(mesh=True), hide=[ROOT], share=share)
    except Unavailable as why:
        say(str(why))
        sys.exit(2)
    try:
        yield lab
    finally:
        lab.down()


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("launch.py: " + text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print the tables, and write the section if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--systems", nargs="+", help="only these columns (default: all that are there)")
    parser.add_argument("--runs", type=int, default=5, help="runs of every system (default 5, after one to warm up)")
    parser.add_argument("--local-runs", type=int, default=9, help="runs on this machine (default 9, after one)")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()

    columns = [system for system in SYSTEMS if not options.systems or system.name in options.systems]
    for system in columns:
        if shutil.which(system.program) is None:
            say("%s is left out: there is no %s" % (system.name, system.program))
    columns = [system for system in columns if shutil.which(system.program)]
    load = "%.1f" % os.getloadavg()[0]
    with lab_of(max(options.hosts)) as lab, tempfile.TemporaryDirectory(prefix="bench-") as home:
        found = measure_all(lab, columns, options, Path(home))
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        local = measure_local(options.local_runs, Path(home))
    tables = (
        times(columns, options.hosts, found, "start_s"),
        times(columns, options.hosts, found, "whole_s"),
        times(columns, options.hosts, found, "end_s"),
        costs(columns, options.hosts, found),
    )
    alone = (*(value * 1e3 for value in local[:3]), local[3])
    print("\n\n".join(tables))
    print("\nlocal: first line %.0f ms, end %.0f ms, bare python3 %.0f ms, ratio %.1f" % alone)
    if options.write:
        import report

        note = "* %s\n" % options.note if options.note else ""
        lines_ = report.circumstances("launch.py", "--note")
        report.write(HEADING, SECTION % (WINDOW, *tables, *alone, lines_, options.runs, load, note))
    is_clean = all(run.left == 0 for (_, name), runs in found.items() if name == OURS for run in runs)
    is_whole = all(len(found.get((count, s.name), ())) == options.runs for count in options.hosts for s in columns)
    sys.exit(0 if is_clean and is_whole else 1)


if __name__ == "__main__":
    main()
