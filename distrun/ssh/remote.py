"""The command that sshd runs: it finds a python3 and hands it the agent. Pure."""

from __future__ import annotations

import shlex

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
    'for p in %s; do if command -v "$p" >/dev/null 2>&1; then exec "$p" -I -S -c "$1"; fi; done; '
    'echo "distrun: there is no python3 on this host (looked along PATH=$PATH and in the usual places)" >&2; exit 127'
) % " ".join('"%s"' % place for place in PLACES)
_NAMED = (
    'p=$2; case $p in "~/"*) p=$HOME/${p#??};; esac; '
    'if command -v "$p" >/dev/null 2>&1; then exec "$p" -I -S -c "$1"; fi; '
    'echo "distrun: there is no python $p on this host" >&2; exit 127'
)


def command(boot: str, python: str = "") -> str:
    """Return the command for a login shell of any kind: sh, csh and fish read it alike.

    Args:
        boot: the one line of Python that reads the agent from standard input.
        python: the interpreter to use; empty: it is looked for.
    """
    words = ["/bin/sh", "-c", _NAMED if python else _SEARCH, "distrun", boot, *([python] if python else [])]
    return "exec " + shlex.join(words)
