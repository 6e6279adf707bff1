"""What backends share whose agents dial back: the addresses, the certificate and the secret of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from distrun.backends import blob, certificate
from distrun.backends.base import Listening
from distrun.backends.engine import Bootstrap
from distrun_runtime.contract import address, enrolment
from distrun_runtime.contract.plan import Plan
from distrun_runtime.coordinator.dialback import DialBack, with_port

if TYPE_CHECKING:
    from distrun_runtime.coordinator.channel import Channel


class Callers:
    """The agents of one job, which an engine starts and which dial back to this process.

    Arguments:
        job: its id.
        limit_s: how long an agent that was started tries to reach this process.
        listening: what the user said of where to listen.

    Raises:
        ContractError: no port is free.
    """

    def __init__(self, job: str, limit_s: float, listening: Listening) -> None:
        made = certificate.make(job)
        self.secret = os.urandom(enrolment.SECRET_BYTES).hex()
        """The enrolment secret: agents get it in a file or by the engine's own means, never on a command line."""
        self._job = job
        self._limit_s = limit_s
        self.agents = DialBack(job, self.secret, made.pem, (), program=blob.dialed, port_range=listening.port_range)
        self.addresses = tuple(with_port(each, self.agents.port) for each in listening.addresses or address.own())
        """`ADDRESS:PORT` that agents try, in this order."""

    @property
    def bootstrap(self) -> Bootstrap:
        """What starts an agent that reaches this process."""
        return Bootstrap(self._job, self.agents.pin, self.addresses, self._limit_s)

    def expect(self, plan: Plan, claims: Mapping[str, str] = MappingProxyType({})) -> Sequence[Channel]:
        """Return a channel for each place of the plan, whose agents are let in when the channels are started.

        `claims`: what agents call their places, by the plan's name, where these differ.
        """
        self.agents.expect((place.name for place in plan.all_places), claims)
        return self.agents.channels

    def write_secret(self, path: Path) -> None:
        """Write the secret to a new file of mode 0600, in a folder that agents can read. Raises OSError."""
        write_new(path, self.secret + "\n", 0o600)


def write_new(path: Path, text: str, mode: int) -> None:
    """Write a file that is not there yet. Raises OSError: also if it is there, or is a link."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
