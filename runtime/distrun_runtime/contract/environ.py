"""The one table of environment variables, and the only reader of os.environ.

Every variable that distrun sets or reads stands in `TABLE` with its type, default and range; `docs/environment.md`
is checked against it. `read` gives a checked value or an error that says variable, value, host and what would be
right. Standard library only, Python 3.8.
"""

from __future__ import annotations

import math
import os
from typing import Any, Dict, List, Mapping, MutableMapping, NamedTuple, Optional, Tuple

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
    group: str
    use: str
    type: str
    doc: str
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


def _number(value: float) -> str:
    return f"{int(value)}" if value == int(value) else f"{value:g}"


_PORT = {"type": INT, "low": 1, "high": 65535}


def _row(name: str, group: str, use: str, doc: str, **more: Any) -> Variable:
    more.setdefault("type", TEXT)
    more.setdefault("stale", use in (GIVEN, BOTH))
    return Variable(name=name, group=group, use=use, doc=doc, **more)


TABLE: Tuple[Variable, ...] = (
    # What every task can ask about itself.
    _row("DISTRUN_JOB_ID", "distrun", BOTH, "The job's id; also the marker by which leftover processes are found."),
    _row(
        "DISTRUN_JOB_NONCE",
        "distrun",
        GIVEN,
        "64 random bits of the job, hex: with the id, the marker by which leftover processes are found. No secret.",
    ),
    _row("DISTRUN_ROLE", "distrun", GIVEN, "The task's role.", choices=("scheduler", "server", "worker")),
    _row(
        "DISTRUN_PLACE",
        "distrun",
        GIVEN,
        "The task's place: its agent's name. A host with one agent is one place of its own name.",
    ),
    _row("DISTRUN_RANK", "distrun", BOTH, "Index of the task in its role, from 0.", type=INT, low=0),
    _row("DISTRUN_WORLD_SIZE", "distrun", GIVEN, "Number of tasks of the role.", type=INT, low=1),
    _row(
        "DISTRUN_LOCAL_RANK",
        "distrun",
        GIVEN,
        "Index among the tasks of the role on this host, or of this place.",
        type=INT,
        low=0,
    ),
    _row(
        "DISTRUN_LOCAL_SIZE",
        "distrun",
        GIVEN,
        "Number of tasks of the role on this host, or of this place.",
        type=INT,
        low=1,
    ),
    _row("DISTRUN_NODE_RANK", "distrun", GIVEN, "Index of this host among the job's hosts.", type=INT, low=0),
    _row("DISTRUN_NUM_NODES", "distrun", GIVEN, "Number of hosts of the job.", type=INT, low=1),
    _row("DISTRUN_HOST", "distrun", BOTH, "What the job calls this host (as in the output's prefixes)."),
    _row("DISTRUN_ADDR", "distrun", GIVEN, "This host's address for data: an IP address."),
    _row(
        "DISTRUN_WORKER_ADDRESSES",
        "distrun",
        BOTH,
        "Addresses of the hosts with workers, separated by commas; for the bundled scheduler.",
    ),
    _row(
        "DISTRUN_RELAYS",
        "distrun",
        BOTH,
        "Servers beyond DMLC_NUM_SERVER that keep no values: they add what workers of their host push.",
        type=INT,
        low=0,
        default=0,
    ),
    _row("DISTRUN_RESTART", "distrun", BOTH, "How often this task was started before.", type=INT, low=0, default=0),
    _row(
        "DISTRUN_RUN_DIR",
        "distrun",
        GIVEN,
        "The job's folder, which is kept after the job: logs and files of tasks. Not set on a host that does not"
        " have it.",
    ),
    _row("DISTRUN_TOKEN_FILE", "distrun", BOTH, "File (mode 0600) with the job's token; without it a job runs open."),
    _row(
        "DISTRUN_PUBLISH_FD",
        "distrun",
        GIVEN,
        "Descriptor on which a task tells its agent facts, one JSON object a line.",
        type=INT,
        low=0,
    ),
    _row(
        "DISTRUN_PUBLISH_PIPE",
        "distrun",
        GIVEN,
        "Which pipe that is, DEVICE:INODE as fstat tells them. A process that inherited the variables, but not the"
        " descriptor, sees by it that the number means another file.",
    ),
    _row(
        "DISTRUN_METRICS_SOCKET",
        "distrun",
        GIVEN,
        "Unix datagram socket on which a task tells its agent numbers that may be lost. Set where the agent has one.",
    ),
    # The parameter-server set of launch.py, ps-lite and BytePS.
    _row("DMLC_ROLE", "dmlc", BOTH, "The process's role.", choices=("scheduler", "server", "worker")),
    _row("DMLC_PS_ROOT_URI", "dmlc", BOTH, "The scheduler's IP address; by hand also a name, which is resolved."),
    _row(
        "DMLC_PS_ROOT_PORT",
        "dmlc",
        BOTH,
        "The scheduler's port. Started by hand, the scheduler binds exactly this port; with --ps command it is held as"
        " MASTER_PORT is; the bundled scheduler under the launcher gets none and takes a free one.",
        **_PORT,
    ),
    _row("DMLC_NUM_WORKER", "dmlc", BOTH, "Number of workers.", type=INT, low=1),
    _row(
        "DMLC_NUM_SERVER",
        "dmlc",
        BOTH,
        "Number of servers; 0: none, and dist stores cannot be created.",
        type=INT,
        low=0,
    ),
    _row(
        "DMLC_NODE_HOST", "dmlc", BOTH, "The address that this process binds and tells its peers. A name is resolved."
    ),
    _row("DMLC_TASK_ID", "dmlc", GIVEN, "Worker i: i. Server j: number of workers + j.", type=INT, low=0),
    _row("DMLC_WORKER_ID", "dmlc", BOTH, "A worker's rank.", type=INT, low=0),
    _row("DMLC_SERVER_ID", "dmlc", BOTH, "A server's rank.", type=INT, low=0),
    _row("DMLC_RANK", "dmlc", BOTH, "The process's rank in its role.", type=INT, low=0),
    _row("DMLC_JOB_CLUSTER", "dmlc", GIVEN, "The backend that started the job, as `--launcher` names it."),
    _row(
        "DMLC_INTERFACE",
        "dmlc",
        READ,
        "Network interfaces for data by exact name, the first that a host has: eth0 or ib0,eth0.",
    ),
    _row(
        "DMLC_LOCAL",
        "dmlc",
        READ,
        "Removed from tasks: it would move ps-lite to Unix sockets.",
        type=BOOL,
        stale=True,
    ),
    _row("DMLC_NUM_ATTEMPT", "dmlc", GIVEN, "How often this task was started before.", type=INT, low=0),
    _row("DMLC_TRACKER_URI", "dmlc", GIVEN, "Removed: the address of an outer job's rabit tracker."),
    _row("DMLC_TRACKER_PORT", "dmlc", GIVEN, "Removed: the port of an outer job's rabit tracker.", **_PORT),
    # torch.distributed's env:// rendezvous. Workers only.
    _row("RANK", "torch", GIVEN, "The worker's rank.", type=INT, low=0),
    _row("WORLD_SIZE", "torch", GIVEN, "Number of workers.", type=INT, low=1),
    _row("LOCAL_RANK", "torch", GIVEN, "Index among the workers of this host, or of this place.", type=INT, low=0),
    _row("LOCAL_WORLD_SIZE", "torch", GIVEN, "Number of workers of this host, or of this place.", type=INT, low=1),
    _row("MASTER_ADDR", "torch", GIVEN, "Data address of worker 0's host."),
    _row(
        "MASTER_PORT",
        "torch",
        GIVEN,
        "A port for worker 0 to listen on. Its host's agent holds it bound with SO_REUSEADDR until the job ends, so"
        " the program must set SO_REUSEADDR before it binds, as torch, JAX, ZeroMQ and Python's servers do; XGBoost,"
        " LightGBM and a bare socket() do not, and get 'Address already in use'.",
        **_PORT,
    ),
    _row("GROUP_RANK", "torch", GIVEN, "Index of this host among the hosts with workers.", type=INT, low=0),
    _row("GROUP_WORLD_SIZE", "torch", GIVEN, "Number of hosts with workers.", type=INT, low=1),
    _row("NODE_RANK", "torch", GIVEN, "The same as GROUP_RANK.", type=INT, low=0),
    _row("ROLE_RANK", "torch", GIVEN, "The worker's rank.", type=INT, low=0),
    _row("ROLE_WORLD_SIZE", "torch", GIVEN, "Number of workers.", type=INT, low=1),
    _row("ROLE_NAME", "torch", GIVEN, "`worker`."),
    _row(
        "TORCHELASTIC_RESTART_COUNT",
        "torch",
        GIVEN,
        "How often the job was restarted: 0 in this version.",
        type=INT,
        low=0,
    ),
    _row("TORCHELASTIC_MAX_RESTARTS", "torch", GIVEN, "How often it may be: 0.", type=INT, low=0),
    _row("TORCHELASTIC_RUN_ID", "torch", GIVEN, "The job's id."),
    _row(
        "GLOO_SOCKET_IFNAME",
        "torch",
        GIVEN,
        "In jobs of several hosts: the interface that has this host's data address, unless you set it.",
        stale=False,
    ),
    _row(
        "NCCL_SOCKET_IFNAME",
        "torch",
        GIVEN,
        "The same, but only with --interface or --subnet: NCCL finds its interfaces itself.",
        stale=False,
    ),
    # GPUs of every task.
    _row(
        "CUDA_VISIBLE_DEVICES",
        "gpus",
        GIVEN,
        "On a host with `gpus=` in the hosts file, unless you set it: all its GPUs, for each task there. So"
        " `cuda:LOCAL_RANK` is a GPU of the worker's own while a host has no more workers than GPUs; the launch warns"
        " where it has more. With --gpus-per-worker: a worker's own GPUs, which it numbers from 0; empty for servers"
        " and scheduler.",
        stale=False,
    ),
    _row(
        "CUDA_DEVICE_ORDER",
        "gpus",
        GIVEN,
        "PCI_BUS_ID where distrun sets CUDA_VISIBLE_DEVICES, unless you set it: GPUs are numbered as nvidia-smi does.",
        stale=False,
    ),
    # JAX. Workers only.
    _row(
        "JAX_COORDINATOR_ADDRESS",
        "jax",
        GIVEN,
        "IP:port where worker 0 listens. The port is another than MASTER_PORT and held in the same way: a program that"
        " binds it must set SO_REUSEADDR before, as jax.distributed.initialize does.",
    ),
    _row("JAX_NUM_PROCESSES", "jax", GIVEN, "Number of workers.", type=INT, low=1),
    _row("JAX_PROCESS_ID", "jax", GIVEN, "The worker's rank.", type=INT, low=0),
    _row("PYTHONUNBUFFERED", "python", GIVEN, "1, unless you set it: lines appear when they are printed.", stale=False),
    _row("PYTHONPATH", "python", GIVEN, "The bundled runtime is put in front of your value.", stale=False),
    # Tuning: the seeds' names.
    _row(
        "MXNET_KVSTORE_BIGARRAY_BOUND",
        "tuning",
        READ,
        "Values of at least so many elements are cut over all servers; smaller ones live on one. Setting it selects"
        " DISTRUN_PARTITION=mxnet, for which it counts; a warning says so if DISTRUN_PARTITION=size is set, too.",
        type=INT,
        low=1,
        default=1000000,
    ),
    _row(
        "MXNET_KVSTORE_REDUCTION_NTHREADS",
        "tuning",
        READ,
        "Threads of a worker that sum the values of its devices, for values of at least"
        " MXNET_KVSTORE_BIGARRAY_BOUND elements.",
        type=INT,
        low=1,
        default=4,
    ),
    _row(
        "MXNET_UPDATE_ON_KVSTORE",
        "tuning",
        READ,
        "0: a Trainer that is not told who updates does it itself, where that may be chosen.",
        type=BOOL,
        default=True,
    ),
    _row(
        "MXNET_ENABLE_GPU_P2P",
        "tuning",
        READ,
        "Whether arrays are copied directly between GPUs that allow it; 0: by way of the host.",
        type=BOOL,
        default=True,
    ),
    _row(
        "PS_VERBOSE",
        "tuning",
        READ,
        "1: addresses and ids of all nodes, on stderr; 2: also every message.",
        type=INT,
        low=0,
        high=2,
        default=0,
    ),
    _row(
        "DISTRUN_TRACEBACK",
        "tuning",
        READ,
        "What a worker prints of the exception that ends its script. short: of the loss of a peer one line, else a"
        " traceback without the frames of distrun_runtime; full: what Python prints (also with PS_VERBOSE=1 and"
        " `distrun launch -vv`).",
        choices=("short", "full"),
        default="short",
    ),
    _row(
        "PS_RESEND",
        "tuning",
        READ,
        "1: messages between nodes are acknowledged, and sent again when they are lost. For networks that lose what"
        " TCP carries; all nodes of a job alike.",
        type=BOOL,
        default=False,
    ),
    _row(
        "PS_RESEND_TIMEOUT",
        "tuning",
        READ,
        "With PS_RESEND=1: milliseconds until a message is sent again; each repeat waits that much longer, and after"
        " the tenth the peer is lost.",
        type=INT,
        low=1,
        default=1000,
    ),
    _row(
        "PS_DROP_MSG",
        "tuning",
        READ,
        "For tests: percent of the messages received that are dropped, as drop= of DISTRUN_FAULTS.",
        type=FLOAT,
        low=0,
        high=100,
        default=0.0,
    ),
    _row(
        "DISTRUN_PARTITION",
        "tuning",
        READ,
        "Where values are placed: `size`, pieces of 1 MiB on the server with the fewest bytes; or `mxnet`, as MXNet"
        " does, also if it is unset and MXNET_KVSTORE_BIGARRAY_BOUND is set.",
        choices=("size", "mxnet"),
        default="size",
    ),
    _row(
        "DISTRUN_DATA_PATHS",
        "tuning",
        READ,
        "For finding faults: which ways large values may take beside messages; `none`: all go as messages.",
        choices=("segments", "none"),
        default="segments",
    ),
    _row(
        "DISTRUN_SERVER_THREADS",
        "tuning",
        READ,
        "Threads of a server that add and update long values together; 0: half as many as processors, at most 8.",
        type=INT,
        low=0,
        default=0,
    ),
    _row(
        "DISTRUN_HOST_SUMS",
        "tuning",
        READ,
        "0: workers of one host do not add what they push before it leaves the host.",
        type=BOOL,
        default=True,
    ),
    _row(
        "DISTRUN_STAGES",
        "tuning",
        READ,
        "1: each worker says at its end how long its pushes and pulls took, stage by stage: copy out, wire, wait, add,"
        " rule, copy in.",
        type=BOOL,
        default=False,
    ),
    _row(
        "DISTRUN_FAULTS",
        "tuning",
        READ,
        "For tests: faults in what nodes receive, such as `drop=5,duplicate=1,delay=20:50ms,reorder=2,seed=7,"
        "kinds=PUSH+PULL`: percents, milliseconds, the seed of each process's chances, and kinds of messages.",
        default="",
    ),
    _row(
        "PS_HEARTBEAT_INTERVAL",
        "tuning",
        READ,
        "Seconds between heartbeats.",
        type=FLOAT,
        low=0.1,
        high=3600,
        default=2.0,
    ),
    _row(
        "PS_HEARTBEAT_TIMEOUT",
        "tuning",
        READ,
        "Seconds of silence after which a peer is lost; must be longer than the interval.",
        type=FLOAT,
        low=0.5,
        high=86400,
        default=10.0,
    ),
    _row(
        "DISTRUN_OP_TIMEOUT",
        "tuning",
        READ,
        "Seconds that one store call may take while its peers are alive; a wait for a GPU, half of them.",
        type=FLOAT,
        low=0.1,
        high=LONGEST_S,
        default=1800.0,
    ),
    _row(
        "DISTRUN_START_TIMEOUT",
        "tuning",
        READ,
        "Seconds from the first worker's HELLO until all nodes must have registered; a scheduler that was started by"
        " hand counts from its own start as well. For other nodes: until the scheduler must answer.",
        type=FLOAT,
        low=0.1,
        high=LONGEST_S,
        default=120.0,
    ),
    _row(
        "DISTRUN_PORT_RANGE",
        "tuning",
        READ,
        "A-B: ports that scheduler, servers and workers may bind; with --port-range also those that agents hold."
        " Empty: any free port.",
        default="",
    ),
    _row(
        "DISTRUN_SERVER_IMPORT",
        "tuning",
        READ,
        "Your modules with update rules, separated by commas, that servers import at their start;"
        " --server-import sets it.",
        default="",
    ),
    _row(
        "DISTRUN_SERVER_DEVICE",
        "tuning",
        READ,
        "Where servers keep and update values; --server-device sets it. cpu: in the host's memory. gpu: on the GPU of"
        " the server's DISTRUN_LOCAL_RANK, modulo the number that it sees; gpu:N (or cuda:N): on the N-th that it sees."
        " auto: stores of kind dist_device_* on the GPU that `gpu` would be, where one is there and they fit; others in"
        " the host's memory.",
        default="auto",
    ),
    _row(
        "DISTRUN_SERVER_GPU_MEMORY",
        "tuning",
        READ,
        "MiB of a GPU that a server takes at most; 0: half of what is free when its first store comes there, and all"
        " of it with DISTRUN_SERVER_DEVICE=gpu.",
        type=INT,
        low=0,
        default=0,
    ),
    # The launcher itself.
    _row("DISTRUN_HOSTFILE", "launcher", READ, "Hosts file when -H is absent."),
    _row("DEEPLEARNING_WORKERS_PATH", "launcher", READ, "Hosts file of an AWS deep-learning stack, when -H is absent."),
    _row(
        "DISTRUN_PORTABLE",
        "launcher",
        READ,
        "1: use only what every POSIX system has (no /proc, subreaper, pidfd), as on macOS.",
        type=BOOL,
        default=False,
    ),
    _row("XDG_STATE_HOME", "launcher", READ, "Where the job store is: `distrun/` below it (default ~/.local/state)."),
    _row(
        "XDG_RUNTIME_DIR",
        "launcher",
        READ,
        "Where a host keeps a job's private files: `distrun/` below it, else /tmp/distrun-UID (with a suffix if "
        "another user has made that).",
    ),
    _row(
        "XDG_CACHE_HOME",
        "launcher",
        READ,
        "Where the bundled runtime is kept for tasks, and programs compiled for GPUs, in a folder of distrun's below it"
        " (default ~/.cache).",
    ),
    _row(
        "XDG_DATA_HOME",
        "launcher",
        READ,
        "Where `distrun doctor --fix` keeps a host's environment for servers, in a folder of distrun's below it"
        " (default ~/.local/share).",
    ),
    _row(
        "SSH_CONNECTION",
        "launcher",
        READ,
        "Set by sshd on a host: the address at which the launcher reached it is its data address, unless an"
        " interface or subnet is asked for.",
    ),
)

