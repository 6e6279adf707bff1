"""The command that sshd runs on a host: it finds a python3 and hands it a program. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType

PLACES = (
    "python3",
    "/usr/bin/python3",
    "/usr/local/bin/python3",
    "$HOME/miniconda3/bin/python3",
    "$HOME/miniforge3/bin/python3",
    "$HOME/anaconda3/bin/python3",
    "/opt/conda/bin/python3",
    "/opt/homebrew/bin/python3",
    "$HOME/.local/bin/python3",
    "$HOME/.pyenv/shims/python3",
)
"""Where a python3 is looked for, in order; the first by PATH."""

# -S: the program needs nothing of what site adds, and it is a tenth of its start.
# No single quote, no newline and no `!`: whatever the login shell is, it hands this on to /bin/sh as it stands.
_SEARCH = (
    'm=$1; b=$2; n=$3; p=$3; shift 3; until [ "$1" = -- ]; do export "$1"; shift; done; shift; '
    'case $p in "~/"*) p=$HOME/${p#??};; esac; for p in ${p:+"$p"} %s; do '
    'if command -v "$p" >/dev/null 2>&1; then exec "$p" -I -S -c "$b" "$@"; fi; done; '
    'echo "$m there is no python3 on this host${n:+, nor $n} (looked along PATH=$PATH and in the usual places)" '
    ">&2; exit 127"
)


def command(
    boot: str,
    python: str = "",
    words: Sequence[str] = (),
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    begin: str = "",
    missing: str = "distrun:",
) -> str:
    """Return the command for a login shell of any kind: sh, csh and fish read it alike.

    Args:
        boot: the one line of Python that reads the program.
        python: an interpreter to try first. Servers may find it only once the environment is activated, so the usual
            ones do for the agent where it is not there yet.
        words: arguments of the program.
        env: variables that it is started with.
        begin: a line that is written to stderr at once.
        missing: what the line begins with that says that there is no python3.
    """
    search = _SEARCH % " ".join('"%s"' % place for place in PLACES)
    if begin:
        search = 'echo "%s" >&2; %s' % (begin, search)
    added = ["%s=%s" % pair for pair in env.items()]
    return "exec " + shlex.join(["/bin/sh", "-c", search, "distrun", missing, boot, python, *added, "--", *words])
