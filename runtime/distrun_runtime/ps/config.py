"""What a node knows before it says anything: read from the environment once, checked, and passed in."""

from __future__ import annotations

import importlib
import os
import socket
import traceback
from collections.abc import Mapping, Sequence

from distrun_runtime.contract import address, environ, gpus
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import ContractError
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.transport.base import Heartbeat, endpoint
from distrun_runtime.transport.faults import NO_FAULTS, Faults

_MOST_THREADS = 8
"""More do not add faster: memory is the limit then."""

OPEN_JOB = "by-hand"
"""Job id of a job that was started by hand."""


@dataclass(frozen=True)
class Config:
    """One node's start conditions."""

    role: str
    rank: int
    """-1: the scheduler gives one."""
    job: str
    workers: int
    servers: int
    root: str
    """The scheduler's address; empty for a scheduler that publishes its own."""
    root_port: int
    """0 for a scheduler that binds any port."""
    address: str
    """The address this node binds and tells its peers."""
    host: str
    token: bytes
    incarnation: int
    heartbeat: Heartbeat
    start_timeout_s: float
    op_timeout_s: float
    bigarray_bound: int
    """Elements from which a value is cut over all servers, if they are placed as MXNet does."""
    verbose: int
    partition: str = "size"
    """How the scheduler places values: `size`, or `mxnet`."""
    ports: tuple[int, ...] = ()
    """Ports that may be bound; empty: any."""
    stays: bool = False
    """The agent that started this scheduler or server also stops it: when all workers have ended it forgets them
    and waits for others, so that one job can run several scripts after each other."""
    server_imports: tuple[str, ...] = ()
    """Modules that users' rules may come from (servers)."""
    server_device: str = gpus.AUTO
    """Where a server keeps values: `auto`, `cpu`, `gpu` or `gpu:N`."""
    server_gpu_bytes: int = 0
    """Memory of a GPU that a server takes at most; 0: it decides."""
    local_rank: int = 0
    """Index of this server among those of its host or place, as far as a launcher says it."""
    server_threads: int = 1
    """Threads that share work on long values (servers)."""
    worker_addresses: tuple[str, ...] = ()
    """Addresses of the hosts with workers (schedulers that a launcher started)."""
    paths: str = "segments"
    """How large values may travel beside messages: `segments` (shared memory), or `none`."""
    relays: int = 0
    """Servers of the job beyond `servers`, ranked behind them, that keep no values (`relay`)."""
    host_sums: bool = True
    """Whether workers of one host add what they push before it leaves the host (schedulers; they tell the workers)."""
    stages: bool = False
    """Whether a worker measures where the time of its calls goes."""
    resend_s: float = 0.0
    """How long an acknowledgement may take until a message is sent again; 0: none is expected."""
    faults: Faults = NO_FAULTS
    """What is to go wrong on purpose with what this node receives."""

    @property
    def root_endpoint(self) -> str:
        """Where the scheduler listens, `tcp://address:port`."""
        return endpoint(self.root, self.root_port)

    def identity(self, endpoint: str, rank: int | None = None) -> NodeIdentity:
        """Return how this node introduces itself."""
        return NodeIdentity(
            job=self.job,
            role=self.role,
            rank=self.rank if rank is None else rank,
            incarnation=self.incarnation,
            host=self.host,
            pid=os.getpid(),
            endpoint=endpoint,
            workers=self.workers,
            servers=self.servers,
            resends=self.resend_s > 0,
        )


def role_of(env: Mapping[str, str] | None = None) -> str:
    """Return DMLC_ROLE, empty when unset.

    Raises:
        ContractError: it is no role.
    """
    return str(environ.read("DMLC_ROLE", env) or "")


