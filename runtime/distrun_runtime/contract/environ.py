"""The one table of environment variables, and the only reader of os.environ.

Every variable that distrun sets or reads is in `TABLE` with its type, default and range; `docs/environment.md`
is checked against it. `read` gives a checked value or an error that says variable, value, host and what would be
right. Standard library only, Python 3.8.
"""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from distrun_runtime.errors import ContractError

INT = "integer"
FLOAT = "number"
BOOL = "0 or 1"
TEXT = "text"

LONGEST_S = 31_536_000
"""Seconds that a user may ask for at most: a year. Every wait takes it, on every system."""

GIVEN = "given"
"""distrun gives it to tasks; a value of an outer job is removed first."""
READ = "read"
"""The user sets it, distrun reads it."""
BOTH = "given and read"
"""Given to tasks by the launcher; set by hand for a manual start."""


class Variable(NamedTuple):
    """One row of the table."""

    name: str
    use: str
    type: str
    doc: str
    group: str = ""
    default: Any = None
    low: Optional[float] = None
    high: Optional[float] = None
    choices: Tuple[str, ...] = ()
    stale: bool = False
    """Describes one task of one job, so that an outer job's value must not reach ours."""

    def range_text(self) -> str:
        """Return what values are right, in words."""
        if self.choices:
            return " or ".join(self.choices) if len(self.choices) < 3 else "one of " + ", ".join(self.choices)
        if self.type in (TEXT, BOOL):
            return self.type
        if self.low is not None and self.high is not None:
            return f"{self.type} from {_number(self.low)} to {_number(self.high)}"
        if self.low is not None:
            return f"{self.type}, at least {_number(self.low)}"
        return self.type

    @property
    def default_text(self) -> str:
        """The default as it is written; empty: there is none, or it is empty."""
        return "" if self.default is None else str(int(self.default) if self.type == BOOL else self.default)


def _number(value: float) -> str:
    return f"{int(value)}" if value == int(value) else f"{value:g}"


_PORT = {"low": 1, "high": 65535}
_TYPES = {bool: BOOL, int: INT, float: FLOAT, str: TEXT}


def _row(use: str, name: str, doc: str, **more: Any) -> Variable:
    """Return a row. Its type is that of its default or, without one, of its smallest value; else it is a text."""
    like = more.get("default", more.get("low", ""))
    return Variable(**{"name": name, "use": use, "doc": doc, "type": _TYPES[type(like)], "stale": use != READ, **more})


_gives, _both, _reads = (partial(_row, use) for use in (GIVEN, BOTH, READ))

