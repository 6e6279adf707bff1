"""What the process of a coordinator needs beside the job itself: its streams, and clients by the control socket."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Optional

from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.service import Service

if TYPE_CHECKING:
    from distrun_runtime.contract.control import OutputWanted
    from distrun_runtime.coordinator.service import OutputReader

LOG = "coordinator.log"


def service_of(folder: JobFolder, launcher: Optional[socket.socket]) -> Service:
    """Return the service of a job, which has started. `launcher`: the connection to the client that launched it."""
    service = Service(launcher, folder.id, lambda wanted: _logged(folder, wanted), lambda by: _note_stop(folder, by))
    service.state(folder.written)
    service.start()
    return service


def listen(service: Service, folder: JobFolder) -> str:
    """Let clients in by the control socket of a job; return its path.

    Raises:
        ContractError, OSError: there can be no socket.
    """
    from distrun_runtime.coordinator.control import ControlSocket

    listener = ControlSocket(folder.id)
    service.listen(listener)
    return listener.path


def leave_streams(folder: JobFolder) -> None:
    """Read nothing, and write errors that nobody expected to a file of the job's folder."""
    nothing = os.open(os.devnull, os.O_RDWR)
    log = nothing
    with contextlib.suppress(OSError):  # a full disk
        log = os.open(str(folder.path / LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd, to in ((0, nothing), (1, nothing), (2, log)):
        os.dup2(to, fd)
    for fd in {nothing, log}:
        os.close(fd)


def _logged(folder: JobFolder, wanted: OutputWanted) -> OutputReader:
    from distrun_runtime.coordinator.logged import LoggedOutput  # most jobs have one client, which needs it not

    return LoggedOutput(folder, wanted)


def _note_stop(folder: JobFolder, by: str) -> None:
    with contextlib.suppress(OSError):  # it is for a message only
        folder.ask_to_end(by)
