"""The folder in which a command was typed."""

from __future__ import annotations

import os

from distrun.errors import UsageError


def current_folder() -> str:
    """Return the path of the current directory.

    Raises:
        UsageError: it was removed.
    """
    try:
        return os.getcwd()
    except OSError as err:
        raise UsageError("the current directory does not exist any more", "cd to one that does") from err
