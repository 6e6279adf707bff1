"""One host's share of a job: what `begin` gave the agent, and what the agent prepared for it.

It has the address and the held ports of the host, and makes the environment and the argument list of each task. All of
that is bytes: odd ones of the user's stay as they were typed. It also has a private folder on the host, which holds its
token, its spool, and the record of what was started:

    HOSTDIR/JOB.NONCE/PLACE/{token, agent.json, spool/, killed}

HOSTDIR is $XDG_RUNTIME_DIR/distrun or, without one, /tmp/distrun-UID: mode 0700, owned by the user, no link. A detached
job's is /var/tmp/distrun-UID: the others may be removed when the user logs out. If another user has made a
folder of that name, it is one with a random suffix.
PLACE is the agent's place, called as the host where a host has one. A machine may have several, and so may several
hosts of a job that are one machine (a test, containers that share /tmp).
The record lets the guard, `distrun kill` and a sweep end exactly what was started; it is rewritten whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Union

from distrun_runtime.contract import environ, facts, gpus, private, process, session
from distrun_runtime.contract.dataclass import read, written
from distrun_runtime.contract.plan import HOLD, WORKER, Host, Plan, Task, from_json
from distrun_runtime.contract.process import Identity
from distrun_runtime.errors import ContractError, PreflightFailure

if TYPE_CHECKING:
    import socket

OF_THE_CONNECTION = ("SSH_*",)
"""Variables of the login by which the agent was reached. Tasks do not get them: it is not their login."""
RECORD_VERSION = 2
TOKEN = "token"
RECORD = "agent.json"
KILLED = "killed"
"""File that says: `distrun kill` on this host ended the job."""
FREE_BYTES = 1024 * 1024
FREE_FILES = 16
"""What must be free on the disk of the folder."""


class Share(NamedTuple):
    """The plan cut down to this host, its address, its held ports, its private folder."""

    plan: Plan
    host: str
    address: str
    """IP address that peers use for this host."""
    held: Mapping[str, socket.socket]
    """Held ports by their label."""
    folder: str
    token_file: str
    secret_env: Mapping[str, str]
    base: Mapping[bytes, bytes] = {}
    """The environment that tasks start from."""
    place: str = ""
    """Name of the place that the agent is; where a host has one, it is called as the host."""
    interface: str = ""
    """Name of the interface that has `address`, if the job has other hosts too."""
    runtime: str = ""
    """Folder that goes first on the tasks' PYTHONPATH; empty: none."""
    python: Mapping[str, str] = {}
    """`VERSION PATH` of the interpreters of tasks that need modules, by the name they are called by."""
    devices: Optional[gpus.HostGpus] = None
    """What the driver tells of the GPUs; None: it was not asked."""
    sees: Optional[gpus.View] = None
    """The GPUs that tasks may see; None: that is not distrun's business."""
    has_environment: bool = False
    """The environment was activated, and interpreters were looked at."""

    @property
    def cwd(self) -> str:
        """Folder of the plan in which tasks run here."""
        return self.plan.tasks[0].cwd if self.plan.tasks else self.plan.cwd

    @property
    def spool_folder(self) -> str:
        """Where the tasks' output is kept until it was taken."""
        return os.path.join(self.folder, "spool")

    @property
    def marks(self) -> Dict[str, str]:
        """What a process of the job is known by, whatever its parent is by then."""
        return process.marks(self.plan.job, self.plan.nonce, self.host, self.place)

    def environment(self, task: Task, sent: Mapping[str, str]) -> Dict[bytes, bytes]:
        """Return a task's environment: this host's, its secrets, what was sent with it, and what it is known by."""
        who = {"DISTRUN_ROLE": task.role, "DISTRUN_RANK": str(task.rank)}
        secrets = {name: self.secret_env[name] for name in task.secret_env if name in self.secret_env}
        # Last, so that nothing overrides what a leftover process is known by.
        last = dict(self.marks, DISTRUN_TOKEN_FILE=self.token_file) if self.token_file else self.marks
        secrets.update((name, self._joined(name, secrets[name])) for name in self.plan.joined if name in secrets)
        env = compose(self.base, (), who, secrets, sent, last)
        if not os.path.isdir(env.get(b"DISTRUN_RUN_DIR", b"")):
            env.pop(b"DISTRUN_RUN_DIR", None)  # the job's folder is on the launching machine; only a shared one is here
        if self.runtime:
            folders = [exact(self.runtime), env.get(b"PYTHONPATH", b"")]
            env[b"PYTHONPATH"] = os.fsencode(os.pathsep).join(folder for folder in folders if folder)
        if self.sees is not None and task.gpus is not None:
            env.update(self._gpus(task, self.sees, *task.gpus))
        if self.interface and task.role == WORKER:
            env.setdefault(b"GLOO_SOCKET_IFNAME", exact(self.interface))
            if _host(self.plan, self.host).interface or self.plan.interface or self.plan.subnet:
                # The user asked for it; else NCCL chooses: it knows faster interfaces.
                env.setdefault(b"NCCL_SOCKET_IFNAME", exact(self.interface))
        return env

    def _joined(self, name: str, sent: str) -> str:
        """Return the folders that were sent and those of this host. The host's come first if activation set them."""
        here = self.base.get(exact(name), b"")
        is_activated = here != environ.snapshot_bytes().get(exact(name), b"")
        lists = [here.decode("utf-8", "surrogateescape"), sent]
        # An empty entry would mean the current directory.
        folders = [entry for each in (lists if is_activated else lists[::-1]) for entry in each.split(":") if entry]
        return ":".join(dict.fromkeys(folders))

    def _gpus(self, task: Task, sees: gpus.View, first: int, count: int) -> Dict[bytes, bytes]:
        """Return the variables by which a task sees its GPUs. The plan has what the hosts file says of them."""
        order = os.fsdecode(self.base.get(os.fsencode(gpus.ORDER), b""))
        found = gpus.variables(sees, first, count, order)
        if gpus.ORDER not in task.env:  # the user gives another
            found.pop(gpus.ORDER, None)
        return {exact(name): exact(value) for name, value in found.items()}

    def ports(self) -> Dict[str, int]:
        """Return the numbers of the held ports by label."""
        return {label: int(held.getsockname()[1]) for label, held in self.held.items()}

    def close(self, has_guard: bool = False) -> None:
        """Let the ports go and remove the folder; a guard that lives removes it after us, and is in the record."""
        for held in self.held.values():
            held.close()
        if has_guard:
            strip_folder(self.folder)
        else:
            remove_folder(self.folder)


