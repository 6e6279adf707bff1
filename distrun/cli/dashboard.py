"""`distrun dashboard`: jobs in a browser, live."""

from __future__ import annotations

import contextlib
import html
import os
import select
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click

from distrun.cli.common import my_jobs, say, takes
from distrun.cli.console import print_out
from distrun.errors import UsageError
from distrun.options import count
from distrun_runtime.contract import environ, facts, process

OPENING_S = 600.0
"""A browser has opened the page by then."""
PREFIX = "distrun-dashboard-"
SHOWN = 50
"""Jobs that are over and listed."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@takes(count("--port", "Port on the loopback address. [default: any free one]", low=0, high=65535))
@click.option("--open", "is_opened", is_flag=True, help="Open the page in the browser of this desktop.")
def dashboard(job: str | None, port: int | None, is_opened: bool) -> int:
    """Show jobs in a browser, live: progress, plots of what scripts report, tasks, hosts, servers, events, first error.

    \b
    Examples:
      distrun dashboard                  # the list of my jobs
      distrun dashboard calm-otter       # this job; also one that is over
      distrun dashboard --port 8899      # the same port each time, for ssh -L

    The URL that is printed has a token. Everyone who has it can read your jobs while this runs, and change nothing.
    Only browsers on this machine are served. In an ssh session, the command that forwards the port to your machine is
    printed, too. Ctrl-C ends this; jobs go on.
    """
    from distrun.cli import tables
    from distrun.dashboard.loop import ENDING, Signals
    from distrun.dashboard.web import DashboardPort
    from distrun.jobs import Jobs

    chosen = my_jobs().get(job).id if job is not None else ""
    jobs = Jobs(say=lambda text, level: None)
    try:
        server = DashboardPort(
            lambda: [tables.model_of(view, time.time()) for view in jobs.views(SHOWN)],
            lambda wanted: jobs.get(wanted).folder,
            port or 0,
        )
    except OSError as err:
        raise UsageError(
            f"port {port} of {facts.LOOPBACK} cannot be used: {err.strerror}", "choose another --port, or none"
        ) from err
    with contextlib.closing(server), Signals(ENDING) as signals, contextlib.ExitStack() as stack:
        server.start()
        _say_how(server.port)
        print_out(server.address(chosen) + "\n")
        if is_opened:
            url = stack.enter_context(_link(server.address(chosen)))
            threading.Thread(target=_open, args=(url,), daemon=True).start()  # it may wait for the browser
        select.select([signals.wakeup], [], [])
        (ended, *_) = signals.take()
    return 0 if ended == signal.SIGINT else facts.exit_code(None, ended.name)


def _say_how(port: int) -> None:
    """Say how the URL is reached; in an ssh session also what to type on the user's machine."""
    told = environ.text("SSH_CONNECTION").split()
    if len(told) == 4:
        options = ["-L", f"{port}:{facts.LOOPBACK}:{port}", *(["-p", told[3]] if told[3] != "22" else [])]
        login = f"{process.user_name() or os.getuid()}@{socket.gethostname()}"
        say(f"first type on your machine: {shlex.join(['ssh', *options, login])}", "info")
    say("open this URL in a browser; Ctrl-C here ends the dashboard, and jobs go on", "info")


@contextlib.contextmanager
def _link(address: str) -> Iterator[str]:
    """Give the URL of a file that leads a browser to an address: other users can read the arguments of a browser."""
    for old in Path(tempfile.gettempdir()).glob(PREFIX + "*"):  # of a process that was killed
        with contextlib.suppress(OSError):
            if old.lstat().st_uid == os.getuid() and old.lstat().st_mtime < time.time() - OPENING_S:
                shutil.rmtree(old)
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:  # only the user can read it
        path = Path(folder, "dashboard.html")
        path.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(address)}">')
        yield path.as_uri()


def _open(url: str) -> None:
    """Open a URL in the browser of the desktop, if there is one."""
    import webbrowser

    env = environ.snapshot()
    has_desktop = sys.platform == "darwin" or env.get("DISPLAY") or env.get("WAYLAND_DISPLAY")
    if not has_desktop or not webbrowser.open(url):
        say("--open: there is no desktop with a browser here; open the URL yourself", "warning")
