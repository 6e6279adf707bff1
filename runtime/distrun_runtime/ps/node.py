"""Scheduler and server as processes: bind, run the loop until the job is over, give the exit code."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

from distrun_runtime import reporting
from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.device import Device, Threads
from distrun_runtime.arrays.shared_memory import BLOCKS, Pool
from distrun_runtime.contract import address, environ, gpus
from distrun_runtime.contract.metrics import Sender
from distrun_runtime.contract.process import allow_open_files, outlive_tasks_signals
from distrun_runtime.errors import ContractError
from distrun_runtime.ps import config as configs
from distrun_runtime.ps.config import Config, import_all
from distrun_runtime.ps.counters import Counters, NodeMetrics
from distrun_runtime.ps.crash import publish
from distrun_runtime.ps.device_choice import Placement
from distrun_runtime.ps.engine import WorkEngine
from distrun_runtime.ps.loop import Loop
from distrun_runtime.ps.scheduler import Scheduler
from distrun_runtime.ps.server import Server
from distrun_runtime.ps.trace import Recorder, Trace
from distrun_runtime.transport.base import Transport
from distrun_runtime.transport.base import endpoint as endpoint_of
from distrun_runtime.transport.faults import Faulty
from distrun_runtime.transport.host_paths import BulkTransport
from distrun_runtime.transport.resend import Resending
from distrun_runtime.transport.zeromq import ZmqTransport, keep_freed_memory

SHARED_ELEMENTS = 1 << 18
"""From how many elements on a server's threads share the work. Far more than `ops.update` goes over at a time."""

FILES, FILES_A_NODE = 256, 4
"""Files that a scheduler or server may have open at once: of its own, and for each other node."""


def serve(role: str) -> int:
    """Be the job's scheduler or one of its servers until the job ends; return the exit code: 0 when it ended well.

    SIGTERM and SIGINT end it early: with 0, since the agent that starts servers also stops them.

    Raises:
        ContractError: the environment lacks or garbles what a node needs, a module of the user's cannot be imported, or
            the GPU that was asked for is not there.
        OSError: the port cannot be bound.
    """
    outlive_tasks_signals()
    config = configs.read(role)
    # Before anything is bound: no node waits for a server that cannot serve.
    import_all(config.server_imports, config.host)
    if role == "server":
        keep_freed_memory()
    # Each node of the job connects, and on one host sends the descriptors of its memory.
    allow_open_files(FILES + FILES_A_NODE * (config.workers + config.servers))
    memory = Pool()
    device = devices.get("cpu:0", Threads(config.server_threads, SHARED_ELEMENTS), memory)
    placement = placement_of(config, device)
    placement.open()
    transport = connected(config, [memory])
    warnings: list[str] = []
    endpoint = bind(transport, config, warnings.append)
    counters, recorder = Counters(), Recorder()
    node = Scheduler(config, endpoint) if role == "scheduler" else Server(config, endpoint, counters, recorder)
    trace = Trace(config.verbose, lambda: node.me)
    unused = configs.unused_bound(config) if role == "scheduler" else ""
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
    engine = None
    if role == "server":
        engine = WorkEngine(device, counters, recorder, config.server_imports, placement=placement)
    loop = Loop(transport, node, config.token, trace, engine=engine, publish=publish)
    if environ.text("DISTRUN_METRICS_SOCKET"):
        reporting.offer_stacks()
        loop.metrics = _metrics(node, loop).tick

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
    trace.log("ERROR" if finish.code else "INFO", "event=finished reason=%s" % (finish.reason or "done"))
    return finish.code


def placement_of(config: Config, host: Device) -> Placement:
    """Return where a server's stores are to be; `open` looks for the GPU that was asked for."""
    keeps_values = config.role == "server" and config.rank < config.servers
    asked = config.server_device if keeps_values else gpus.CPU
    return Placement(host, asked, index=config.local_rank, limit=config.server_gpu_bytes)


def _metrics(node: Scheduler | Server, loop: Loop) -> NodeMetrics:
    """Return what tells the agent what a scheduler or server counts."""
    if isinstance(node, Scheduler):
        return NodeMetrics("scheduler", Sender(), node.counters)
    server = node

    def counters() -> dict[str, float]:
        return {**server.counters(), "queue": loop.queued}

    return NodeMetrics("server", Sender(), counters, lags=server.lags, devices=server.devices)


def connected(config: Config, pools: Sequence[Pool]) -> Transport:
    """Return a node's transport.

    Arguments:
        pools: memory of this process that other nodes on the host may read.
    """
    transport: Transport = ZmqTransport(config.heartbeat, config.token)
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
    found = ", ".join(own) or "unknown"
    warn(
        "DMLC_PS_ROOT_URI=%s%s is not an address of host %s: the scheduler listens on port %d of all its addresses"
        " (%s). That is right if %s leads here (a service name, a forwarded port); if not, fix: DMLC_PS_ROOT_URI=%s"
        % (
            *(config.root, "" if root == config.root else f" ({root})", config.host, number, found),
            *(config.root, config.address if config.address in own else (own or ["ADDRESS"])[0]),
        )
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