def read(role: str, env: Mapping[str, str] | None = None) -> Config:
    """Return the configuration of this process as `role`.

    Raises:
        ContractError: a variable is missing or wrong: which, what was found, what would be right.
    """
    workers, servers = _counts(env)
    publishes = role == "scheduler" and not environ.text("DMLC_PS_ROOT_PORT", env)
    root = "" if publishes else str(environ.need("DMLC_PS_ROOT_URI", env))
    return Config(
        role=role,
        rank=-1 if role == "scheduler" else _rank(role, env),
        job=environ.text("DISTRUN_JOB_ID", env) or OPEN_JOB,
        workers=workers,
        servers=servers,
        root=address.resolve_host(root) if root and role != "scheduler" else root,
        root_port=0 if publishes else environ.need("DMLC_PS_ROOT_PORT", env),
        address=_address(root, env),
        host=environ.text("DISTRUN_HOST", env) or socket.gethostname(),
        token=_token(env),
        incarnation=environ.read("DISTRUN_RESTART", env),
        heartbeat=_heartbeat(env),
        start_timeout_s=environ.read("DISTRUN_START_TIMEOUT", env),
        op_timeout_s=environ.read("DISTRUN_OP_TIMEOUT", env),
        bigarray_bound=environ.read("MXNET_KVSTORE_BIGARRAY_BOUND", env),
        partition=_partition(env),
        verbose=environ.read("PS_VERBOSE", env),
        ports=port_range(environ.text("DISTRUN_PORT_RANGE", env)),
        stays=environ.read("DISTRUN_PUBLISH_FD", env) is not None,
        server_imports=_names(environ.text("DISTRUN_SERVER_IMPORT", env)) if role == "server" else (),
        server_device=_server_device(env) if role == "server" else gpus.AUTO,
        server_gpu_bytes=environ.read("DISTRUN_SERVER_GPU_MEMORY", env) << 20,
        local_rank=environ.read("DISTRUN_LOCAL_RANK", env) or 0,
        server_threads=environ.read("DISTRUN_SERVER_THREADS", env) or _usual_threads(),
        worker_addresses=_names(environ.text("DISTRUN_WORKER_ADDRESSES", env)),
        paths=environ.read("DISTRUN_DATA_PATHS", env),
        relays=environ.read("DISTRUN_RELAYS", env),
        host_sums=environ.read("DISTRUN_HOST_SUMS", env),
        stages=environ.read("DISTRUN_STAGES", env),
        resend_s=environ.read("PS_RESEND_TIMEOUT", env) / 1000 if environ.read("PS_RESEND", env) else 0.0,
        faults=_faults(env),
    )


def _partition(env: Mapping[str, str] | None) -> str:
    """Return who places values. A program that sets MXNet's bound gets MXNet's placement."""
    is_said, bound = environ.text("DISTRUN_PARTITION", env), environ.text("MXNET_KVSTORE_BIGARRAY_BOUND", env)
    return "mxnet" if bound.strip() and not is_said.strip() else str(environ.read("DISTRUN_PARTITION", env))


def unused_bound(config: Config, env: Mapping[str, str] | None = None) -> str:
    """Return why MXNET_KVSTORE_BIGARRAY_BOUND does not count for the placement, if it is set; empty: it does."""
    if config.partition == "mxnet" or not environ.text("MXNET_KVSTORE_BIGARRAY_BOUND", env).strip():
        return ""
    return (
        "MXNET_KVSTORE_BIGARRAY_BOUND has no effect on where values are placed, as DISTRUN_PARTITION=size is set;"
        " fix: unset DISTRUN_PARTITION"
    )


def port_range(text: str) -> tuple[int, ...]:
    """Return the ports of `A-B`; empty for an empty text.

    Raises:
        ContractError: it is no range of ports.
    """
    if not text:
        return ()
    low, dash, high = text.partition("-")
    if not (dash and low.isdigit() and high.isdigit() and 0 < int(low) <= int(high) < 65536):
        raise ContractError(f"DISTRUN_PORT_RANGE={text!r}: expected A-B with 1 <= A <= B <= 65535, such as 20000-20100")
    return tuple(range(int(low), int(high) + 1))


