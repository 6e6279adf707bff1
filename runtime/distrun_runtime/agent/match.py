"""The explicit old way: processes by a pattern of their command lines, whoever started them. Own user only."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List, Mapping, Pattern, Set

from distrun_runtime.agent import survey, sweep
from distrun_runtime.contract import process
from distrun_runtime.contract.process import Identity, Process
from distrun_runtime.errors import ContractError

DAEMONS = ("sshd", "sshd-session", "sshd-auth")
_WHOLE = 100000
"""Characters of a command line that are looked at."""


def match(args: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the processes whose command line the pattern is found in, and end them if that is wanted.

    Never the first process, this one or those above it, an agent, a guard, or an ssh daemon. Arguments: `regex`;
    `kill`, whether to end them; `grace_s`, seconds between TERM and KILL; `only`, pairs of pid and start: of those
    found only these; `spare`, such pairs that are left alone.

    Raises:
        ContractError: the pattern is none.
    """
    try:
        pattern = re.compile(str(args["regex"]))
    except re.error as err:
        raise ContractError("--match %s: this is not a regular expression: %s" % (args["regex"], err)) from None
    found = matching(process.table(), pattern, _identities(args.get("spare")))
    if args.get("only") is not None:
        only = _identities(args["only"])
        found = [each for each in found if each.identity in only]
    rows = [survey.row(each) for each in found]
    if not args.get("kill"):
        return {"found": rows, "ended": [], "left": []}
    chosen = {each.identity for each in found}

    def find() -> List[Process]:
        return [
            each for each in process.table([who.pid for who in chosen]) if each.identity in chosen and not each.is_dead
        ]

    signalled, left = sweep.end_all(find, float(args.get("grace_s") or 0.0))
    remaining = {each.pid for each in left}
    return {
        "found": rows,
        "ended": [[who.pid, text] for who, text in signalled.items() if who.pid not in remaining],
        "left": [[each.pid, process.command_of(each.pid)] for each in left],
    }


def matching(rows: List[Process], pattern: Pattern[str], spare: Set[Identity]) -> List[Process]:
    """Return the processes of the calling user in `rows` that the pattern means and that may be ended."""
    spared = process.ancestors(os.getpid(), rows) | {os.getpid(), 1}
    candidates = [each for each in rows if not each.is_dead and each.pid not in spared and each.identity not in spare]
    found = []
    for each in process.mine(candidates):
        command = process.command_of(each.pid, _WHOLE)
        if sweep.AGENT not in command and not is_daemon(command) and pattern.search(command):
            found.append(each)
    return found


def is_daemon(command: str) -> bool:
    """Return whether a command line is one of the ssh server's. Pure."""
    first = command.partition(" ")[0].rstrip(":").strip("[]")
    return os.path.basename(first) in DAEMONS


def _identities(pairs: Any) -> Set[Identity]:
    return {Identity(int(pid), str(start)) for pid, start in pairs or ()}
