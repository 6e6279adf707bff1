"""MPI: `mpirun` starts one agent on each host. The job's tasks are no MPI ranks.

There is no queue: the hosts are those that the user named, or those of the Slurm or Grid Engine allocation in which
distrun was typed. `mpirun` runs here, below a guard (`mpiguard`) that ends it with the job. An agent finds its place by
the rank that mpirun gives each process, and the secret in a variable that mpirun hands on.

What the makes of MPI do differently is in `FLAVORS`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from distrun import formats
from distrun.backends import mpiguard
from distrun.backends.engine import (
    ENDED,
    MARK,
    RUNNING,
    CheckResult,
    Engine,
    EngineError,
    Explanation,
    FoundJob,
    Grant,
    Handle,
    Preparation,
    QueueStatus,
    Script,
    Submission,
    execute,
    one_line,
    refuse_queue_options,
    template,
    text_of,
    tries,
)
from distrun.errors import UsageError
from distrun.hosts import HostSpec
from distrun.request import EngineOptions
from distrun.templates import fill
from distrun_runtime.contract import environ, facts, gpus, process
from distrun_runtime.contract.plan import ROLES, Resources

SECRET = "DISTRUN_ENROLMENT"
"""Variable with the enrolment secret. mpirun is told its name only; the bootstrap removes it."""
FORWARDED = (SECRET, "DISTRUN_JOB_ID", "DISTRUN_JOB_NONCE")
"""Variables that mpirun hands to the agents: the secret, and the marks by which an agent is found."""
PROGRAMS = ("mpirun", "mpiexec", "mpiexec.hydra")
SCRIPT = "mpirun.sh"
HOSTS = "hosts"
OUTPUT_BYTES = 64 << 20
"""Of what mpirun said: its first lines tell why."""
MANY = 1 << 20
"""Tasks of a host that says nothing of slots, where its role has to be counted."""
SYSTEM = ("/usr/bin", "/bin", "/usr/local/bin")
"""Folders whose programs every host finds without help."""
EXPLAIN_S = 4.0
"""How long mpirun's end is awaited for its reason, when its agents have gone."""
WORDS = 3
"""Lines of what mpirun said that are shown."""
NESTED = re.compile(r"OMPI_(?!MCA_|ALLOW_)|PMIX_(?!MCA_)|PMI_|HYDI_")
"""Variables of a process that mpirun started: with them, a mpirun takes itself for a part of that job."""


@dataclass(frozen=True)
class Flavor:
    """One make of MPI: how its mpirun is told what we want of it."""

    name: str
    title: str
    banner: str
    """Regular expression for what its `mpirun --version` says."""
    rank: str
    """Variable in which a process finds its rank. Rank i runs on line i of the hosts file."""
    line: str
    """A line of its hosts file."""
    words: tuple[str, ...]
    """Options before the program: `{n}` processes on the hosts of the file `{hosts}`. They do not bind processes to
    cores, mark each line of output with the rank, and leave the others alone when one process ends."""
    refuses_root: bool = False

    @property
    def forward(self) -> tuple[str, ...]:
        """The options that hand on variables by name, and no others."""
        if self.rank == PMI:
            return ("-genvlist", ",".join(FORWARDED))
        return tuple(word for name in FORWARDED for word in ("-x", name))


OMPI, PMI = "OMPI_COMM_WORLD_RANK", "PMI_RANK"
_OPEN_MPI = ("-np", "{n}", "--hostfile", "{hosts}", "--map-by", "seq", "--bind-to", "none")
_HYDRA = ("-f", "{hosts}", "-ppn", "1", "-n", "{n}", "-prepend-rank", "-disable-auto-cleanup")
FLAVORS = (
    Flavor(
        "openmpi5",
        "Open MPI 5",
        r"\(Open MPI\) (?:[5-9]|\d\d)\.|PRRTE|prterun",
        OMPI,
        "{host} slots=1",
        (
            *_OPEN_MPI,
            *("--output", "tag", "--prtemca", "plm_ssh_no_tree_spawn", "1"),
            *("--rtos", "error-nonzero-status=0,recoverable"),
        ),
        refuses_root=True,
    ),
    Flavor(
        "openmpi4",
        "Open MPI 4",
        r"\((?:Open MPI|OpenRTE)\)",
        OMPI,
        "{host} slots=1",
        (
            *_OPEN_MPI,
            *("--tag-output", "--mca", "plm_rsh_no_tree_spawn", "1"),
            *("--mca", "orte_abort_on_non_zero_status", "0"),  # with --enable-recovery it does not notice a lost host
        ),
        refuses_root=True,
    ),
    Flavor("intel", "Intel MPI", r"Intel\(R\) MPI", PMI, "{host}:1", _HYDRA),
    Flavor("mpich", "MPICH", r"HYDRA|MPICH|mpich", PMI, "{host}:1", _HYDRA),
)
"""In the order in which a banner is compared."""
NAMES = ", ".join(flavor.name for flavor in FLAVORS)