BY_NAME: Dict[str, Variable] = {row.name: row for row in TABLE}

OUTER_PATTERNS = (
    *("SLURM_*", "OMPI_*", "PMI_*", "PMIX_*", "PRTE_*", "HYDRA_*", "MPI_LOCAL*", "TORCHELASTIC_*", "PET_*"),
    *("PE_HOSTFILE", "SGE_TASK_*"),
)
"""Variables of an outer job's engine that would mislead a task; removed with the table's stale ones."""

SECRET_PATTERNS = (
    "*SECRET*",
    "*TOKEN*",
    "*PASSWORD*",
    "*PASSWD*",
    "*CREDENTIAL*",
    "*API_KEY*",
    "*ACCESS_KEY*",
    "*PRIVATE_KEY*",
)
"""Names whose values are never printed or written."""


def snapshot() -> Dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def snapshot_bytes() -> Dict[bytes, bytes]:
    """Return a copy of this process's environment as the exact bytes that the system holds."""
    return dict(os.environb)


def stale_names() -> Tuple[str, ...]:
    """Return the names and patterns that are removed from a task's environment before ours are added."""
    return tuple(sorted(row.name for row in TABLE if row.stale)) + OUTER_PATTERNS


def text(name: str, env: Optional[Mapping[str, str]] = None) -> str:
    """Return the value of a variable of the table as it stands; empty if it is unset."""
    _known(name)
    return (os.environ if env is None else env).get(name, "")


