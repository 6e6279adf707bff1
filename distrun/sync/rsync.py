"""The rsync program: what it can do, its command lines, one run of it to one host, and why a run failed.

On the host `receiver.py` runs in place of rsync: it checks the folder, then runs the host's rsync in it. What it
reports (`receiver.SAYS`) is part of a run's result.
"""

from __future__ import annotations

import binascii
import contextlib
import functools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distrun.errors import SyncError
from distrun.formats import quiet
from distrun.ssh.openssh import Child
from distrun.ssh.resolve import remote_command
from distrun.sync import receiver
from distrun.sync.receiver import NO_RSYNC, SAYS, SHELL, UNFIT
from distrun_runtime.contract import environ
from distrun_runtime.contract import folder as folder_contract
from distrun_runtime.contract.folder import PARTIAL

PROBE_S = 20.0
INSTALL = "install rsync (apt install rsync, dnf install rsync, brew install rsync)"

MEANINGS = {
    1: "syntax or usage",
    2: "protocol incompatibility",
    3: "errors selecting input or output files",
    4: "the requested action is not supported",
    5: "the protocol could not be started",
    6: "it could not append to its log",
    10: "socket I/O",
    11: "file I/O",
    12: "the connection ended early",
    13: "program diagnostics",
    14: "inter-process communication",
    19: "it was ended by SIGUSR1",
    20: "it was ended by a signal",
    21: "waitpid failed",
    22: "out of memory",
    23: "some files were not copied",
    24: "some files vanished while they were copied",
    25: "--max-delete stopped deletions",
    30: "timeout while sending or receiving data",
    35: "timeout while waiting for a connection",
    124: "the command on the host failed",
    125: "the command on the host was killed",
    126: "the command on the host cannot be run",
    127: "a command was not found on the host",
    255: "ssh failed",
}
"""rsync's exit codes, from its manual. Those from 124 on are the remote shell's."""
PARTLY = (23, 24)
TIMEOUTS = (30, 35)


# ---------------------------------------------------------------------- the program of this machine


@dataclass(frozen=True)
class Tool:
    """An rsync."""

    program: str
    version: str
    """`3.2.7`, `openrsync`, or empty if it does not say."""
    options: frozenset[str]
    """The long options that its help lists, with their dashes."""

    def has(self, *names: str) -> bool:
        """Return whether it has all these options."""
        return self.options.issuperset(names)


def find() -> Tool:
    """Return the rsync of this machine. It is probed once.

    Raises:
        SyncError: there is none, or it does not answer.
    """
    path = shutil.which("rsync")
    if path is None:
        raise SyncError("there is no rsync on this machine, and a copy to the hosts needs one", INSTALL)
    return probe(path)


