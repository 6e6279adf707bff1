"""Serves the page in the browser: a read-only HTTP server on the loopback address of this machine.

Other users of the machine, and web sites that the user visits, reach this address, too. So:

* `/api/` needs a random token. It is in the fragment of the URL that is printed, which browsers do not send; the page's
  program takes it from there and sends it in a header. It is no cookie: those go to any server of an address, whatever
  its port.
* Host must be a name of the loopback address, so that no other name can be made to mean it (DNS rebinding), and Origin,
  if there is one, the page's own.
* A browser runs no program and loads nothing but the files of `page/`, and shows the page in no other one.

A job is followed while a browser asks for it. What a browser does not take is dropped, not kept.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from distrun import remote_jobs
from distrun.dashboard import page, rows
from distrun.dashboard.feed import JobFeed
from distrun.dashboard.model import Model
from distrun.dashboard.page import RowChoice, UsagePlots
from distrun.dashboard.source import END_S, FrameSource
from distrun.errors import DistrunError
from distrun_runtime.contract import facts
from distrun_runtime.contract.facts import duration
from distrun_runtime.coordinator.httpport import HttpAnswer, HttpPort
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.errors import JobStoreError, NoSuchJob

FOLDER = Path(__file__).with_name("page")
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/uplot/uPlot.js": ("uplot/uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uplot/uPlot.css": ("uplot/uPlot.min.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Of every reply."""
_HOST = r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?"
FRESH_S, OLD_S = 1.0, 10.0
"""How long a list of jobs is shown, at least and at most; it is made when a browser asks."""
BUSY = 0.1
"""Share of the time in which jobs are read for the list: hosts elsewhere are asked each time."""
WAIT_S = 15.0
"""Time limit for what other requests have begun."""
UNWATCHED_S = 90.0
"""A job for which no browser has asked so long is followed no more. Browsers run a hidden page once a minute."""
WATCHED = 8
"""Jobs that are followed at most."""