def read(name: str, env: Optional[Mapping[str, str]] = None) -> Any:
    """Return the checked value of a variable: int, float, bool or str by its type; its default when unset or empty.

    Raises:
        ContractError: the value is not of the variable's type or range.
    """
    row = _known(name)
    value = text(name, env)
    if value.strip() == "":
        return row.default
    try:
        return _parse(row, value.strip())
    except ValueError:
        raise ContractError(
            f"{name}={value!r} on host {os.uname().nodename}: expected {row.range_text()}{_default(row)}"
        ) from None


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


def check(env: Optional[Mapping[str, str]] = None, groups: Tuple[str, ...] = ("tuning",)) -> List[str]:
    """Return one message for each variable of `groups` whose value is wrong; empty when all are right."""
    wrong = []
    for row in TABLE:
        if row.group in groups:
            try:
                read(row.name, env)
            except ContractError as err:
                wrong.append(str(err))
    return wrong


def put(name: str, value: str, env: Optional[MutableMapping[str, str]] = None) -> None:
    """Set a variable of the table in `env`, or in this process's environment."""
    _known(name)
    (os.environ if env is None else env)[name] = value


def _known(name: str) -> Variable:
    return BY_NAME[name]


def _default(row: Variable) -> str:
    if row.default in (None, ""):
        return ""
    return f" (default {int(row.default) if isinstance(row.default, bool) else row.default})"


def _parse(row: Variable, value: str) -> Any:
    if row.choices and value not in row.choices:
        raise ValueError(value)
    if row.type == BOOL:
        return {"0": False, "1": True}[value] if value in ("0", "1") else _wrong(value)
    if row.type == TEXT:
        return value
    number: float = int(value) if row.type == INT else float(value)
    if math.isnan(number) or (row.low is not None and number < row.low) or (row.high is not None and number > row.high):
        raise ValueError(value)
    return number


def _wrong(value: str) -> bool:
    raise ValueError(value)