class Installed(NamedTuple):
    """A mpirun of this machine."""

    path: str
    flavor: Flavor
    version: str
    """As `4.1.4`; empty: it does not say."""


@dataclass(frozen=True)
class MpiPreparation(Preparation):
    """The mpirun that starts the agents."""

    mpirun: str = "{mpirun}"
    flavor: str = FLAVORS[0].name


class Mpi(Engine):
    """mpirun, of whatever make."""

    name = "mpi"
    needs_hosts = True
    takes_hosts = True
    hides = ("OPAL_*", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "I_MPI_INFO_*", "I_MPI_PIN_*")

    def __init__(self) -> None:
        self._guard: subprocess.Popen[bytes] | None = None
        self._grants: tuple[Grant, ...] = ()

    def prepare(self, submission: Submission) -> MpiPreparation:
        """Find mpirun and its flavor; refuse what no mpirun can do.

        Raises:
            UsageError: no mpirun, an unknown one, root that was not asked for, options without a meaning here.
        """
        check(submission)
        program, name = _wanted(submission.options)
        try:
            found = installed(program, name, submission.outer)
        except UsageError:
            if not submission.is_dry or program or name:
                raise
            return MpiPreparation()
        if found.flavor.refuses_root and os.geteuid() == 0 and not submission.is_dry and not _allows_root(submission):
            raise UsageError(
                f"{found.path} ({found.flavor.title}) does not run as root, unless it is asked to",
                "launch as another user, or add: --engine-arg=--allow-run-as-root",
            )
        return MpiPreparation(mpirun=found.path, flavor=found.flavor.name)

    def render(self, submission: Submission) -> Script:
        """Return the script that executes mpirun, and its hosts file."""
        flavor = _flavor(submission.found.flavor)
        grants = grants_of(submission)
        path = submission.folder / HOSTS
        mpirun: str = submission.found.mpirun
        words = [mpirun]
        if flavor.rank == OMPI and os.path.dirname(mpirun) in SYSTEM:
            words.append("--noprefix")  # else agents and tasks get this folder's libraries before all others
        words += [each.format(n=len(grants), hosts=path) for each in flavor.words]
        words += flavor.forward
        words += [*shlex.split(submission.options.config.get("args", "")), *submission.options.args]
        agent = submission.bootstrap.command(submission.python, f"env:{flavor.rank}", f"env:{SECRET}")
        values = {
            "job": submission.job,
            "marker": submission.marker,
            "mpirun": formats.join(words),
            "agent": formats.join(agent),
            "folder": str(submission.folder),
        }
        lines = "".join(flavor.line.format(host=grant.node) + "\n" for grant in grants)
        script = fill(template("mpi.sh", submission.options), values)
        return Script({SCRIPT: script, HOSTS: lines}, ((str(submission.folder / SCRIPT),),))

    def submit(self, submission: Submission, script: Script) -> Handle:
        """Start mpirun, below its guard."""
        env = {name: value for name, value in submission.outer.items() if not NESTED.match(name)}
        nonce = submission.marker.rpartition("-")[2]
        env.update(process.marks(submission.job, nonce), **{SECRET: submission.secret})
        env.update(_bootstrap(submission.found.flavor, env))
        argv = [sys.executable, "-I", mpiguard.__file__, submission.marker, str(submission.folder), SCRIPT]
        try:
            self._guard = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,  # its end tells the guard that this process has ended
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                cwd="/",
                start_new_session=True,
            )
        except OSError as err:
            raise EngineError(f"cannot start {argv[0]}: {err.strerror}", "try again") from err
        self._grants = grants_of(submission)
        return _handle(self._guard.pid, submission.marker, str(submission.folder))

    def look(self, handle: Handle) -> QueueStatus:
        """Return whether mpirun runs; if not, with what words it ended."""
        folder = _folder(handle)
        lives = process.is_alive(_identity(handle)) and not self._is_reaped()
        said = text_of(folder / mpiguard.OUTPUT, OUTPUT_BYTES)
        ended = text_of(folder / mpiguard.ENDED).strip()
        grants = self._grants or _grants_in(folder)
        if lives and not ended:
            return QueueStatus(RUNNING, "", grants, gone(said, grants))
        how = f"mpirun {_how(ended)}"
        words = last_words(said)
        return QueueStatus(ENDED, f"{how}: {words}" if words else how, grants, gone(said, grants))

    def _is_reaped(self) -> bool:
        """Return whether the guard was our child and has ended; then it leaves the process table."""
        if self._guard is None or self._guard.poll() is None:
            return False
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        return True

    def cancel(self, handle: Handle) -> None:
        """Have the guard end mpirun, which ends the agents."""
        _folder(handle)
        process.send_signal(_identity(handle), signal.SIGTERM)

    def explain(self, handle: Handle, place: str) -> Explanation | None:
        """Return which signal ended mpirun, or what it said of a host that it lost. Waits a little for its end."""
        folder = _folder(handle)
        has_ended = any(self.look(handle).state == ENDED for _ in tries(EXPLAIN_S))
        ended = text_of(folder / mpiguard.ENDED).strip()
        if has_ended and (not ended or ended.startswith("-")):
            return Explanation(facts.EXIT_HOST_LOST, f"it {_how(ended)} on {handle.more['host']}", "mpirun")
        lost = lost_node(text_of(folder / mpiguard.OUTPUT, OUTPUT_BYTES))
        if lost is None:
            return None
        return Explanation(facts.EXIT_HOST_LOST, f"mpirun lost its connection to {lost or 'a host'}")

    def find(self) -> Sequence[FoundJob]:
        """Return this user's guards on this machine."""
        found = []
        for row in process.mine(process.table()):
            argv = _argv_of(row.pid)
            if len(argv) == 6 and os.path.basename(argv[2]) == GUARD and argv[3].startswith(MARK):
                found.append(FoundJob(_handle(row.pid, argv[3], argv[4]), argv[3], "running"))
        return found

    def examine(self) -> Iterator[CheckResult]:
        """Look for mpirun, and for what it reaches hosts with."""
        env = environ.snapshot()
        found = installed(*_wanted(self.options), env)
        yield CheckResult(True, f"mpirun: {found.path}: {found.flavor.title} (version {found.version or 'unknown'})")
        if found.flavor.refuses_root and os.geteuid() == 0:
            yield CheckResult(False, f"{found.flavor.title} does not run as root", "--engine-arg=--allow-run-as-root")
        outer = next((name for name in ("SLURM_JOB_ID", "PE_HOSTFILE", "PBS_NODEFILE", "LSB_JOBID") if name in env), "")
        ssh = shutil.which("ssh", path=env.get("PATH"))
        if outer:
            yield CheckResult(True, f"in an allocation: {outer}={env[outer]}")
        elif ssh is None:
            yield CheckResult(False, "no ssh program, by which mpirun reaches hosts", "install openssh-client")
        else:
            yield CheckResult(True, f"mpirun reaches hosts by {ssh}, which must not ask for a password")


