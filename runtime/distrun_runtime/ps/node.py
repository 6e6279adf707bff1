"""Processes of the store: a node's configuration, and scheduler and server as processes.

`read` makes the configuration from the environment, once, and checks it. `serve` binds, runs the loop until the job is
over, and returns the exit code.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType

from distrun_runtime import reporting
from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.device import Device
from distrun_runtime.arrays.shared_memory import BLOCKS, Pool
from distrun_runtime.contract import address, environ, gpus
from distrun_runtime.contract.metrics import Sender
from distrun_runtime.contract.process import allow_open_files, outlive_tasks_signals
from distrun_runtime.errors import ContractError
from distrun_runtime.ps.counters import Counters, NodeMetrics
from distrun_runtime.ps.device_choice import Placement
from distrun_runtime.ps.engine import WorkEngine
from distrun_runtime.ps.loop import Loop
from distrun_runtime.ps.role import Config
from distrun_runtime.ps.scheduler import Scheduler
from distrun_runtime.ps.server import Server
from distrun_runtime.ps.steady import Steady
from distrun_runtime.ps.trace import Recorder, Trace
from distrun_runtime.reporting import publish
from distrun_runtime.transport import direct
from distrun_runtime.transport.base import Heartbeat, Transport
from distrun_runtime.transport.base import endpoint as endpoint_of
from distrun_runtime.transport.faults import Faults, Faulty
from distrun_runtime.transport.host_paths import BulkTransport
from distrun_runtime.transport.resend import Resending
from distrun_runtime.transport.zeromq import ZmqTransport, keep_freed_memory

OPEN_JOB = "by-hand"
"""Job id of a job that was started by hand."""

FILES, FILES_A_NODE = 256, 5
"""Files that a scheduler or server may have open at once: of its own, and for each other node."""


# The configuration, from the environment


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
    environ.read("DISTRUN_COPY_THREADS", env)  # a wrong value is said before any call needs it
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
    what = f"{type(err).__name__}: {err}"
    head = (
        f"DISTRUN_SERVER_IMPORT (--server-import) names module {name}, which cannot be imported on host {host}: {what}"
    )
    if isinstance(err, ModuleNotFoundError) and err.name in {name, name.partition(".")[0]}:
        return (
            f"{head}. This server started in {os.getcwd()}: have the module there, or its folder on PYTHONPATH"
            " (distrun launch --env PYTHONPATH=DIR); --sync-dst-dir copies the current directory to other"
            " hosts"
        )
    return f"{head}\n{traceback.format_exc().rstrip()}"


# Scheduler and server


def serve(role: str) -> int:
    """Be the job's scheduler or one of its servers until the job ends; return the exit code: 0 when it ended well.

    SIGTERM and SIGINT end it early: with 0, since the agent that starts servers also stops them.

    Raises:
        ContractError: the environment lacks or garbles what a node needs, a module of the user's cannot be imported, or
            the GPU that was asked for is not there.
        OSError: the port cannot be bound.
    """
    outlive_tasks_signals()
    config = read(role)
    # Before anything is bound: no node waits for a server that cannot serve.
    import_all(config.server_imports, config.host)
    if role == "server":
        keep_freed_memory()
    # Each node of the job connects, and on one host sends the descriptors of its memory.
    allow_open_files(FILES + FILES_A_NODE * (config.workers + config.servers))
    memory = Pool()
    device = devices.get("cpu:0", memory=memory)
    placement = placement_of(config, device)
    placement.open()
    transport = connected(config, [memory])
    warnings: list[str] = []
    endpoint = bind(transport, config, warnings.append)
    counters, recorder = Counters(), Recorder()
    node = Scheduler(config, endpoint) if role == "scheduler" else Server(config, endpoint, counters, recorder)
    trace = Trace(config.verbose, lambda: node.me)
    unused = unused_bound(config) if role == "scheduler" else ""
    warnings += [unused] if unused else []
    if not config.token:
        warnings.append(
            f"this job runs open: DISTRUN_TOKEN_FILE is not set, so any process that reaches {endpoint} can join it"
        )
    for text in warnings:
        trace.log("WARNING", text)
    trace.log("INFO", f"event=bound endpoint={endpoint} host={config.host}")
    placement.say = trace.log
    BLOCKS.log_to(lambda text: trace.log("INFO", text))
    engine, known = None, None
    if isinstance(node, Server):
        engine = WorkEngine(device, counters, recorder, config.server_imports, placement=placement)
        known = Steady(node, engine, counters)
        if isinstance(transport, BulkTransport) and config.paths != "host":
            engine.share_gpu, engine.exports_to = transport.share_gpu, transport.exports_to
    loop = Loop(transport, node, config.token, trace, engine=engine, known=known, publish=publish)
    if isinstance(transport, BulkTransport):
        transport.pour(loop.take, loop.take_bytes)
        if transport.direct is not None:
            loop.send_small = transport.direct.send
    if environ.text("DISTRUN_METRICS_SOCKET"):
        reporting.offer_stacks()
        if isinstance(node, Server):
            server = node
            found = NodeMetrics(
                "server",
                Sender(),
                lambda: {**server.counters(), "queue": loop.queued},
                lags=server.lags,
                devices=server.devices,
            )
        else:
            found = NodeMetrics("scheduler", Sender(), node.counters)
        loop.metrics = found.tick

    def stop(number: int, frame: FrameType | None) -> None:
        loop.tell(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        finish = loop.run()
    finally:
        for number, handler in before.items():
            with suppress(TypeError):  # None: a handler that Python did not install
                signal.signal(number, handler)
        memory.close()
    trace.log("ERROR" if finish.code else "INFO", f"event=finished reason={finish.reason or 'done'}")
    return finish.code


def placement_of(config: Config, host: Device) -> Placement:
    """Return where a server's stores are to be; `open` looks for the GPU that was asked for."""
    keeps_values = config.role == "server" and config.rank < config.servers
    asked = config.server_device if keeps_values else gpus.CPU
    return Placement(host, asked, index=config.local_rank, limit=config.server_gpu_bytes)