def _counts(env: Mapping[str, str] | None) -> tuple[int, int]:
    """Return how many workers and servers the job has."""
    if not environ.text("DMLC_NUM_WORKER", env):
        raise ContractError(
            "a dist store needs a job: DMLC_NUM_WORKER is not set. Start the program with"
            " `distrun launch -n 2 -s 2 python ...`, or set DMLC_ROLE, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT,"
            " DMLC_NUM_WORKER and DMLC_NUM_SERVER by hand; `local` needs none of them"
        )
    servers = environ.need("DMLC_NUM_SERVER", env)
    if servers == 0:
        raise ContractError(
            "this job has no servers (DMLC_NUM_SERVER=0), and a dist store needs at least one: launch with -s 1 or more"
        )
    return environ.need("DMLC_NUM_WORKER", env), servers


def _heartbeat(env: Mapping[str, str] | None) -> Heartbeat:
    interval_s, timeout_s = environ.read("PS_HEARTBEAT_INTERVAL", env), environ.read("PS_HEARTBEAT_TIMEOUT", env)
    if timeout_s <= interval_s:
        raise ContractError(
            f"PS_HEARTBEAT_TIMEOUT={timeout_s:g} is not longer than PS_HEARTBEAT_INTERVAL={interval_s:g} on"
            f" host {socket.gethostname()}: expected several intervals"
        )
    return Heartbeat(interval_s, timeout_s)


def _usual_threads() -> int:
    """Return half of the processors that this process may use: a server is rarely alone on its host."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable // 2, _MOST_THREADS))


def _server_device(env: Mapping[str, str] | None) -> str:
    text = environ.read("DISTRUN_SERVER_DEVICE", env)
    found = gpus.server_device(text)
    if not found:
        raise ContractError(f"DISTRUN_SERVER_DEVICE={text!r} on host {socket.gethostname()}: expected {gpus.DEVICES}")
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _rank(role: str, env: Mapping[str, str] | None) -> int:
    own = "DMLC_WORKER_ID" if role == "worker" else "DMLC_SERVER_ID"
    for name in ("DMLC_RANK", own):
        value = environ.read(name, env)
        if value is not None:
            return int(value)
    return -1


def _address(root: str, env: Mapping[str, str] | None) -> str:
    given = environ.text("DMLC_NODE_HOST", env)
    if given:
        return address.resolve_host(given)
    return address.choose(interface=environ.text("DMLC_INTERFACE", env), toward=root)


def _faults(env: Mapping[str, str] | None) -> Faults:
    text = environ.text("DISTRUN_FAULTS", env)
    try:
        return Faults.parse(text, drop=environ.read("PS_DROP_MSG", env))
    except ValueError as err:
        raise ContractError(f"DISTRUN_FAULTS={text!r} on host {socket.gethostname()}: {err}") from err


def _token(env: Mapping[str, str] | None) -> bytes:
    path = environ.text("DISTRUN_TOKEN_FILE", env)
    if not path:
        return b""
    try:
        with open(path, "rb") as file:
            token = file.read().strip()
    except OSError as err:
        raise ContractError(
            f"DISTRUN_TOKEN_FILE={path!r} cannot be read on host {socket.gethostname()}: {err.strerror}"
        ) from err
    if not token:
        raise ContractError(f"DISTRUN_TOKEN_FILE={path!r} is empty on host {socket.gethostname()}")
    return token


# Users' modules


def import_all(modules: Sequence[str], host: str) -> None:
    """Import the modules that users' rules come from.

    Raises:
        ContractError: one cannot be imported; names it, the host and what to do, with the traceback of what it raised.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as err:
            # A user's module may raise anything; the job cannot go on without it.
            raise ContractError(_import_text(name, host, err)) from err


def _import_text(name: str, host: str, err: Exception) -> str:
    head = "DISTRUN_SERVER_IMPORT (--server-import) names module %s, which cannot be imported on host %s: %s: %s"
    head %= (name, host, type(err).__name__, err)
    if isinstance(err, ModuleNotFoundError) and err.name in {name, name.partition(".")[0]}:
        return (
            f"{head}. This server started in {os.getcwd()}: have the module there, or its folder on PYTHONPATH"
            " (distrun launch --env PYTHONPATH=DIR); --sync-dst-dir copies the current directory to other"
            " hosts"
        )
    return f"{head}\n{traceback.format_exc().rstrip()}"