def take(header: Mapping[str, Any]) -> Share:
    """Return the share that a `begin` message gives, prepared: address settled, ports held, folder made.

    Raises:
        PreflightFailure, ContractError, OSError, LookupError, TypeError, ValueError: it cannot be taken; the message
            says why.
    """
    if header["version"] != session.VERSION:
        raise PreflightFailure(
            "protocol",
            f"the coordinator speaks version {header['version']!r} of the agent protocol, this agent {session.VERSION}",
            "use one release of distrun on both",
        )
    plan = from_json(header["plan"])
    host = _host(plan, str(header["host"]))
    place = str(header.get("place") or host.name)
    token = str(header.get("token") or "")
    outer = environ.snapshot()
    address = host.address or _address(plan, host, outer)
    named = [task.env["DISTRUN_PORT_RANGE"] for task in plan.tasks if "DISTRUN_PORT_RANGE" in task.env]
    held = {label: hold(address, named[0] if named else "") for label in host.ports}
    folder = make_folder(plan.job, place, token, plan.nonce, lasts=plan.on_eof == HOLD)
    token_file = os.path.join(folder, TOKEN) if token else ""
    # Tasks on this very machine have what the user has, the login included.
    unset = plan.unset if plan.backend == "local" else (*plan.unset, *OF_THE_CONNECTION)
    return Share(
        plan,
        host.name,
        address,
        held,
        folder,
        token_file,
        dict(header.get("secret_env") or {}),
        base=compose(environ.snapshot_bytes(), unset),
        place=place,
        interface=_interface_of(address, plan),
    )


def _host(plan: Plan, name: str) -> Host:
    for host in plan.hosts:
        if host.name == name:
            return host
    names = ", ".join(host.name for host in plan.hosts)
    raise ContractError(f"the plan has no host {name!r}; it has: {names}")


