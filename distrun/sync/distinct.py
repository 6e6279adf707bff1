"""What ssh makes of a host: which names are one, and why rsync's ssh did not get there."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from distrun.errors import DistrunError, SyncError

if TYPE_CHECKING:
    from distrun.ssh.failure import SshFailure
    from distrun.ssh.target import Target

Identity = Callable[["Target"], Hashable]

AUTH = "auth"
"""Kind of the failure of a user whom a host does not let in."""
WORKERS = 16
LOOK_S = 5.0
"""How long after the last answer the others are waited for. A resolver without a name server takes 25 s for a name."""
_GLANCE_S = 0.1


def groups(
    targets: Mapping[str, Target],
    identity: Identity,
    limit_s: float = LOOK_S,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> list[tuple[str, ...]]:
    """Return the names of each distinct host, in the order of `targets`.

    A name about which nothing is known in time is a host of its own: a second copy into one folder does no harm.
    """
    waiting = deque(targets)
    found: dict[str, Hashable] = {}
    changed = threading.Condition()

    def ask() -> None:
        while True:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            try:
                key = identity(targets[name])
            except (DistrunError, OSError, ValueError):
                key = ("name", name)  # rsync's attempt will say what is wrong with it
            with changed:
                found[name] = key
                changed.notify()

    # Daemons: a resolver cannot be interrupted, and neither Ctrl-C nor the end of the program waits for one.
    for _ in range(min(WORKERS, len(targets))):
        threading.Thread(target=ask, name="look up hosts", daemon=True).start()
    with changed:
        answered, until = 0, time.monotonic() + limit_s
        while len(found) < len(targets) and time.monotonic() < until and not is_cancelled():
            changed.wait(_GLANCE_S)
            if len(found) > answered:
                answered, until = len(found), time.monotonic() + limit_s
        known = dict(found)
    waiting.clear()
    named: dict[Hashable, list[str]] = {}
    for name in targets:
        named.setdefault(known.get(name, ("name", name)), []).append(name)
    return [tuple(names) for names in named.values()]


def ssh_identity(target: Target) -> Hashable:
    """Return user, addresses, port and way, as the user's ssh configuration has them: the same for one host.

    Raises:
        OSError: the name has no address.
        SyncError: the ssh configuration cannot be read.
    """
    from distrun.ssh.failure import SshFailure
    from distrun.ssh.resolve import resolve

    try:
        found = resolve(target)
    except SshFailure as err:
        raise SyncError(err.text, err.fix) from err
    if found.jump or found.proxy_command:
        # What a name means on the other side of a jump is not known here.
        return (found.user, found.hostname, found.port, found.jump, found.proxy_command)
    addresses = socket.getaddrinfo(found.hostname, found.port, type=socket.SOCK_STREAM)
    return (found.user, tuple(sorted({str(each[4][0]) for each in addresses})), found.port)


def ssh_failure(target: Target, words: Sequence[str]) -> SshFailure:
    """Return why ssh did not get there. May run `ssh -G`."""
    from distrun.ssh.failure import SshFailure, classify
    from distrun.ssh.resolve import resolve

    try:
        return classify("\n".join(words), resolve(target).where)
    except SshFailure as err:
        return err
