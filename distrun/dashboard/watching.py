"""Connects the parts of the dashboard: connection, terminal, signals, and the loop of one job or of all jobs."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from distrun import client, remote_jobs
from distrun.dashboard.jobs import JobsScreen
from distrun.dashboard.loop import INTERVAL_S, STATE_S, Dashboard, Ended, FolderLogs, Signals
from distrun.dashboard.model import Model
from distrun.dashboard.plain import Plain
from distrun.dashboard.source import FrameSource
from distrun.dashboard.terminal import Appearance, Terminal
from distrun.errors import DistrunError
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun.client import ControlConnection
    from distrun_runtime.coordinator.jobfolder import JobFolder

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def watch(folder: JobFolder, look: Appearance) -> Ended:
    """See `distrun.dashboard.watch`."""
    connection = _first_connection(folder)  # before the screen is taken: ssh may ask for a password
    with Signals() as signals, Terminal(has_colour=look.has_colour, is_ascii=look.is_ascii) as terminal:
        return _show(folder, connection, terminal, signals, look)


def watch_jobs(read: Callable[[], Sequence[Model]], find: Callable[[str], JobFolder], look: Appearance) -> Ended:
    """See `distrun.dashboard.watch_jobs`."""
    with Signals() as signals, Terminal(has_colour=look.has_colour, is_ascii=look.is_ascii) as terminal:
        jobs = JobsScreen(read, terminal, signals, is_ascii=look.is_ascii)
        while True:
            chosen = jobs.run()
            if isinstance(chosen, Ended):
                return chosen
            folder = find(chosen)
            try:
                connection = _first_connection(folder)
            except DistrunError as err:
                jobs.say(str(err))
                continue
            ended = _show(folder, connection, terminal, signals, look)
            if ended.signal is not None:
                return ended


def follow(folder: JobFolder, write: Callable[[str], bool]) -> Ended:
    """See `distrun.dashboard.follow`."""
    connection = _first_connection(folder)
    model, plain = Model(folder.id), Plain()
    with Signals(ENDING) as signals:
        source = _source(folder)
        source.start(connection, has_events=not remote_jobs.is_elsewhere(folder))
        try:
            asked = 0.0
            while True:
                select.select([source.wakeup, signals.wakeup], [], [], INTERVAL_S)
                for frame in source.take():
                    if frame.kind == "link":
                        model.disconnected(str(frame.header["why"]))
                    model.take(frame.kind, frame.header, time.time())
                model.settle(time.time())
                lines = plain.changes(model, time.time())
                if not all(write(line + "\n") for line in lines) or model.job.is_over:
                    return Ended(model.exit_code)
                for each in signals.take():
                    return Ended(model.exit_code, None if each == signal.SIGINT else each)
                if time.monotonic() >= asked + STATE_S / 10:
                    asked = time.monotonic()
                    source.send("state")
        finally:
            source.close()


def _show(
    folder: JobFolder,
    connection: ControlConnection | None,
    terminal: Terminal,
    signals: Signals,
    look: Appearance,
) -> Ended:
    source, is_elsewhere = _source(folder), remote_jobs.is_elsewhere(folder)
    source.start(connection, has_events=not is_elsewhere)
    try:
        logs = FolderLogs(folder)
        return Dashboard(
            folder.id, source, terminal, signals, logs, is_elsewhere=is_elsewhere, is_ascii=look.is_ascii
        ).run()
    finally:
        source.close()


def _source(folder: JobFolder) -> FrameSource:
    return FrameSource(folder, lambda found: client.connect(found, may_ask=False), _refresh)


def _first_connection(folder: JobFolder) -> ControlConnection | None:
    """Return a connection; None if there is none, but the folder says how the job stands."""
    try:
        if folder.is_finished:
            return None
        return client.connect(folder)
    except (DistrunError, JobStoreError):
        if remote_jobs.is_elsewhere(folder):
            remote_jobs.refreshed(folder, may_ask=False)  # as a rule the job is over, and its folder says so
            if not folder.is_finished:
                raise
        return None


def _refresh(folder: JobFolder) -> str:
    return remote_jobs.refreshed(folder, may_ask=False)