class _PageAnswer(HttpAnswer):
    """One connection."""

    server: DashboardPort

    def answer(self) -> None:
        """Send a file of the page, or what it shows."""
        path, _, query = self.path.partition("?")
        if not self._is_local():
            self.send_error(403, explain="this is for the page at the URL that distrun dashboard has printed")
        elif path in FILES:
            name, kind = FILES[path]
            self.send(200, kind, (FOLDER / name).read_bytes())
        elif not path.startswith("/api/"):
            self.send_error(404, explain="there is no such page")
        elif not self._has_token():
            self.send_error(401, explain="the token is missing or wrong: use the URL that distrun dashboard printed")
        else:
            try:
                status, value = self.server.content(path, dict(parse_qsl(query)))
                body = json.dumps(value, allow_nan=False).encode()
            except Exception as err:  # a fault of ours: the page says so, and the server its traceback
                self.send_error(500, explain=f"internal error: {type(err).__name__}: {err}")
                raise
            self.send(status, "application/json", body)

    def _is_local(self) -> bool:
        hosts = self.headers.get_all("Host", [])
        origins = self.headers.get_all("Origin", [])
        is_ours = len(hosts) == 1 and re.fullmatch(_HOST, hosts[0], re.ASCII) is not None
        return is_ours and all(origin == f"http://{hosts[0]}" for origin in origins)

    def _has_token(self) -> bool:
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        is_from_page = self.headers.get("Sec-Fetch-Site", "same-origin") == "same-origin"
        return hmac.compare_digest(given, b"Bearer " + self.server.token.encode()) and is_from_page

    def end_headers(self) -> None:
        """Add what every reply has."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()


class DashboardPort(HttpPort):
    """Listens at a port of the loopback address from the call on; replies from `start` to `close`.

    Arguments:
        read: returns the jobs of the list.
        find: returns the folder of the job with an id.
        port: 0: any free one.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, read: Callable[[], Sequence[Model]], find: Callable[[str], JobFolder], port: int = 0) -> None:
        super().__init__(facts.LOOPBACK, port, _PageAnswer)
        self.token = secrets.token_urlsafe(32)
        self._read, self._find = read, find
        self._lock = threading.Lock()
        self._listing = threading.Lock()
        self._list: Mapping[str, Any] = {}
        self._list_until = float("-inf")
        self._watched: dict[str, _WatchedJob] = {}

    def address(self, job: str = "") -> str:
        """Return the URL for a browser, with the token. `job`: id of the job that is shown; empty: the list."""
        return f"{self.url}#token={self.token}" + (f"&job={job}" if job else "")

    def content(self, path: str, asked: Mapping[str, str]) -> tuple[int, Mapping[str, Any]]:
        """Return the status of a reply and its JSON."""
        try:
            if path == "/api/jobs":
                return 200, self._jobs()
            if path == "/api/job":
                order = asked.get("order", "")
                choice = RowChoice(
                    asked.get("only", ""), order if order in rows.SORTS else rows.SORTS[0], bool(asked.get("fold"))
                )
                return 200, self._watch(asked.get("id", "")).page(choice)
        except NoSuchJob as err:
            return 404, {"error": str(err)}
        except (JobStoreError, DistrunError, OSError) as err:
            return 500, {"error": str(err)}
        return 404, {"error": "there is nothing of this name"}

    def _jobs(self) -> Mapping[str, Any]:
        with _held(self._listing):
            begun = time.monotonic()
            if begun >= self._list_until:
                self._list = page.jobs(self._read(), time.time())
                took_s = time.monotonic() - begun
                self._list_until = time.monotonic() + min(max(FRESH_S, took_s / BUSY), OLD_S)
            return self._list

    def _watch(self, job: str) -> _WatchedJob:
        with _held(self._lock):
            found = self._watched.get(job)
            if found is None:
                found = _WatchedJob(self._find(job))
                if len(self._watched) >= WATCHED:
                    self._forget([min(self._watched, key=lambda each: self._watched[each].asked_at)])
                self._watched[job] = found
            found.asked_at = time.monotonic()
            return found

    def _forget(self, jobs: Iterable[str], limit_s: float = 0.0) -> None:
        until = time.monotonic() + limit_s
        for job in jobs:
            self._watched.pop(job).close(max(0.0, until - time.monotonic()))

    def service_actions(self) -> None:
        """Drop clients that have used up their time; follow no job that is not watched."""
        super().service_actions()
        if self._lock.acquire(blocking=False):  # else a browser asks now
            since = time.monotonic() - UNWATCHED_S
            self._forget([job for job, watched in self._watched.items() if watched.asked_at < since])
            self._lock.release()

    def close(self) -> None:
        """Listen no more, drop all connections, follow no job."""
        super().close()
        with self._lock:
            self._forget(list(self._watched), END_S)


@contextlib.contextmanager
def _held(lock: threading.Lock) -> Iterator[None]:
    """Hold a lock.

    Raises:
        TimeoutError: it has not become free.
    """
    if not lock.acquire(timeout=WAIT_S):
        raise TimeoutError(f"the disk with the jobs, or a host, has not answered for {duration(WAIT_S)}")
    try:
        yield
    finally:
        lock.release()


class _WatchedJob:
    """A job that is followed for browsers."""

    def __init__(self, folder: JobFolder) -> None:
        self.asked_at = 0.0
        has_events = not remote_jobs.is_elsewhere(folder)
        self._usage = UsagePlots(folder.samples())
        self._source = FrameSource(folder)
        self._feed = JobFeed(folder, self._source)
        self._lock = threading.Lock()
        self._is_closed = False
        self._source.start(None, has_events)

    def page(self, choice: RowChoice) -> dict[str, Any]:
        """Return what is known of the job now."""
        with _held(self._lock):
            for frame in self._feed.take() if not self._is_closed else ():
                if frame.type == "failed_here":
                    self._feed.model.link = f"internal error: {frame.header['error']}; start distrun dashboard again"
            self._feed.ask()
            now = self._feed.settle()
            self._usage.take(self._feed.model)
            return page.job(self._feed.model, choice, self._usage, now)

    def close(self, limit_s: float) -> None:
        """Follow it no more; wait `limit_s` at most for the end of the connection. What is known can still be read."""
        with self._lock:
            self._is_closed = True
            self._source.close(limit_s)
