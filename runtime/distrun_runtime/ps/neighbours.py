"""The other servers of the job: connected to when there is something to tell them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from distrun_runtime.protocol.handshake import Identity
from distrun_runtime.protocol.message import Message
from distrun_runtime.ps import role


class Neighbours:
    """Knows where the other servers are, and which of them are called already.

    A connection carries messages one way, from the side that opened it; the other side opens its own.
    """

    def __init__(self) -> None:
        self._endpoints: dict[str, str] = {}
        self._called: set[str] = set()

    def learn(self, nodes: Sequence[Identity], rank: int) -> None:
        """Take in the job's roster; `rank` is ours."""
        self._endpoints = {node.name: node.endpoint for node in nodes if node.role == "server" and node.rank != rank}

    def __len__(self) -> int:
        return len(self._endpoints)

    def tell(self, message: Message) -> list[role.Action]:
        """Send a message to all of them."""
        actions: list[role.Action] = []
        for name, endpoint in self._endpoints.items():
            if name not in self._called:
                # What is sent before its WELCOME waits at the post office.
                self._called.add(name)
                actions.append(role.Connect(name, endpoint))
            actions.append(role.Send(name, message))
        return actions

    def lost(self, link: role.Link) -> bool:
        """A connection ended or was refused; tell whether it was one of ours to another server."""
        is_ours = link in self._called
        self._called.discard(link)
        return is_ours