# What every task can ask about itself.
_DISTRUN = (
    _both("DISTRUN_JOB_ID", "The job's id; also the marker by which leftover processes are found."),
    _gives(
        "DISTRUN_JOB_NONCE",
        "64 random bits of the job, hex: with the id, the marker by which leftover processes are found. No secret.",
    ),
    _gives("DISTRUN_ROLE", "The task's role.", choices=("scheduler", "server", "worker")),
    _gives("DISTRUN_PLACE", "The task's place: its agent's name. A host with one agent is one place of its own name."),
    _both("DISTRUN_RANK", "Index of the task in its role, from 0.", low=0),
    _gives("DISTRUN_WORLD_SIZE", "Number of tasks of the role.", low=1),
    _gives("DISTRUN_LOCAL_RANK", "Index among the tasks of the role on this host, or of this place.", low=0),
    _gives("DISTRUN_LOCAL_SIZE", "Number of tasks of the role on this host, or of this place.", low=1),
    _gives("DISTRUN_NODE_RANK", "Index of this host among the job's hosts.", low=0),
    _gives("DISTRUN_NUM_NODES", "Number of hosts of the job.", low=1),
    _both("DISTRUN_HOST", "What the job calls this host (as in the output's prefixes)."),
    _gives("DISTRUN_ADDR", "This host's address for data: an IP address."),
    _both(
        "DISTRUN_WORKER_ADDRESSES",
        "Addresses of the hosts with workers, separated by commas; for the bundled scheduler.",
    ),
    _both(
        "DISTRUN_RELAYS",
        "Servers beyond DMLC_NUM_SERVER that keep no values: they add what workers of their host push.",
        low=0,
        default=0,
    ),
    _both("DISTRUN_RESTART", "How often this task was started before.", low=0, default=0),
    _gives(
        "DISTRUN_RUN_DIR",
        "The job's folder, which is kept after the job: logs and files of tasks. Not set on a host that does not"
        " have it.",
    ),
    _both("DISTRUN_TOKEN_FILE", "File (mode 0600) with the job's token; without it a job runs open."),
    _gives("DISTRUN_PUBLISH_FD", "Descriptor on which a task tells its agent facts, one JSON object a line.", low=0),
    _gives(
        "DISTRUN_PUBLISH_PIPE",
        "Which pipe that is, DEVICE:INODE as fstat tells them. A process that inherited the variables, but not the"
        " descriptor, sees by it that the number means another file.",
    ),
    _gives(
        "DISTRUN_METRICS_SOCKET",
        "Unix datagram socket on which a task tells its agent numbers that may be lost. Set where the agent has one.",
    ),
)
# What `distrun.launch_function` tells the program that it launches.
_FUNCTIONS = (_reads("DISTRUN_CALL", "The packed arguments of a function that workers call.", default="", stale=True),)
# The parameter-server set of launch.py, ps-lite and BytePS.
_DMLC = (
    _both("DMLC_ROLE", "The process's role.", choices=("scheduler", "server", "worker")),
    _both("DMLC_PS_ROOT_URI", "The scheduler's IP address; by hand also a name, which is resolved."),
    _both(
        "DMLC_PS_ROOT_PORT",
        "The scheduler's port. Started by hand, the scheduler binds exactly this port; with --ps command it is held as"
        " MASTER_PORT is; the bundled scheduler under the launcher gets none and takes a free one.",
        **_PORT,
    ),
    _both("DMLC_NUM_WORKER", "Number of workers.", low=1),
    _both("DMLC_NUM_SERVER", "Number of servers; 0: none, and dist stores cannot be created.", low=0),
    _both("DMLC_NODE_HOST", "The address that this process binds and tells its peers. A name is resolved."),
    _gives("DMLC_TASK_ID", "Worker i: i. Server j: number of workers + j.", low=0),
    _both("DMLC_WORKER_ID", "A worker's rank.", low=0),
    _both("DMLC_SERVER_ID", "A server's rank.", low=0),
    _both("DMLC_RANK", "The process's rank in its role.", low=0),
    _gives("DMLC_JOB_CLUSTER", "The backend that started the job, as `--launcher` names it."),
    _reads("DMLC_INTERFACE", "Network interfaces for data by exact name, the first that a host has: eth0 or ib0,eth0."),
    _reads("DMLC_LOCAL", "Removed from tasks: it would move ps-lite to Unix sockets.", type=BOOL, stale=True),
    _gives("DMLC_NUM_ATTEMPT", "How often this task was started before.", low=0),
    _gives("DMLC_TRACKER_URI", "Removed: the address of an outer job's rabit tracker."),
    _gives("DMLC_TRACKER_PORT", "Removed: the port of an outer job's rabit tracker.", **_PORT),
)
# torch.distributed's env:// rendezvous. Workers only.
_TORCH = (
    _gives("RANK", "The worker's rank.", low=0),
    _gives("WORLD_SIZE", "Number of workers.", low=1),
    _gives("LOCAL_RANK", "Index among the workers of this host, or of this place.", low=0),
    _gives("LOCAL_WORLD_SIZE", "Number of workers of this host, or of this place.", low=1),
    _gives("MASTER_ADDR", "Data address of worker 0's host."),
    _gives(
        "MASTER_PORT",
        "A port for worker 0 to listen on. Its host's agent holds it bound with SO_REUSEADDR until the job ends, so"
        " the program must set SO_REUSEADDR before it binds, as torch, JAX, ZeroMQ and Python's servers do; XGBoost,"
        " LightGBM and a bare socket() do not, and get 'Address already in use'.",
        **_PORT,
    ),
    _gives("GROUP_RANK", "Index of this host among the hosts with workers.", low=0),
    _gives("GROUP_WORLD_SIZE", "Number of hosts with workers.", low=1),
    _gives("NODE_RANK", "The same as GROUP_RANK.", low=0),
    _gives("ROLE_RANK", "The worker's rank.", low=0),
    _gives("ROLE_WORLD_SIZE", "Number of workers.", low=1),
    _gives("ROLE_NAME", "`worker`."),
    _gives("TORCHELASTIC_RESTART_COUNT", "How often the job was restarted: 0 in this version.", low=0),
    _gives("TORCHELASTIC_MAX_RESTARTS", "How often it may be: 0.", low=0),
    _gives("TORCHELASTIC_RUN_ID", "The job's id."),
    _gives(
        "GLOO_SOCKET_IFNAME",
        "In jobs of several hosts: the interface that has this host's data address, unless you set it.",
        stale=False,
    ),
    _gives(
        "NCCL_SOCKET_IFNAME",
        "The same, but only with --interface or --subnet: NCCL finds its interfaces itself.",
        stale=False,
    ),
)
# GPUs of every task.
_GPUS = (
    _gives(
        "CUDA_VISIBLE_DEVICES",
        "On a host with `gpus=` in the hosts file, unless you set it: all its GPUs, for each task there. So"
        " `cuda:LOCAL_RANK` is a GPU of the worker's own while a host has no more workers than GPUs; the launch warns"
        " where it has more. With --gpus-per-worker: a worker's own GPUs, which it numbers from 0; empty for servers"
        " and scheduler.",
        stale=False,
    ),
    _gives(
        "CUDA_DEVICE_ORDER",
        "PCI_BUS_ID where distrun sets CUDA_VISIBLE_DEVICES, unless you set it: GPUs are numbered as nvidia-smi does.",
        stale=False,
    ),
)
# JAX. Workers only.
_JAX = (
    _gives(
        "JAX_COORDINATOR_ADDRESS",
        "IP:port where worker 0 listens. The port is another than MASTER_PORT and held in the same way: a program that"
        " binds it must set SO_REUSEADDR before, as jax.distributed.initialize does.",
    ),
    _gives("JAX_NUM_PROCESSES", "Number of workers.", low=1),
    _gives("JAX_PROCESS_ID", "The worker's rank.", low=0),
)
_PYTHON = (
    _gives("PYTHONUNBUFFERED", "1, unless you set it: lines appear when they are printed.", stale=False),
    _gives("PYTHONPATH", "The bundled runtime is put in front of your value.", stale=False),
    _gives(
        "GLIBC_TUNABLES",
        "Workers with bundled servers, unless you set it: how the C library copies. Empty: off.",
        stale=False,
    ),
)
# Tuning: the seeds' names.
_TUNING = (
    _reads(
        "MXNET_KVSTORE_BIGARRAY_BOUND",
        "Values of at least so many elements are cut over all servers; smaller ones live on one. Setting it selects"
        " DISTRUN_PARTITION=mxnet, for which it counts; a warning says so if DISTRUN_PARTITION=size is set, too.",
        low=1,
        default=1000000,
    ),
    _reads(
        "MXNET_KVSTORE_REDUCTION_NTHREADS",
        "The most threads of a worker that sum the values of its devices, and in local stores update, for values of at"
        " least MXNET_KVSTORE_BIGARRAY_BOUND elements; 0: as many as copy (DISTRUN_COPY_THREADS).",
        low=0,
        default=0,
    ),
    _reads(
        "MXNET_UPDATE_ON_KVSTORE",
        "0: a Trainer that is not told who updates does it itself, where that may be chosen.",
        default=True,
    ),
    _reads(
        "MXNET_ENABLE_GPU_P2P",
        "Whether arrays are copied directly between GPUs that allow it; 0: by way of the host.",
        default=True,
    ),
    _reads(
        "PS_VERBOSE",
        "1: addresses and ids of all nodes, on stderr; 2: also every message.",
        low=0,
        high=2,
        default=0,
    ),
    _reads(
        "DISTRUN_TRACEBACK",
        "What a worker prints of the exception that ends its script. short: of the loss of a peer one line, else a"
        " traceback without the frames of distrun_runtime; full: what Python prints (also with PS_VERBOSE=1 and"
        " `distrun launch -vv`).",
        choices=("short", "full"),
        default="short",
    ),
    _reads(
        "PS_RESEND",
        "1: messages between nodes are acknowledged, and sent again when they are lost. For networks that lose what"
        " TCP carries; all nodes of a job alike.",
        default=False,
    ),
    _reads(
        "PS_RESEND_TIMEOUT",
        "With PS_RESEND=1: milliseconds until a message is sent again; each repeat waits that much longer, and after"
        " the tenth the peer is lost.",
        low=1,
        default=1000,
    ),
    _reads(
        "PS_DROP_MSG",
        "For tests: percent of the messages received that are dropped, as drop= of DISTRUN_FAULTS.",
        low=0,
        high=100,
        default=0.0,
    ),
    _reads(
        "DISTRUN_PARTITION",
        "Where values are placed: `size`, pieces of 1 MiB on the server with the fewest bytes; or `mxnet`, as MXNet"
        " does, also if it is unset and MXNET_KVSTORE_BIGARRAY_BOUND is set.",
        choices=("size", "mxnet"),
        default="size",
    ),
    _reads(
        "DISTRUN_DATA_PATHS",
        "For finding faults: which ways values may take beside ZeroMQ; `host` (of servers): none in a GPU's memory;"
        " `none`: all go there, and as messages.",
        choices=("segments", "host", "none"),
        default="segments",
    ),
    _reads(
        "DISTRUN_COPY_THREADS",
        "Threads of a worker or server that copy, add and update 4 MiB and more together; 0: the cores that it may use,"
        " divided by the processes of its role on the host, at most 8, and in workers at most OMP_NUM_THREADS.",
        low=0,
        high=256,
        default=0,
    ),
    _reads("OMP_NUM_THREADS", "The most threads that DISTRUN_COPY_THREADS=0 stands for in workers.", default=""),
    _reads(
        "DISTRUN_HOST_SUMS",
        "0: workers of one host do not add what they push before it leaves the host.",
        default=True,
    ),
    _reads(
        "DISTRUN_STAGES",
        "1: each worker says at its end how long its pushes and pulls took, stage by stage: copy out, wire, wait, add,"
        " rule, copy in.",
        default=False,
    ),
    _reads(
        "DISTRUN_FAULTS",
        "For tests: faults in what nodes receive, such as `drop=5,duplicate=1,delay=20:50ms,reorder=2,seed=7,"
        "kinds=PUSH+PULL`: percents, milliseconds, the seed of each process's chances, and kinds of messages.",
        default="",
    ),
    _reads("PS_HEARTBEAT_INTERVAL", "Seconds between heartbeats.", low=0.1, high=3600, default=2.0),
    _reads(
        "PS_HEARTBEAT_TIMEOUT",
        "Seconds of silence after which a peer is lost; must be longer than the interval.",
        low=0.5,
        high=86400,
        default=10.0,
    ),
    _reads(
        "DISTRUN_OP_TIMEOUT",
        "Seconds that one store call may take while its peers are alive; a wait for a GPU, half of them.",
        low=0.1,
        high=LONGEST_S,
        default=1800.0,
    ),
    _reads(
        "DISTRUN_START_TIMEOUT",
        "Seconds from the first worker's HELLO until all nodes must have registered; a scheduler that was started by"
        " hand counts from its own start as well. For other nodes: until the scheduler must answer.",
        low=0.1,
        high=LONGEST_S,
        default=120.0,
    ),
    _reads(
        "DISTRUN_DATA_TIMEOUT",
        "Seconds in which each read of `s3://` and other addresses must succeed, with all its retries.",
        low=1,
        high=LONGEST_S,
        default=60.0,
    ),
    _reads(
        "DISTRUN_DATA_CACHE_BYTES",
        "Bytes of such data that all processes of a user keep on this machine's disk, below XDG_CACHE_HOME; 0: none.",
        low=0,
        default=10 << 30,
    ),
    _reads(
        "DISTRUN_PORT_RANGE",
        "A-B: ports that scheduler, servers and workers may bind; with --port-range also those that agents hold."
        " Empty: any free port.",
        default="",
    ),
    _reads(
        "DISTRUN_SERVER_IMPORT",
        "Your modules with update rules, separated by commas, that servers import at their start;"
        " --server-import sets it.",
        default="",
    ),
    _reads(
        "DISTRUN_SERVER_DEVICE",
        "Where servers keep and update values; --server-device sets it. cpu: in the host's memory. gpu: on the GPU of"
        " the server's DISTRUN_LOCAL_RANK, modulo the number that it sees; gpu:N (or cuda:N): on the N-th that it sees."
        " auto: stores of kind dist_device_* on the GPU that `gpu` would be, where one is there and they fit; others in"
        " the host's memory.",
        default="auto",
    ),
    _reads(
        "DISTRUN_SERVER_GPU_MEMORY",
        "MiB of a GPU that a server takes at most; 0: half of what is free when its first store comes there, and all"
        " of it with DISTRUN_SERVER_DEVICE=gpu.",
        low=0,
        default=0,
    ),
)
# The launcher itself.
_LAUNCHER = (
    _reads("DISTRUN_HOSTFILE", "Hosts file when -H is absent."),
    _reads("DEEPLEARNING_WORKERS_PATH", "Hosts file of an AWS deep-learning stack, when -H is absent."),
    _reads(
        "DISTRUN_PORTABLE",
        "1: use only what every POSIX system has (no /proc, subreaper, pidfd), as on macOS.",
        default=False,
    ),
    _reads("XDG_STATE_HOME", "Where the job store is: `distrun/` below it (default ~/.local/state)."),
    _reads(
        "XDG_RUNTIME_DIR",
        "Where a host keeps a job's private files: `distrun/` below it, else /tmp/distrun-UID (with a suffix if "
        "another user has made that).",
    ),
    _reads(
        "XDG_CACHE_HOME",
        "Where the bundled runtime is kept for tasks, programs compiled for GPUs and data of `s3://`, in a folder of"
        " distrun's below it (default ~/.cache).",
    ),
    _reads(
        "XDG_DATA_HOME",
        "Where `distrun doctor --fix` keeps a host's environment for servers, in a folder of distrun's below it"
        " (default ~/.local/share).",
    ),
    _reads(
        "SSH_CONNECTION",
        "Set by sshd on a host: the address at which the launcher reached it is its data address, unless an"
        " interface or subnet is asked for.",
    ),
)
_SECTIONS = {
    "distrun": (*_DISTRUN, *_FUNCTIONS),
    "dmlc": _DMLC,
    "torch": _TORCH,
    "gpus": _GPUS,
    "jax": _JAX,
    "python": _PYTHON,
    "tuning": _TUNING,
    "launcher": _LAUNCHER,
}
TABLE = tuple(row._replace(group=group) for group, rows in _SECTIONS.items() for row in rows)

