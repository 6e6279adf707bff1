"""The lock by which the places of one node take turns where they share something.

They share the unpacked runtime, and the folder that files are copied to: one of them makes it, the others find it. The
lock is a file in the user's private folder on the host, which stays there. The system releases it if its holder dies.
"""

from __future__ import annotations

import fcntl
import os

NAME = ".lock"
"""Begins with a dot, so that it is no job's."""
TURN_S = 30.0
"""How long an agent waits for its turn. Then it goes on without: what is shared is made so that this does no harm."""


class NodeLock:
    """One agent's handle of the lock. It never waits.

    `folder`: the agent's private folder, HOSTDIR/JOB/PLACE (`record`).
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(os.path.dirname(os.path.dirname(folder)), NAME)
        self._descriptor = -1

    def take(self) -> bool:
        """Take the lock, or go on without where none can be had; return False while another agent has it."""
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a full disk, a file system without locks
            self.release()
        return True

    def release(self) -> None:
        """Let the others have their turn. May be repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
