"""The interface of a transport: what the loop of a node calls, and the events that come back.

A transport carries messages between the nodes of a job. A message is a sequence of frames (buffers); it arrives whole
or not at all. `zeromq` is a transport; `resend` and `faults` wrap one and pass on what they do not change.

Connections:
    A node listens on one endpoint (`bind`) and opens a connection to each peer that it talks to (`connect`). Replies
    come back on the connection of the request. Each side names a connection by a `Link` of its own.
    A connection that we opened is tried until it stands (`Up`) or until the other side refuses our credentials
    (`Rejected`). After `Down` it may come up again by itself, with another `Up`; `disconnect` ends that.
    A connection that came in is known from its first `Arrived`. Its limits hold until `admitted`.

Order:
    Messages of one connection and direction arrive in the order of their `send`, each at most once.
    `Up` comes before the first `Arrived` of a connection that we opened. What the peer sent before its end arrives
    before `Down`. Connections are independent of each other. A message that was being sent when the connection broke
    may be lost; `resend` exists for networks that lose messages without breaking the connection.

Buffers:
    A frame that is sent is anything with contiguous bytes: `bytes`, `bytearray`, `memoryview`. How its bytes travel is
    the transport's affair: by shared memory (`bulk`), if it lies in a segment and the peer is on this host.
    `send` never waits for the peer; what it leaves goes by itself, or with later polls. It may keep reading the buffers
    after it has returned, so they must not be written until the returned lease is over. Where that is not the case yet
    when `send` returns, a later `poll` gives `Released` with the same lease, once.
    A frame that arrives belongs to who polled. It is read-only by agreement (others may get a view of the same
    memory) and valid as long as it is referenced.

Threads:
    Everything belongs to the thread that polls, except `wake`, which any thread and any signal handler may call.
    A lease may be asked by any thread.

Errors:
    A peer that dies, refuses us or falls silent is an event, not an exception. Exceptions are: `OSError` of `bind`,
    `ConnectionError` of `send`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Union

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.contract.dataclass import dataclass

Form = tuple[bytes, int]
"""How a message goes by a direct connection, if its frames have certain sizes (`direct.form_of`)."""


class NotShared(Exception):
    """Memory cannot be shared with a peer; says why."""


Link = str
"""One connection, as one side names it: the name it was opened under (`server-1`), or `in:HEX` for one that came in.
No two connections of a transport's life have the same `in:HEX`."""


@dataclass(frozen=True)
class Heartbeat:
    """When a silent peer is lost, in seconds."""

    interval_s: float = 2.0
    timeout_s: float = 10.0


class Lease(Protocol):
    """The buffers of one message that was sent. Compared by identity."""

    @property
    def is_over(self) -> bool:
        """Whether the transport has stopped reading the buffers, so that they may be written; stays true."""


class _CopiedLease:
    is_over = True


COPIED: Lease = _CopiedLease()
"""The lease of a message whose buffers were all copied: it is over from the start."""


@dataclass(frozen=True)
class Up:
    """A connection that we opened stands (again). Nothing is proven yet."""

    link: Link


@dataclass(frozen=True)
class Down:
    """A connection broke: the peer died, closed it, or was silent for too long."""

    link: Link
    reason: str


@dataclass(frozen=True)
class Arrived:
    """A message came in on a connection."""

    link: Link
    frames: Sequence[Buffer]


@dataclass(frozen=True)
class Rejected:
    """The other side does not accept our credentials. The connection that we opened is closed and not tried again."""

    link: Link
    reason: str


@dataclass(frozen=True)
class Stranger:
    """A connection that came in was closed before its other side had proven anything."""

    address: str
    """Its IP address; empty if it was gone too soon to tell."""
    reason: str
    is_foreign: bool = False
    """It speaks ZeroMQ, but not as a distrun node does: ps-lite, most likely."""
    is_same_user: bool | None = None
    """Whether a process of this user on this machine is at the other end; None: not known, or another machine."""


@dataclass(frozen=True)
class Released:
    """Buffers that were still in use when `send` returned may be written again.

    Told by the first `poll` that begins after that; a poll does not end because of it. Who wants to write earlier asks
    `lease.is_over`.
    """

    lease: Lease


@dataclass(frozen=True)
class PathChosen:
    """How large frames of a connection travel from now on: by `segments` (shared memory) or `messages`. Or how all its
    messages do: by `unix` (socket), `tcp` or `zeromq`."""

    link: Link
    path: str
    reason: str = ""
    """Why not by a better one."""


Event = Union[Up, Down, Arrived, Rejected, Stranger, Released, PathChosen]


class Transport(Protocol):
    """The connections of one node. The module's docstring has the rules of order, buffers, threads and errors."""

    def bind(self, address: str, ports: Sequence[int] = ()) -> int:
        """Listen on `address` and return the port: the first of `ports` that is free, any free one if it is empty.

        Raises:
            OSError: no port could be bound; says which were tried. Or the address is not one of this host.
        """

    def connect(self, link: Link, endpoint: str) -> None:
        """Open a connection to `endpoint` under a name that no other one has now; `Up` follows when it stands."""

    def disconnect(self, link: Link, linger_s: float = 0.0) -> None:
        """Close a connection that we opened, or forget one that came in. No `Down` follows here.

        Arguments:
            linger_s: how long what was sent has to leave. Nothing waits for that here.
        """

    def admitted(self, link: Link) -> None:
        """Lift the limits of a connection that came in: its other side has proven that it belongs to the job.

        Call it before that side is told (WELCOME): what it sends from then on may come at once.
        """

    def proven(self, link: Link) -> None:
        """Look for better paths: both sides of a connection know that the other one belongs to the job."""

    def refused(self, link: Link) -> None:
        """Close a connection that came in, as soon as the answer that was sent on it has had time to leave."""

    def shares(self, link: Link) -> bool:
        """Whether frames that lie in this process's shared memory are read there by the other side. Threads: any."""

    def send(self, link: Link, frames: Sequence[Buffer]) -> Lease:
        """Send a message of at least one frame; its buffers are in use until the lease is over.

        Raises:
            ConnectionError: there is no such connection, or it is gone; nothing was sent.
        """

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait until something happens, at most `timeout_s`; return it in order. Empty after a `wake`."""

    def wake(self) -> None:
        """End a running `poll`, or else the next one. Threads: any, and signal handlers."""

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything. What was sent has `linger_s` to leave. Nothing may be called afterwards but `wake`."""


def endpoint(address: str, port: int | str) -> str:
    """Return where a node is reached, `tcp://address:port`; an IPv6 address is in brackets."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