def _address(plan: Plan, host: Host, outer: Mapping[str, str]) -> str:
    """Return the address that peers use for this host, when the plan does not say. Raises PreflightFailure."""
    from distrun_runtime.contract import address  # ctypes: only when it is needed

    others = [each.address or each.name for each in plan.hosts if each.name != host.name]
    try:
        return address.settle(host.interface or plan.interface, plan.subnet, others[0] if others else "", outer)
    except ContractError as err:
        raise PreflightFailure("interface", str(err)) from None


def _interface_of(ip: str, plan: Plan) -> str:
    """Return the interface that has an address; empty in a job of one host, or if none has it."""
    if len(plan.hosts) < 2 or not plan.of_role(WORKER):
        return ""
    from distrun_runtime.contract import address

    return next((row.name for row in address.interfaces() if row.ip == ip), "")


# Environments and arguments


def compose(
    base: Mapping[bytes, bytes],
    unset: Iterable[str],
    *added: Mapping[str, str],
) -> Dict[bytes, bytes]:
    """Return `base` without what `unset` names (a `*` at the end matches the rest), plus `added`. No side effects.

    If several of `added` have a variable, the last one counts.
    """
    names = [exact(name) for name in unset]
    whole = {name for name in names if not name.endswith(b"*")}
    starts = tuple(name[:-1] for name in names if name.endswith(b"*"))
    env = {
        name: value for name, value in base.items() if name not in whole and not (starts and name.startswith(starts))
    }
    for more in added:
        env.update((exact(name), exact(value)) for name, value in more.items())
    return env


def exact(text: str) -> bytes:
    """Return the bytes that a string of the plan stands for (UTF-8, odd bytes as surrogates)."""
    return text.encode("utf-8", "surrogateescape")


def words(task: Task) -> List[bytes]:
    """Return a task's argument list; `~` of the program is the home of the user of this host."""
    return [os.path.expanduser(exact(word)) if not at else exact(word) for at, word in enumerate(task.argv)]


def programs(name: bytes, cwd: str, env: Mapping[bytes, bytes]) -> List[bytes]:
    """Return the paths at which a program may be, in the order in which they are tried. `cwd`: the task's folder."""
    folders = [b""] if b"/" in name else env.get(b"PATH", os.fsencode(os.defpath)).split(b":")
    return [os.path.join(os.path.expanduser(exact(cwd)) or b".", folder, name) for folder in folders]


# Held ports
#
# For programs that cannot tell which port they bound (torch, JAX, ps-lite). A held port is bound with SO_REUSEADDR and
# never listens: the system gives it to no program that asks for any port, but a program that binds it by number with
# SO_REUSEADDR (they all do) gets it. Tried with ZeroMQ, a plain listener, torch's TCPStore and JAX's coordinator on
# Linux. The BSDs refuse a second bind to the very same address; there a program must bind a specific address, not the
# wildcard.


def hold(address: str, port_range: str = "") -> socket.socket:
    """Return a socket that holds a free TCP port on all addresses of `address`'s family.

    Args:
        address: an IP address; only its family counts.
        port_range: A-B, inclusive; empty: any free port.

    Raises:
        ContractError: the range is malformed, or nothing in it is free.
    """
    import socket  # most agents hold no port

    numbers = [0]
    if port_range.strip():
        from distrun_runtime.contract.address import ports_to_try  # with ctypes, which not every Python has

        numbers = ports_to_try(port_range)
    family, anywhere = (socket.AF_INET6, "::") if ":" in address else (socket.AF_INET, "0.0.0.0")
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for port in numbers:
        try:
            if port:
                # Two sockets of ours may both be bound to one port: without SO_REUSEADDR only a free one is given.
                with socket.socket(family, socket.SOCK_STREAM) as attempt:
                    attempt.bind((anywhere, port))
            held.bind((anywhere, port))
            return held
        except OSError:
            continue
    held.close()
    span = f" in {port_range}" if port_range else ""
    raise ContractError(f"no free port{span} on host {socket.gethostname()}; give a wider --port-range")


# The private folder, and the record in it