GUARD = os.path.basename(mpiguard.__file__)


def _how(ended: str) -> str:
    """Return how mpirun ended, by what its guard has written; empty: nothing. No side effects."""
    if not ended:
        return "was killed with its guard"
    return f"was ended by {signal.Signals(-int(ended)).name}" if ended.startswith("-") else f"ended with code {ended}"


# ---------------------------------------------------------------------- what the user asked for


def check(submission: Submission) -> None:
    """Refuse what has no meaning for mpirun. No side effects. Raises UsageError."""
    options = submission.options
    refuse_queue_options(
        options,
        "mpirun asks no queue system and limits nothing",
        "ask a queue system for an allocation and launch in it",
        {
            "--time": options.time_s,
            "--worker-memory": options.worker.memory,
            "--server-memory": options.server.memory,
        },
    )
    if submission.hosts is None or not submission.hosts.specs:
        raise UsageError("--launcher mpi: no hosts are given", "name some with -H FILE or --hosts A,B")
    for spec in submission.hosts.specs:
        wanted = _ssh_lines(spec)
        if wanted:
            raise UsageError(
                f"host {spec.name}: mpirun finds users, ports and keys in ~/.ssh/config only, not in a hosts file",
                f"write there: Host {spec.name}; {'; '.join(wanted)}",
            )
    grants_of(submission)


def _ssh_lines(spec: HostSpec) -> list[str]:
    """Return the lines of ~/.ssh/config that say what a hosts file says of reaching a host. No side effects."""
    found = (("User", spec.user), ("Port", spec.port), ("IdentityFile", spec.identity), ("ProxyJump", spec.jump))
    return [f"{name} {value}" for name, value in found if value]