@functools.lru_cache(maxsize=8)
def probe(program: str) -> Tool:
    """Run `PROGRAM --version` and `PROGRAM --help`; return what they say.

    Raises:
        SyncError: it cannot be run.
    """
    env = {**environ.snapshot(), "LC_ALL": "C"}

    def ask(option: str) -> str:
        try:
            result = subprocess.run(
                [program, option], env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as err:
            raise SyncError(f"{program} {option}: {err}", INSTALL) from err
        return (result.stdout + result.stderr).decode("utf-8", "replace")

    version = ask("--version")
    found = re.search(r"\bversion v?(\d+(?:\.\d+)*)", version)
    name = "openrsync" if "openrsync" in version else found.group(1) if found else ""
    return Tool(program, name, frozenset(re.findall(r"--[a-z0-9][a-z0-9-]+", ask("--help"))))


def meaning(code: int) -> str:
    """Return what an exit code of rsync means, in words with the code."""
    if code < 0:
        return f"ended by signal {-code}"
    return f"{MEANINGS[code]} (code {code})" if code in MEANINGS else f"code {code}"


# ---------------------------------------------------------------------- command lines


def listing(tool: Tool, filters: Sequence[str], source: str, empty: str, files_from: str = "") -> list[str]:
    """Return the command that lists what a copy of `source` into the folder `empty` would send, and copies nothing."""
    argv = [*_base(tool), "--dry-run", *filters, *_from(files_from)]
    # As for the copy: then rsync knows all entries before it begins, and takes them in the same order.
    argv += _known(tool, "--delay-updates")
    argv.append("--out-format=%l %i %n" if tool.has("--out-format") else "--stats")
    return [*argv, "--", source, empty]


def sending(
    tool: Tool,
    filters: Sequence[str],
    source: str,
    host: str,
    *,
    shell: Sequence[str],
    rsync_path: str,
    partial: str,
    stall_s: float,
    delete: bool = False,
    files_from: str = "",
    follow: bool = False,
) -> list[str]:
    """Return the command that copies `source` to `host`, into the folder that `rsync_path` changes into.

    Files are put into place when all have arrived. `follow`: copy what links lead to, not the links.
    """
    argv = [*_base(tool), "--rsh=" + join(shell), "--rsync-path=" + rsync_path, f"--timeout={max(1, round(stall_s))}"]
    if tool.has("--delay-updates", "--partial-dir"):
        argv += ["--delay-updates", "--partial-dir=" + partial]
    if delete:
        # Deletions come last, so that a copy that fails has deleted nothing.
        argv += ["--delete", *(_known(tool, "--delete-delay") or ["--delete-after"])]
    argv += [*filters, *_from(files_from), "--stats"]
    if follow:
        argv.append("--copy-links")
    if tool.has("--info"):
        argv.append("--info=progress2")
    return [*argv, "--", source, f"[{host}]:./" if ":" in host else f"{host}:./"]


def join(words: Sequence[str]) -> str:
    """Return words as --rsh takes them: rsync splits at blanks and understands quotes (doubled inside quotes)."""

    def quoted(word: str) -> str:
        if word and not any(character in word for character in " '\""):
            return word
        return "'" + word.replace("'", "''") + "'"

    return " ".join(map(quoted, words))


def _base(tool: Tool) -> list[str]:
    """Return the program and how files are copied: links as links, with times; never owner and group.

    Files belong to the user who logs in on the host. Of modes only executability is copied to files that exist:
    the modes of existing folders are the host's business (a group's shared folder, a set-group-id bit).
    """
    argv = [tool.program, "-rlt"]
    argv.append("--executability" if tool.has("--executability") else "-p")
    return argv + _known(tool, "--omit-dir-times", "--8-bit-output")


def _from(path: str) -> list[str]:
    return ["--from0", "--files-from=" + path] if path else []


def _known(tool: Tool, *names: str) -> list[str]:
    return [name for name in names if tool.has(name)]


# ---------------------------------------------------------------------- the command on the host

BEGIN = "begin"
NO_PYTHON = "nopython"

# No quote of either kind and nothing that a shell would touch within single quotes.
_BOOT = "import binascii,sys,zlib;exec(zlib.decompress(binascii.a2b_base64(sys.argv[1])))"
# Nothing newer than Python 2.7 before the version is known.
_PROGRAM = """\
if sys.version_info < (3, 8):
    sys.stderr.write("%(says)s%(nopython)s %%s is Python %%s\\n" %% (sys.executable, sys.version.split()[0]))
    sys.exit(127)
def module(name, text):
    made = sys.modules[name] = type(sys)(name)
    exec(compile(text, "<distrun>/" + name, "exec", dont_inherit=True), made.__dict__)
    return made
module("distrun_runtime.contract.folder", %(folder)r)
options = binascii.a2b_base64(sys.argv[2]).decode()
sys.exit(module("distrun.sync.receiver", %(receiver)r).main([options] + sys.argv[3:]))
"""


def rsync_path(
    folder: str,
    *,
    size: int = 0,
    files: int = 0,
    source: str = "",
    delete: bool = False,
    extra: bool = False,
    partial: str = "-",
    host: str = "",
    python: str = "",
) -> str:
    """Return the value of --rsync-path: the command that runs `receiver.py` on the host, for a copy into `folder`.

    The program and its options are words of the command, compressed and in base64: the connection's input is rsync's,
    and a login shell finds nothing in them to change.

    Args:
        folder: the destination.
        size: bytes for which an empty folder needs room.
        files: files for which an empty folder needs room.
        source: what identifies the source's folder, to recognize it on the host.
        delete: whether the folder must have distrun's marker, or be empty.
        extra: whether something is added below a folder that was copied to; it gets no marker.
        partial: name of the folders for files until all have arrived; the same for all hosts of one copy.
        host: what the host is called.
        python: an interpreter on the host to try first.
    """
    options = {
        "folder": os.fsencode(folder).hex(),
        "size": size,
        "files": files,
        "source": source,
        "delete": delete,
        "marks": not extra,
        "partial": partial,
        "host": host,
        "beginning": PARTIAL,
    }
    words = (_program(), _base64(json.dumps(options).encode("ascii")))
    return remote_command(_BOOT, python, words, begin=SAYS + BEGIN, missing=SAYS + NO_PYTHON)


@functools.lru_cache(maxsize=1)
def _program() -> str:
    """Return the program as one word."""
    modules = {"folder": folder_contract, "receiver": receiver}
    sources = {name: Path(str(each.__file__)).read_text("utf-8") for name, each in modules.items()}
    text = _PROGRAM % {"says": SAYS, "nopython": NO_PYTHON, **sources}
    return _base64(zlib.compress(text.encode("utf-8"), 9))


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


# ---------------------------------------------------------------------- one run to one host

POLL_S = 0.1
LAST_WORDS_S = 2.0
"""How long the host's messages are waited for after a run that failed."""
KILL_AFTER_S = 1.0
"""Between asking a run to end and killing it."""
RATE_S = 6.0
LEAST_S = 2.0
"""A rate is known after so long."""
SAMPLE_S = 0.2
WORDS = 8
"""Lines of rsync's last messages that are kept."""

# rsync and its ssh run in a process group of their own, with a guard that waits on a pipe from this process. When the
# pipe closes, because the run is over or because this process was killed, the guard ends the group.
_GUARD = (
    'exec 3<&0; { trap "" TERM; cat <&3 >/dev/null; kill -TERM 0; sleep 1; kill -KILL 0; } >/dev/null 2>&1 & '
    'exec "$@" 3<&- </dev/null'
)

_PROGRESS = re.compile(rb"\s*([\d,.]+)\s+\d+%.*?(?:\(xfe?r#(\d+), (?:to|ir)-chk=(\d+)/(\d+)\)\s*)?")
_FILES = re.compile(rb"Number of (?:regular )?files transferred: ([\d,.]+)")
_BYTES = re.compile(rb"Total transferred file size: ([\d,.]+)")


@dataclass
class RsyncProgress:
    """What has been sent so far."""

    files: int = 0
    size: int = 0
    """Bytes."""
    done: int = 0
    """Bytes of all files up to the present one, including those that the host had already."""


@dataclass
class RsyncResult:
    """How a run ended."""

    code: int
    """rsync's exit code; negative: the signal that ended it."""
    words: list[str] = field(default_factory=list)
    """The last messages of rsync and ssh."""
    says: dict[str, str] = field(default_factory=dict)
    """What `receiver.py` reported: word -> detail."""
    files: int = 0
    """Files that were sent."""
    size: int = 0
    """Bytes of these files."""
    overdue: bool = False
    """The host did not answer in time, so the run was ended."""
    cancelled: bool = False


class Transfer:
    """A run of rsync. `run` is called once; `cancel` from any thread."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], *, answer_s: float, sums: Sequence[int] = ()
    ) -> None:
        """Prepare a run. `sums` are those of the listing (`tree.sums`), for `Progress.done`."""
        self._sums = sums
        self._passed = self._sent_then = 0
        self._argv = list(argv)
        self._env = env
        self._answer_s = answer_s
        self._cancelled = False
        self._out = b""
        self._err = b""
        self._open: dict[int, Callable[[bytes], None]] = {}
        self.progress = RsyncProgress()
        self._ended = RsyncResult(0)

    def cancel(self) -> None:
        """End it soon."""
        self._cancelled = True

    def run(self) -> RsyncResult:
        """Run it to its end. Blocks, but not forever: rsync has its own timeout once the host has answered.

        Raises:
            OSError: it cannot be started.
        """
        with contextlib.ExitStack() as stack:
            guarded, guard = os.pipe()
            stack.callback(os.close, guard)
            try:
                popen = subprocess.Popen(
                    ["sh", "-c", _GUARD, "distrun-guard", *self._argv],
                    env=dict(self._env),
                    stdin=guarded,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            finally:
                os.close(guarded)
            assert popen.stdout is not None
            assert popen.stderr is not None
            stack.enter_context(popen.stdout)
            stack.enter_context(popen.stderr)
            child = Child(popen)
            try:
                self._watch(child, popen.stdout.fileno(), popen.stderr.fileno())
            finally:
                child.signal()  # the guard, and what rsync may have left
                popen.wait()
        self._hear(self._err)
        self._ended.code = popen.returncode
        self._ended.files, self._ended.size = self.progress.files, self.progress.size
        self._ended.cancelled = self._cancelled
        return self._ended

    def _watch(self, child: Child, out: int, err: int) -> None:
        started = time.monotonic()
        asked = 0.0
        self._open = {out: self._take_out, err: self._take_err}
        for fd in self._open:
            os.set_blocking(fd, False)
        while child.status() is None:
            self._read(POLL_S)
            now = time.monotonic()
            self._ended.overdue = self._ended.overdue or (not self._ended.says and now > started + self._answer_s)
            if self._cancelled or self._ended.overdue:
                if not asked:
                    asked = now
                    child.signal(signal.SIGTERM)
                elif now > asked + KILL_AFTER_S:
                    child.signal()
        # Not until the end of the streams: a connection that ssh keeps for others would hold them open. But after a
        # failure, the host's messages about it may come after the end of rsync here.
        until = time.monotonic() + (LAST_WORDS_S if child.status() else 0.0)
        while self._read(0.0) or (self._open and time.monotonic() < until):
            time.sleep(0.005)

    def _read(self, wait_s: float) -> bool:
        """Read what there is, after waiting for it at most so long; return whether there was any."""
        if not self._open:
            time.sleep(wait_s)
            return False
        poll = select.poll()
        for fd in self._open:
            poll.register(fd, select.POLLIN)
        got = False
        for fd, _ in poll.poll(wait_s * 1000):
            with contextlib.suppress(BlockingIOError):
                data = os.read(fd, 65536)
                got = got or bool(data)
                self._open[fd](data)
                if not data:
                    del self._open[fd]
        return got

    def _take_out(self, data: bytes) -> None:
        *lines, self._out = re.split(rb"[\r\n]", self._out + data)
        for line in lines:
            if match := _PROGRESS.fullmatch(line):
                self._note_progress(match)
            elif match := _FILES.match(line):
                self.progress.files = _number(match.group(1))
            elif match := _BYTES.match(line):
                self.progress.size = _number(match.group(1))

    def _note_progress(self, match: re.Match[bytes]) -> None:
        progress = self.progress
        progress.size = _number(match.group(1))
        if match.group(2):
            progress.files = int(match.group(2))
            if self._sums:
                entries = int(match.group(4)) - int(match.group(3))
                self._passed = self._sums[min(entries, len(self._sums) - 1)]
                self._sent_then = progress.size
        progress.done = self._passed + progress.size - self._sent_then

    def _take_err(self, data: bytes) -> None:
        *lines, self._err = (self._err + data).split(b"\n")
        for line in lines:
            self._hear(line)

    def _hear(self, line: bytes) -> None:
        text = line.decode("utf-8", "surrogateescape").rstrip("\r")
        if text.startswith(SAYS):
            word, _, detail = text[len(SAYS) :].partition(" ")
            self._ended.says[word] = detail
        elif text.strip():
            self._ended.words = [*self._ended.words, text][-WORDS:]


def _number(digits: bytes) -> int:
    return int(re.sub(rb"\D", b"", digits) or b"0")


class Rate:
    """How fast a number grows, measured over the last RATE_S: rsync reports only once a second what it has sent."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now: float, number: int) -> None:
        """Note the number at a time (seconds, growing). Numbers less than SAMPLE_S after the last are left out."""
        if not self._seen or now >= self._seen[-1][0] + SAMPLE_S:
            self._seen.append((now, number))
            while self._seen[0][0] < now - RATE_S:
                self._seen.popleft()

    def value(self) -> float | None:
        """Return the growth per second; None: it was not seen for long enough."""
        grown = [each for each in self._seen if each[1]]
        if not grown or grown[-1][0] < grown[0][0] + LEAST_S:
            return None
        (first, before), (last, after) = grown[0], grown[-1]
        return max(0, after - before) / (last - first)


# ---------------------------------------------------------------------- why a run failed

PYTHON = "install one there, or name it by python=PATH in the hosts file"
ROOM = "make room there, or give another directory"
_FULL = ("No space left on device", "Disk quota exceeded", "File too large")
_UNCLEAN = "is your shell clean"
_SUMS = ("rsync error:", "rsync: connection unexpectedly closed", "rsync warning:")
_RACES = ("File exists", "No such file or directory", "file has vanished", "Directory not empty", "non-empty directory")


def explain(ended: RsyncResult, host: str, *, answer_s: float = 0.0, stall_s: float = 0.0) -> tuple[str, str]:
    """Return why a run failed, and what to do about it; two empty texts if it did not."""
    says, code = ended.says, meaning(ended.code)
    # Not rsync's summary at the end, nor that a pipe broke.
    telling = [word for word in ended.words if not word.startswith(_SUMS) and "Broken pipe" not in word]
    last = (telling or ended.words or [""])[-1]
    if ended.code == 0:
        return "", ""
    if ended.overdue:
        return f"it has not answered within {answer_s:g} s", f"distrun doctor --hosts {host}"
    if NO_RSYNC in says:
        return "there is no rsync on it", "on that host: " + INSTALL
    if NO_PYTHON in says:
        return f"a python3 of 3.8 or newer is needed there: {says[NO_PYTHON]}", PYTHON
    if UNFIT in says:
        text, fix = json.loads(says[UNFIT])
        return str(text), str(fix)
    if met_a_loud_shell(ended):
        fix = quiet(says[SHELL]) if SHELL in says else f"this says in which file: distrun doctor --hosts {host}"
        return "its login shell prints something, and rsync cannot work over that", fix
    if ended.code in TIMEOUTS:
        return f"nothing has moved for {stall_s:g} s: {code}", "look at the network, or at the disk of that host"
    if not says:
        return f"ssh did not get there: {last or code}", f"distrun doctor --hosts {host}"
    if any(sign in word for word in ended.words for sign in _FULL):
        return f"its disk is full: {code}", ROOM
    return f"rsync: {code}: {last}" if last else f"rsync: {code}", ""


def met_a_loud_shell(ended: RsyncResult) -> bool:
    """Return whether a run failed because the login shell there had printed something before rsync spoke."""
    return any(_UNCLEAN in word for word in ended.words)


def met_another_copy(ended: RsyncResult) -> bool:
    """Return whether a run failed only because another copy into the same folder ran at the same time.

    A file that was removed here during the copy looks the same. The next run will succeed, or say what is wrong.
    """
    plain = [word for word in ended.words if not word.startswith(_SUMS)]
    return ended.code in PARTLY and bool(plain) and all(any(race in word for race in _RACES) for word in plain)
