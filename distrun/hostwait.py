"""`--wait-for-hosts`: waits until the hosts of a launch are up, before anything of the job is made.

They are asked by `distrun status -H`, in a process of its own: what asks hosts has threads, and a launch forks.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from distrun.errors import PreflightError
from distrun.fleet.questions import HELLO_EACH_S
from distrun.hosts.parse import FILES
from distrun.hosts.ranges import fold
from distrun.options import HOSTS
from distrun.request import JobRequest
from distrun.requesting import typed
from distrun_runtime.contract.facts import duration

RETRY_S = 5.0
"""Between two looks."""
FIRST_S = 100.0
"""How long the first look may take, however short the time is, and HELLO_EACH_S more for each host: so long it may take
where hosts are up."""
END_S = 5.0
"""How long a look may take to end when the time is over."""
DOWN = ("dns", "refused", "timeout", "unreachable", "busy")
"""Kinds of problems that a host has which is not up yet. Others are the launch's to report."""


def question(request: JobRequest) -> tuple[list[str], str]:
    """Return the command that asks the hosts of a launch, and what it gets on standard input. No side effects."""
    options = {row.key: request.given.get(row.key, row.default) for row in HOSTS}
    if options["hostfile"] is None and options["hosts"] is None:
        file = next((request.outer[name] for name in FILES if request.outer.get(name)), None)
        names = request.hosts.names if request.hosts else ()
        options.update(hostfile=file, hosts=None if file else fold(list(names)))
    text = ""
    if options["hostfile"] == "-" and request.hosts is not None:  # it has been read; a list could not say all of it
        options.update(hostfile="/dev/stdin", hostfile_format="auto")
        text = request.hosts.as_file()
    return [sys.executable, "-m", "distrun", "status", "--json", *typed(options, request.hosts, HOSTS)], text


def wait(request: JobRequest, used: Sequence[str], say: Callable[[str, str], None]) -> None:
    """Return when none of the hosts `used` is down any more; say which are.

    Raises:
        PreflightError: some are down after the time that the request gives them.
    """
    limit_s = request.wait_for_hosts_s
    asked, until, told = question(request), time.monotonic() + limit_s, ""
    down, look_s = dict.fromkeys(used, "no answer"), max(limit_s, FIRST_S + HELLO_EACH_S * len(used))
    while True:
        down = _down(*asked, look_s, used, down)
        if not down:
            return
        names, why = fold(list(down)), next(iter(down.values()))
        if (left_s := until - time.monotonic()) <= 0:
            raise PreflightError(
                f"--wait-for-hosts: not up after {duration(limit_s)}: {names} ({why})",
                "distrun doctor with the same hosts says more",
            )
        if names != told:
            told = names
            say(f"waiting for {names}: {why}", "info")
        time.sleep(min(RETRY_S, left_s))
        look_s = max(0.0, until - time.monotonic())


def _down(
    argv: Sequence[str], text: str, limit_s: float, used: Sequence[str], before: dict[str, str]
) -> dict[str, str]:
    """Return the hosts that are down, and why: `before`, if that is not known after `limit_s`.

    There are none if they cannot be asked at all, which the launch reports.
    """
    try:
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            try:
                out, _ = child.communicate(text.encode(), limit_s)
            except subprocess.TimeoutExpired:
                return before
            finally:
                _end(child)
        rows = json.loads(out)["hosts"]
    except (OSError, ValueError, KeyError):
        return {}
    problems = {row["host"]: row["problem"] for row in rows if row["problem"]}
    return {host: each["text"] for host, each in problems.items() if host in used and each["kind"] in DOWN}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Have a look end, and with it the connections that it has opened, if it has not ended."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