def connected(config: Config, pools: Sequence[Pool]) -> Transport:
    """Return a node's transport.

    Arguments:
        pools: memory of this process that other nodes on the host may read.
    """
    plain = ZmqTransport(config.heartbeat, config.token)
    transport: Transport = plain
    if config.paths != "none" and direct.available:
        # Nodes connect to servers when all have bound their first ports, and to the scheduler before: of a range, it
        # might take the last one that another node needs.
        ports = config.ports if config.role != "scheduler" else ()
        transport = direct.DirectTransport(plain, config.token, ports if config.ports else (0,))
    if config.paths != "none" and config.role != "scheduler":
        transport = BulkTransport(transport, config.token, pools, offers=config.role == "server")
    return wrapped(transport, config)


def wrapped(transport: Transport, config: Config) -> Transport:
    """Return the transport with what PS_RESEND, PS_DROP_MSG and DISTRUN_FAULTS ask for around it; mostly itself."""
    if not config.faults.is_none:
        # One that gets its rank later has no name yet; its chances must still be its own.
        name = config.role if config.rank < 0 else f"{config.role}-{config.rank}"
        name += f" {os.getpid()}" if config.rank < 0 and config.role != "scheduler" else ""
        transport = Faulty(transport, config.faults, name, keeps_order=not config.resend_s)
    return Resending(transport, config.resend_s, config.incarnation) if config.resend_s else transport


def bind(transport: Transport, config: Config, warn: Callable[[str], None] = lambda text: None) -> str:
    """Bind the node's port and return its endpoint, `tcp://address:port`.

    A scheduler with DMLC_PS_ROOT_PORT binds exactly that port. When DMLC_PS_ROOT_URI is not an address of this host
    (a service name of a container platform, say) it listens on all of them, and `warn` is told which.

    Raises:
        OSError: the port is taken or may not be bound; names address and port.
    """
    if config.role == "scheduler" and config.root_port:
        return _bind_root(transport, config, warn)
    if not config.address:
        raise ContractError(f"host {config.host} has no address to bind; set DMLC_NODE_HOST")
    return endpoint_of(config.address, transport.bind(config.address, config.ports))


def _bind_root(transport: Transport, config: Config, warn: Callable[[str], None]) -> str:
    root, number = address.resolve_host(config.root), config.root_port
    try:
        return endpoint_of(root, transport.bind(root, (number,)))
    except OSError as err:
        if err.errno not in {errno.EADDRNOTAVAIL, errno.ENODEV}:
            raise _cannot_bind(config, err) from err
    is_six = ":" in root
    try:
        transport.bind("::" if is_six else "0.0.0.0", (number,))
    except OSError as err:
        raise _cannot_bind(config, err) from err
    own = address.reachable(is_six)
    resolved = "" if root == config.root else f" ({root})"
    better = config.address if config.address in own else (own or ["ADDRESS"])[0]
    warn(
        f"DMLC_PS_ROOT_URI={config.root}{resolved} is not an address of host {config.host}: the scheduler listens on"
        f" port {number} of all its addresses ({', '.join(own) or 'unknown'}). That is right if {config.root} leads"
        f" here (a service name, a forwarded port); if not, fix: DMLC_PS_ROOT_URI={better}"
    )
    return endpoint_of(config.address or (own or [root])[0], number)


def _cannot_bind(config: Config, err: OSError) -> OSError:
    return OSError(
        err.errno,
        (
            f"the scheduler cannot bind DMLC_PS_ROOT_URI={config.root} DMLC_PS_ROOT_PORT={config.root_port} on"
            f" host {config.host}: {err.strerror}. Choose another port, or end the process that holds it (ss"
            " -ltnp)"
        ),
    )