def _wanted(options: EngineOptions) -> tuple[str, str]:
    """Return the program and the flavor that the user or the site names; empty: none. No side effects."""
    own, config = options.own, options.config
    return own.get("mpirun") or config.get("mpirun", ""), own.get("mpi_flavor") or config.get("flavor", "")


def _bootstrap(flavor: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return how Intel MPI starts processes in an allocation; its mpirun would find out, and is not used."""
    if flavor != "intel" or "I_MPI_HYDRA_BOOTSTRAP" in env:
        return {}
    if "SLURM_JOB_ID" in env:
        return {"I_MPI_HYDRA_BOOTSTRAP": "slurm"}
    return {"I_MPI_HYDRA_BOOTSTRAP": "sge"} if "PE_HOSTFILE" in env else {}


def _allows_root(submission: Submission) -> bool:
    args = (*submission.options.args, *shlex.split(submission.options.config.get("args", "")))
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    return "--allow-run-as-root" in args or all(submission.outer.get(name) == "1" for name in names)


def grants_of(submission: Submission) -> tuple[Grant, ...]:
    """Return the places of a job: its hosts that get a task, each by its line in mpirun's hosts file. No side effects.

    Raises:
        UsageError: the hosts have too little room.
    """
    from distrun.backends.queue import check_room  # it listens, too: not needed to kill a job

    assert submission.hosts is not None, "checked by `check`"
    specs = submission.hosts.specs
    all_of_them = [_grant(str(index), spec) for index, spec in enumerate(specs)]
    used = check_room(submission, all_of_them, submission.servers > 0)
    chosen = [spec for grant, spec in zip(all_of_them, specs, strict=True) if grant.place in used]
    return tuple(_grant(str(index), spec) for index, spec in enumerate(chosen))


def _grant(place: str, spec: HostSpec) -> Grant:
    slots = spec.slots or spec.gpu_count or 0
    takes = {spec.role: slots or MANY} if spec.role in ROLES else {}
    return Grant(place, spec.name, takes, slots, Resources(gpus=gpus.listed(spec.gpus)), spec.max_slots or 0)


# ---------------------------------------------------------------------- which mpirun


def flavor_of(banner: str) -> Flavor | None:
    """Return the flavor whose `--version` this is; None: it is unknown. No side effects."""
    return next((flavor for flavor in FLAVORS if re.search(flavor.banner, banner)), None)


def _flavor(name: str) -> Flavor:
    found = next((flavor for flavor in FLAVORS if flavor.name == name), None)
    if found is None:
        raise UsageError(f"--mpi-flavor: expected one of {NAMES}, found {name!r}")
    return found


def installed(
    program: str, name: str, env: Mapping[str, str], ask: Callable[[str, Mapping[str, str]], str] | None = None
) -> Installed:
    """Return the mpirun to use, by what it says of itself.

    Args:
        program: a name or a path; empty: the first of PROGRAMS that is there.
        name: the flavor, if the user says it.
        env: the environment with its PATH.
        ask: returns the banner of a program; for tests.

    Raises:
        UsageError: there is none, or its flavor is unknown.
    """
    wanted = (os.path.expanduser(program),) if program else PROGRAMS
    found = next(filter(None, (shutil.which(each, path=env.get("PATH", os.defpath)) for each in wanted)), None)
    if found is None:
        raise UsageError(
            f"--launcher mpi: there is no {' or '.join(wanted)} on this machine",
            "install Open MPI or MPICH here and on the hosts, or name one: --mpirun /path/to/mpirun",
        )
    found = os.path.abspath(found)
    # mpirun of Intel MPI is a shell script that takes the first mpiexec.hydra in PATH.
    beside = os.path.join(os.path.dirname(found), "mpiexec.hydra")
    if os.path.basename(found) in ("mpirun", "mpiexec") and os.access(beside, os.X_OK) and _is_script(found):
        found = beside
    chosen = _flavor(name) if name else None
    banner = (ask or _banner)(found, env)
    flavor = chosen or flavor_of(banner)
    first = next((line.strip() for line in banner.splitlines() if line.strip()), "it says nothing")
    if flavor is None:
        raise UsageError(
            f"{found} is of an unknown make; its --version says: {first}", f"say how it is used: --mpi-flavor {NAMES}"
        )
    number = re.search(r"\d+\.\d+(?:\.\d+)*", banner)
    return Installed(found, flavor, number[0] if number else "")


def _is_script(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def _banner(path: str, env: Mapping[str, str]) -> str:
    try:
        told = execute([path, "--version"], env={name: value for name, value in env.items() if not NESTED.match(name)})
    except EngineError as err:
        raise UsageError(str(err), "name another: --mpirun PROGRAM") from err
    return told.out + told.err


# ---------------------------------------------------------------------- what mpirun says

_TAG = re.compile(r"\[(?:[^\]\s]*,)?(\d+)\](?:<stderr>:|<stdout>:)? ?(.*)")
"""A line of an agent's: `[1,0]<stderr>:text`, `[prterun-h-1@1,0]<stderr>: text`, `[0] text`."""
_UNREACHED = re.compile(
    r"could not resolve hostname|permission denied|host key verification failed|no route to host|network is unreachable"
    r"|connection (?:refused|timed out|closed|reset)|command not found|unable to run bstrap_proxy on",
    re.IGNORECASE,
)
"""What ssh says of a host that it does not reach, with the host's name."""
_TELLING = re.compile(
    rf"distrun: |{_UNREACHED.pattern}|execvp error|unable to find the specified executable|^ *Executable:|^ *Node:"
    r"|not enough slots|lost communication|Remote daemon:|exited abnormally"
    r"|unrecognized (?:option|argument)|error while loading|no such file",
    re.IGNORECASE,
)
_LOST = re.compile(
    r"has lost communication with a remote daemon.*?Remote daemon:[^\n]* on node (\S+)"
    r"|^Connection to (\S+) closed by remote host|Downstream from host (\S+) exited abnormally"
    r"|control_cb .*assert \(!closed\) failed",
    re.DOTALL | re.MULTILINE,
)
"""What Open MPI, ssh, Intel MPI and MPICH say when a host goes while the job runs. MPICH does not name it."""
_NOISE = re.compile(r"^[-=@*\s]*$|setpgid\(|Permanently added|^NOTE:|aggregate|has sent help message")


def gone(said: str, grants: Iterable[Grant]) -> dict[str, str]:
    """Return the places that mpirun could not start, and why, by what it and the agents said so far."""
    grants = tuple(grants)
    places = {grant.place for grant in grants}
    found: dict[str, str] = {}
    for line in said.splitlines():
        tagged = _TAG.match(line)
        if tagged is not None and tagged[1] in places:
            if "distrun: " in tagged[2] or "execvp error" in tagged[2]:
                found.setdefault(tagged[1], one_line(tagged[2]))
        elif _UNREACHED.search(line) and not _NOISE.search(line):
            for grant in grants:
                if re.search(rf"(?<![\w.-]){re.escape(grant.node)}(?![\w-])", line):
                    found.setdefault(grant.place, one_line(line))
    lost = lost_node(said)
    for grant in grants:
        if lost and grant.node == lost:
            found.setdefault(grant.place, "mpirun lost its connection to it")
    return found


def last_words(said: str) -> str:
    """Return the few lines of what mpirun said that tell why it ended; empty: it said nothing. No side effects."""
    lines = [line.strip() for line in said.splitlines() if not _NOISE.search(line)]
    telling = list(dict.fromkeys(line for line in lines if _TELLING.search(line)))
    return one_line("; ".join(telling[:WORDS] or lines[-WORDS:]))


def lost_node(said: str) -> str | None:
    """Return the host that mpirun has lost while the job ran; empty: it does not say which; None: none."""
    found = list(_LOST.finditer(said))
    if not found:
        return None
    return next((name for match in found for name in match.groups() if name), "")


# ---------------------------------------------------------------------- the guard of a job


def _handle(pid: int, marker: str, folder: str) -> Handle:
    more = {"start": process.identity(pid).start, "host": socket.gethostname(), "marker": marker, "folder": folder}
    return Handle(Mpi.name, str(pid), more)


def _identity(handle: Handle) -> process.Identity:
    return process.Identity(int(handle.id), handle.more["start"])


def _folder(handle: Handle) -> Path:
    """Return the folder of a job whose mpirun is on this machine. Raises EngineError."""
    if handle.more["host"] != socket.gethostname():
        raise EngineError(
            f"mpirun of this job (pid {handle.id}) runs on {handle.more['host']}",
            f"log in there: ssh {handle.more['host']}",
        )
    return Path(handle.more["folder"])


def _grants_in(folder: Path) -> tuple[Grant, ...]:
    """Return the places of a job by its hosts file, for those who did not start it."""
    nodes = [re.split(r" slots=|:1$", line)[0] for line in text_of(folder / HOSTS).splitlines()]
    return tuple(Grant(str(index), node) for index, node in enumerate(nodes))


def _argv_of(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [os.fsdecode(word) for word in Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")[:-1]]
    return []
