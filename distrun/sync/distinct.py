"""What ssh makes of a host: which names are one, the remote shell for rsync, and why it did not get there."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from distrun.errors import DistrunError, SyncError

if TYPE_CHECKING:
    from distrun.ssh.target import Target

Shell = Callable[["Target"], Sequence[str]]
Identity = Callable[["Target"], Hashable]

WORKERS = 16


def groups(targets: Mapping[str, Target], identity: Identity) -> list[tuple[str, ...]]:
    """Return the names of each distinct host, in the order of `targets`."""

    def ask(name: str) -> Hashable:
        try:
            return identity(targets[name])
        except (DistrunError, OSError, ValueError):
            return ("name", name)  # rsync's attempt will say what is wrong with it

    with ThreadPoolExecutor(max_workers=WORKERS) as pool:
        found = list(pool.map(ask, targets))
    named: dict[Hashable, list[str]] = {}
    for name, key in zip(targets, found, strict=True):
        named.setdefault(key, []).append(name)
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


def ssh_shell(target: Target) -> Sequence[str]:
    """Return the remote shell for rsync: the ssh program, with the parameters that the target's connection has.

    Raises:
        SyncError: there is no ssh program, or its configuration cannot be read.
    """
    from distrun.ssh.failure import SshFailure
    from distrun.ssh.resolve import rsync_shell

    if shutil.which("ssh") is None:
        raise SyncError("there is no program ssh on this machine, which rsync needs to reach a host", "install OpenSSH")
    try:
        return rsync_shell(target)
    except SshFailure as err:
        raise SyncError(err.text, err.fix) from err


def ssh_failure(target: Target, words: Sequence[str]) -> tuple[str, str, bool]:
    """Return why ssh did not get there, what to do about it, and whether it may be over in a moment."""
    from distrun.ssh.failure import SshFailure, classify
    from distrun.ssh.resolve import resolve

    try:
        found = classify("\n".join(words), resolve(target).where)
    except SshFailure as err:
        found = err
    return found.text, found.fix, found.is_passing
