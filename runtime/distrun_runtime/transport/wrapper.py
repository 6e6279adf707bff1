"""Wrapper: a transport around another one, which does the same but for what a subclass does otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from distrun_runtime.protocol.message import Buffer
from distrun_runtime.transport.zeromq import Event, Lease, Link


class Inner(Protocol):
    """The transport that is wrapped; `ZmqTransport` says what each method does."""

    def bind(self, address: str, ports: Sequence[int] = ()) -> int:
        """Listen."""
        ...

    def connect(self, link: Link, endpoint: str) -> None:
        """Open a connection."""
        ...

    def disconnect(self, link: Link, linger_s: float = 0.0) -> None:
        """Close a connection."""
        ...

    def proven(self, link: Link) -> None:
        """Lift the limits of a connection that came in."""
        ...

    def refused(self, link: Link) -> None:
        """Close a connection that came in, in a moment."""
        ...

    def send(self, link: Link, frames: Sequence[Buffer]) -> Lease:
        """Send frames."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Return what happened."""
        ...

    def wake(self) -> None:
        """End a poll early."""
        ...

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything."""
        ...


class Wrapper:
    """Passes everything on.

    Threads: as the inner one: everything but `wake` belongs to the thread that polls.
    """

    def __init__(self, inner: Inner) -> None:
        self._inner = inner

    def bind(self, address: str, ports: Sequence[int] = ()) -> int:
        """Listen; return the port."""
        return self._inner.bind(address, ports)

    def connect(self, link: Link, endpoint: str) -> None:
        """Open a connection."""
        self._inner.connect(link, endpoint)

    def disconnect(self, link: Link, linger_s: float = 0.0) -> None:
        """Close a connection."""
        self._inner.disconnect(link, linger_s)

    def proven(self, link: Link) -> None:
        """Lift the limits of a connection that came in."""
        self._inner.proven(link)

    def refused(self, link: Link) -> None:
        """Close a connection that came in, in a moment."""
        self._inner.refused(link)

    def send(self, link: Link, frames: Sequence[Buffer]) -> Lease:
        """Send frames.

        Raises:
            ConnectionError: the connection is gone.
        """
        return self._inner.send(link, frames)

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait at most so long and return what happened."""
        return self._inner.poll(timeout_s)

    def wake(self) -> None:
        """End a running or the next `poll` early. Threads: any."""
        self._inner.wake()

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything."""
        self._inner.close(linger_s)
