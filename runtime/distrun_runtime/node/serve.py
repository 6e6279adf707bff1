"""Scheduler and server as processes: bind, run the loop until the job is over, give the exit code."""

from __future__ import annotations

import errno
import signal
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Protocol

from distrun_runtime.contract import address
from distrun_runtime.errors import ContractError
from distrun_runtime.net.transport import ZmqTransport
from distrun_runtime.net.transport import endpoint as endpoint_of
from distrun_runtime.node import config as configs
from distrun_runtime.node.config import Config
from distrun_runtime.node.executor import Executor
from distrun_runtime.node.postoffice import Postoffice, Transport
from distrun_runtime.node.publish import publish
from distrun_runtime.node.scheduler import Scheduler
from distrun_runtime.node.server import Server
from distrun_runtime.node.trace import Trace


def serve(role: str) -> int:
    """Be the job's scheduler or one of its servers until the job ends; return the exit code: 0 when it ended well.

    SIGTERM and SIGINT end it early: with 0, since whoever starts servers also stops them.

    Raises:
        ContractError: the environment lacks or garbles what a node needs.
        OSError: the port cannot be bound.
    """
    config = configs.read(role)
    transport = ZmqTransport(config.heartbeat)
    endpoint = bind(transport, config)
    node = Scheduler(config, endpoint) if role == "scheduler" else Server(config, endpoint)
    trace = Trace(config.verbose, lambda: node.me)
    if not config.token:
        trace.log("WARNING", "this job runs open: DISTRUN_TOKEN_FILE is not set, so any process that reaches"
                  " %s can join it" % endpoint)  # fmt: skip
    trace.log("INFO", "event=bound endpoint=%s host=%s" % (endpoint, config.host))
    executor = Executor() if role == "server" else None
    office = Postoffice(transport, node, config.token, trace, executor=executor, publish=publish)

    def stop(number: int, frame: FrameType | None) -> None:
        office.tell(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        finish = office.run()
    finally:
        for number, handler in before.items():
            with suppress(TypeError):  # None: a handler that Python did not install
                signal.signal(number, handler)
    trace.log("ERROR" if finish.code else "INFO", "event=finished reason=%s" % (finish.reason or "done"))
    return finish.code


class Bindable(Transport, Protocol):
    """A transport that can listen."""

    def bind(self, address: str, ports: Sequence[int] = ()) -> int:
        """Listen on an address; return the port."""
        ...


def bind(transport: Bindable, config: Config) -> str:
    """Bind the node's port and return its endpoint, `tcp://address:port`.

    A scheduler with DMLC_PS_ROOT_PORT binds exactly that port. When DMLC_PS_ROOT_URI is no address of this host
    (a service name of a container platform, say) it listens on all of them.

    Raises:
        OSError: the port is taken or may not be bound; names address and port.
    """
    if config.role == "scheduler" and config.root_port:
        root = address.resolve_host(config.root)
        try:
            port = transport.bind(root, (config.root_port,))
        except OSError as err:
            if err.errno in {errno.EADDRNOTAVAIL, errno.ENODEV}:
                port = transport.bind("0.0.0.0", (config.root_port,))
            else:
                raise OSError(
                    err.errno,
                    "the scheduler cannot bind DMLC_PS_ROOT_URI=%s DMLC_PS_ROOT_PORT=%d on host %s: %s."
                    " Choose another port, or end the process that holds it (ss -ltnp)"
                    % (config.root, config.root_port, config.host, err.strerror),
                ) from err
        return endpoint_of(root, port)
    if not config.address:
        raise ContractError("host %s has no address to bind; set DMLC_NODE_HOST" % config.host)
    return endpoint_of(config.address, transport.bind(config.address, config.ports))
