"""The command that sshd runs: it finds a python3 and hands it the agent. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
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

# -S: the agent needs nothing of what site adds, and it is a tenth of its start.
# No single quote, no newline and no `!`: whatever the login shell is, it hands this on to /bin/sh as it stands.
_SEARCH = (
    'b=$1; n=$2; p=$2; shift 2; for m in "$@"; do export "$m"; done; '
    'case $p in "~/"*) p=$HOME/${p#??};; esac; for p in ${p:+"$p"} %s; do '
    'if command -v "$p" >/dev/null 2>&1; then exec "$p" -I -S -c "$b"; fi; done; '
    'echo "distrun: there is no python3 on this host${n:+, nor $n} (looked along PATH=$PATH and in the usual places)" '
    ">&2; exit 127"
)


def command(boot: str, python: str = "", env: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the command for a login shell of any kind: sh, csh and fish read it alike.

    Args:
        boot: the one line of Python that reads the agent from standard input.
        python: an interpreter to try first. Servers may find it only once the environment is activated, so the usual
            ones do for the agent where it is not there yet.
        env: variables that it is started with.
    """
    search = _SEARCH % " ".join('"%s"' % place for place in PLACES)
    added = ["%s=%s" % pair for pair in env.items()]
    return "exec " + shlex.join(["/bin/sh", "-c", search, "distrun", boot, python, *added])
