"""Whether a logout ends a user's processes, and what they need to go on (systemd-logind's KillUserProcesses)."""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path
from typing import Optional

_CONFIG = ("/usr/lib/systemd/logind.conf", "/etc/systemd/logind.conf")
_DROP_INS = ("/usr/lib/systemd/logind.conf.d", "/run/systemd/logind.conf.d", "/etc/systemd/logind.conf.d")
"""Later ones win; within the folders, by the files' names, whatever their folder."""
_LINGER = "/var/lib/systemd/linger"
_TRUE = ("1", "yes", "y", "true", "t", "on")
WHY = "a logout ends all your processes here (KillUserProcesses of systemd-logind)"
SCOPE = ("--user", "--scope", "--quiet", "--collect", "--")
"""Arguments of systemd-run, before those of a program that is to go on after a logout."""


def needs_linger(root: str = "") -> Optional[str]:
    """Return the line to type before processes of this user can go on after a logout; None: none.

    `root`: where the system's files are; for tests. Only where `ends_at_logout`.
    """
    user = pwd.getpwuid(os.geteuid()).pw_name
    return None if os.path.exists(root + os.path.join(_LINGER, user)) else f"loginctl enable-linger {user}"


def ends_at_logout(root: str = "") -> bool:
    """Return whether a logout ends this process and what it starts. `root`: where the system's files are; for tests."""
    return _is_of_a_login(root) and _kills_users(root)


def _is_of_a_login(root: str) -> bool:
    """Return whether this process belongs to a login session, as systemd-logind counts them."""
    try:
        text = Path(root + "/proc/self/cgroup").read_text("utf-8", "replace")
    except OSError:
        return False
    return any(part.startswith("session-") and part.endswith(".scope") for part in text.replace("\n", "/").split("/"))


def _kills_users(root: str) -> bool:
    settings = {"KillUserProcesses": "no", "KillOnlyUsers": "", "KillExcludeUsers": "root"}
    drop_ins = {path.name: path for folder in _DROP_INS for path in sorted(Path(root + folder).glob("*.conf"))}
    for path in [*(Path(root + name) for name in _CONFIG), *(drop_ins[name] for name in sorted(drop_ins))]:
        with contextlib.suppress(OSError):
            for line in path.read_text("utf-8", "replace").splitlines():
                name, equals, value = line.partition("=")
                if equals and name.strip() in settings:
                    settings[name.strip()] = value.strip()
    user = pwd.getpwuid(os.geteuid()).pw_name
    only = settings["KillOnlyUsers"].split()
    return (
        settings["KillUserProcesses"].lower() in _TRUE
        and (not only or user in only)
        and user not in settings["KillExcludeUsers"].split()
    )