BY_NAME: Dict[str, Variable] = {row.name: row for row in TABLE}

OUTER_PATTERNS = (
    *("SLURM_*", "OMPI_*", "PMI_*", "PMIX_*", "PRTE_*", "HYDRA_*", "MPI_LOCAL*", "TORCHELASTIC_*", "PET_*"),
    *("PE_HOSTFILE", "SGE_TASK_*"),
)
"""Variables of an outer job's engine that would mislead a task; removed with the table's stale ones."""
STALE = (*sorted(row.name for row in TABLE if row.stale), *OUTER_PATTERNS)
"""Names and patterns that are removed from a task's environment before ours are added."""

SECRET_WORDS = ("SECRET", "TOKEN", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY")
"""Variables with one of these in their names have values that are never printed or written."""


def snapshot() -> Dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def snapshot_bytes() -> Dict[bytes, bytes]:
    """Return a copy of this process's environment as the exact bytes that the system holds."""
    return dict(os.environb)


def text(name: str, env: Optional[Mapping[str, str]] = None) -> str:
    """Return the value of a variable of the table as it stands; empty if it is unset."""
    return (os.environ if env is None else env).get(BY_NAME[name].name, "")


def state_folder() -> str:
    """Return `$XDG_STATE_HOME/distrun`, or `~/.local/state/distrun` when that is unset or not absolute."""
    base = text("XDG_STATE_HOME")
    return os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.local/state"), "distrun")


def read(name: str, env: Optional[Mapping[str, str]] = None) -> Any:
    """Return the checked value of a variable: int, float, bool or str by its type; its default when unset or empty.

    Raises:
        ContractError: the value is not of the variable's type or range.
    """
    row, value = BY_NAME[name], text(name, env)
    if not value.strip():
        return row.default
    try:
        return _parse(row, value.strip())
    except ValueError:
        default = f" (default {row.default_text})" if row.default_text else ""
        expected = row.range_text() + default
        raise ContractError(f"{name}={value!r} on host {os.uname().nodename}: expected {expected}") from None


def need(name: str, env: Optional[Mapping[str, str]] = None) -> Any:
    """Return the checked value of a variable that must be set.

    Raises:
        ContractError: it is unset, or not of its type or range.
    """
    value = read(name, env)
    if value is None:
        row = BY_NAME[name]
        raise ContractError(f"{name} is not set on host {os.uname().nodename}: {row.doc} Expected {row.range_text()}.")
    return value


def check(env: Optional[Mapping[str, str]] = None) -> List[str]:
    """Return one message for each variable for tuning whose value is wrong; empty when all are right."""
    wrong = []
    for row in TABLE:
        if row.group == "tuning":
            try:
                read(row.name, env)
            except ContractError as err:
                wrong.append(str(err))
    return wrong


def _parse(row: Variable, value: str) -> Any:
    if row.choices and value not in row.choices:
        raise ValueError(value)
    if row.type == BOOL:
        return bool(("0", "1").index(value))
    if row.type == TEXT:
        return value
    number: float = int(value) if row.type == INT else float(value)
    if math.isnan(number) or (row.low is not None and number < row.low) or (row.high is not None and number > row.high):
        raise ValueError(value)
    return number