class RecordedTask(NamedTuple):
    """The first process of a task that was not reaped; its process id is also that of its group and session."""

    name: str
    leader: Identity


class Record(NamedTuple):
    """What an agent started, for those who must end it if the agent cannot."""

    job: str
    host: str
    guard: Identity
    agent: Identity
    grace_s: float
    tasks: Tuple[RecordedTask, ...] = ()
    known: Tuple[Identity, ...] = ()
    """Other processes that were seen to belong to the job."""
    lease_s: float = facts.LEASE_S
    """How long the agent goes on without hearing from its coordinator. The file's time says when it last heard."""
    nonce: str = ""
    """`Plan.nonce`."""


def roots() -> List[str]:
    """Return where HOSTDIR may be, best first."""
    named = environ.text("XDG_RUNTIME_DIR")
    fallback = f"/tmp/distrun-{os.geteuid()}"
    return [os.path.join(named, "distrun"), fallback] if os.path.isabs(named) else [fallback]


def places() -> List[str]:
    """Return where the folders of this user's jobs may be: a later `distrun kill` may have other variables than a job.

    A login through a desktop or a console has XDG_RUNTIME_DIR, one through ssh often has not.
    """
    usual = [f"/run/user/{os.geteuid()}/distrun", f"/tmp/distrun-{os.geteuid()}"]
    names = dict.fromkeys([*roots(), *usual, private.lasting_root()])
    return [each for name in names for each in private.owned(name)]


def private_root() -> str:
    """Return the HOSTDIR that a logout leaves alone, made if need be. Raises ContractError, OSError."""
    root = private.own(private.lasting_root())
    _private(root)
    return root


def all_folders() -> List[str]:
    """Return the folders of all jobs on this machine."""
    return [folder for name in dict.fromkeys(map(os.path.basename, _listed(""))) for folder in _listed(name)]


