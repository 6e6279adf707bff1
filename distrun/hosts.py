"""Hosts that the user names. This version runs on this machine only: a hosts file is read, not yet understood."""

from __future__ import annotations

from distrun.errors import HostsError


def read(path: str) -> str:
    """Return the text of a hosts file.

    Raises:
        HostsError: it cannot be read, or is no text.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError, ValueError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        raise HostsError("cannot read the hosts file %r: %s" % (path, reason)) from err
