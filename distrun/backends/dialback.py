"""What backends share whose agents dial back: the addresses, the certificate and the secret of a job."""

from __future__ import annotations

import os
from pathlib import Path

from distrun.backends import blob, bootstrap, certificate
from distrun.backends.base import Listening
from distrun_runtime.contract import address, enrolment
from distrun_runtime.contract.plan import Plan
from distrun_runtime.coordinator.dialback import DialBack, with_port


class Callers:
    """The agents of one job, which an engine starts and which dial back to this process.

    Arguments:
        plan: of the job. Each of its places has one agent.
        listening: what the user said of where to listen.

    Raises:
        ContractError: no port is free.
    """

    def __init__(self, plan: Plan, listening: Listening) -> None:
        made = certificate.make(plan.job)
        self.secret = os.urandom(enrolment.SECRET_BYTES).hex()
        """The enrolment secret: agents get it in a file or by the engine's own means, never on a command line."""
        self._job = plan.job
        self._limit_s = plan.limits.start_s
        places = [place.name for place in plan.all_places]
        self.agents = DialBack(
            plan.job, self.secret, made.pem, places, program=blob.dialed, port_range=listening.port_range
        )
        self.addresses = tuple(with_port(each, self.agents.port) for each in listening.addresses or address.own())
        """`ADDRESS:PORT` that agents try, in this order."""

    def command(self, python: str, place: str, secret: str) -> tuple[str, ...]:
        """Return what an engine executes for a place. `place` and `secret`: see `bootstrap.command`."""
        return bootstrap.command(
            python,
            pin=self.agents.pin,
            job=self._job,
            place=place,
            secret=secret,
            limit_s=self._limit_s,
            addresses=self.addresses,
        )

    def write_secret(self, path: Path) -> None:
        """Write the secret to a new file of mode 0600, in a folder that agents can read. Raises OSError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(self.secret + "\n")