def make_folder(job: str, host: str, token: str, nonce: str = "", lasts: bool = False) -> str:
    """Make the folder of a job on this host, with its token, and return its path. `lasts`: a logout may not remove it.

    Raises:
        ContractError: no root can be used, with the reason for each; or the folder is in use by a living agent.
    """
    _refuse_a_second(job, nonce, host)
    wrong, is_full = [], False
    for name in [private.lasting_root(), *roots()] if lasts else roots():
        try:
            root = private.own(name)
            _private(root)
            parent = os.path.join(root, _name(job, nonce))
            _private(parent)
            folder = os.path.join(parent, safe_name(host))
            _private(folder)
            _check_space(folder)
            _delete(os.path.join(folder, "spool"))  # of an earlier agent of the same job
            os.mkdir(os.path.join(folder, "spool"), 0o700)
            if token:
                _write(os.path.join(folder, TOKEN), token.encode("utf-8"))
            return folder
        except (OSError, ContractError) as err:
            wrong.append(str(err))
            is_full = is_full or getattr(err, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
    text = f"no private folder can be made for the job on {host}: {'; '.join(wrong)}"
    raise PreflightFailure("disk" if is_full else "other", text, "make room in one of these folders, or make it yours")


def remove_folder(folder: str) -> None:
    """Remove the folder of a job on this host, and the job's if that is empty then. Errors are ignored."""
    _delete(folder)
    with contextlib.suppress(OSError):  # another host of the job lives on this machine
        os.rmdir(os.path.dirname(folder))


def strip_folder(folder: str) -> None:
    """Remove what is in the folder of a job on this host, except the record. Errors are ignored."""
    for name in ("spool", TOKEN, KILLED):
        _delete(os.path.join(folder, name))


def save_record(folder: str, record: Record) -> None:
    """Write the record. Raises OSError."""
    value = json.dumps({**written(record), "version": RECORD_VERSION})
    _write(os.path.join(folder, RECORD), value.encode("utf-8", "surrogateescape"))


def touch_record(folder: str) -> None:
    """Note that the agent is alive and was heard from, without writing the record again. Errors are ignored."""
    with contextlib.suppress(OSError):
        os.utime(os.path.join(folder, RECORD))


def note_kill(folder: str) -> None:
    """Note that `distrun kill` ends the job here, before its agent gets a signal. Errors are ignored."""
    with contextlib.suppress(OSError):  # it is for a message only
        _write(os.path.join(folder, KILLED), b"")


def is_killed(folder: str) -> bool:
    """Return whether `note_kill` was called for this folder."""
    return os.path.exists(os.path.join(folder, KILLED))


def load_record(folder: str) -> Record:
    """Return the record of a folder. Raises OSError if there is none, ContractError if it is not ours."""
    with open(os.path.join(folder, RECORD), "rb") as file:
        text = file.read().decode("utf-8", "surrogateescape")
    try:
        value = json.loads(text)
        if value["version"] != RECORD_VERSION:
            raise ContractError(f"expected version {RECORD_VERSION}, found {value['version']!r}")
        return read(Record, value)
    except (LookupError, TypeError, ValueError, RecursionError) as err:
        raise ContractError(f"this is not an agent record: {err!r}") from None


def find_record(folder: str) -> Optional[Record]:
    """Return the record of a folder; None if there is none that can be read."""
    try:
        return load_record(folder)
    except (OSError, ContractError):
        return None


def folders_of(job: str, nonce: str = "") -> List[str]:
    """Return the folders of a job on this machine, of all its hosts that are here."""
    return list(_listed(_name(job, nonce)))


def _name(job: str, nonce: str) -> str:
    """Return what the folder of a job is called. Two stores may each have a job of that id."""
    return safe_name(f"{job}.{nonce}" if nonce else job)


def _listed(name: str) -> Iterator[str]:
    """Give what is in the folder `name` of each place, if it is this user's alone; in the place itself without one."""
    for root in places():
        folder = os.path.join(root, name)
        with contextlib.suppress(OSError, ContractError):
            private.check(root, closes=True)
            private.check(folder, closes=True)
            names = sorted(os.listdir(folder))
            yield from (os.path.join(folder, each) for each in names)


def _write(path: str, data: bytes) -> None:
    """Write a file of mode 0600 whole: a reader sees the old or the new one. Raises OSError."""
    descriptor = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.replace(path + ".new", path)


def _delete(path: str) -> None:
    """Remove a file, or a folder with everything in it. Errors are ignored."""
    # Not shutil.rmtree: importing shutil takes longer than the rest of an agent's end.
    with contextlib.suppress(OSError):
        if not os.path.isdir(path) or os.path.islink(path):
            os.unlink(path)
            return
        for name in os.listdir(path):
            _delete(os.path.join(path, name))
        os.rmdir(path)


def safe_name(name: str) -> str:
    """Return a name as one component of a path: no slash, no leading dot."""
    text = "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "-_.:@" else "_" for letter in name)
    return "_" + text if text.startswith(".") or not text else text


def _refuse_a_second(job: str, nonce: str, host: str) -> None:
    for folder in folders_of(job, nonce):
        other = find_record(folder)
        if other is not None and other.host == host and process.is_alive(other.agent):
            raise ContractError(
                f"job {job} already has an agent for host {host} on this machine, process {other.agent.pid};"
                f" end it with: distrun kill {job}"
            )


def _check_space(folder: str) -> None:
    """Refuse a disk that is almost full: token, record and output would not fit. Raises OSError."""
    info = os.statvfs(folder)
    if info.f_bavail * info.f_frsize < FREE_BYTES or (info.f_files and info.f_favail < FREE_FILES):
        with contextlib.suppress(OSError):  # only what is empty
            os.rmdir(folder)
            os.rmdir(os.path.dirname(folder))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)


def _private(folder: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    private.check(folder, closes=True)


def cannot_run_in(folder: Union[str, bytes], on: str = "") -> str:
    """Return why a task cannot run in a folder, as the end of a sentence; empty if it can. `on`: such as ` on h1`."""
    if not os.path.isdir(folder):
        return f"is not a folder{on}" if os.path.lexists(folder) else f"does not exist{on}"
    return "" if os.access(folder, os.X_OK) else f"cannot be entered{on}: no permission"


def working_folder(cwd: str) -> str:
    """Return the folder in which a command for tasks runs: theirs if it exists, else that of the agent (empty)."""
    path = os.path.expanduser(cwd)
    return "" if cannot_run_in(path) else path
