"""A whole lab: made, found, entered, ended. See the package's page for what it is."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hostlab import cgroups, layout, processes
from hostlab.errors import LabError, Unavailable
from hostlab.host import BOOT_S, Host, wait_until
from hostlab.layout import Options
from hostlab.processes import Process

if TYPE_CHECKING:
    from typing_extensions import Self

HERE = Path(__file__).resolve().parent
UP_S = 60.0
PROGRAMS = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "rsync": "rsync",
    "ip": "iproute2",
    "nft": "nftables",
    "iptables": "iptables",
    "ping": "iputils-ping",
    "nsenter": "util-linux",
    "ps": "procps",
}
"""What a lab needs, and the Debian package that has it."""


def search_path() -> str:
    """Return the search path with the folders of system programs, which not every root has."""
    return os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/local/sbin:/usr/sbin:/sbin"


def why_not() -> str:
    """Return why this machine or user cannot have a lab, or nothing."""
    if not sys.platform.startswith("linux"):
        return "a lab needs Linux's namespaces"
    if os.geteuid() != 0:
        return "a lab needs root (it makes network namespaces and mounts)"
    missing = {package for program, package in PROGRAMS.items() if not shutil.which(program, path=search_path())}
    if missing:
        return "a lab needs Debian's packages %s" % " ".join(sorted(missing))
    words = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--propagation", "unchanged", "true"]
    tried = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    if tried.returncode:
        return "a lab needs namespaces, and this machine refuses them: %s" % tried.stderr.strip()
    return ""


class Lab:
    """A lab that is up. `lab["h2"]` is a host."""

    def __init__(self, pid: int, warden: int, options: Options, process: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.warden = warden
        self.options = options
        self.state = Path("/proc/%d/root%s" % (pid, layout.STATE))
        config = json.loads((self.state / "config.json").read_text())
        ours = self.state / "cgroup"
        self.groups = cgroups.Groups(ours if ours.exists() else cgroups.MACHINE, config["group"])
        self._hide = [Path(path) for path in config["hide"]]
        self._share = [Path(path) for path in config["share"]]
        self._process = process
        self.hosts = {name: Host(self, name) for name in (self.state / "hosts").read_text().split()}

    def __getitem__(self, name: str) -> Host:
        try:
            return self.hosts[name]
        except KeyError:
            raise LabError("no host %s in this lab; there are: %s" % (name, " ".join(self.hosts))) from None

    # Making and ending.

    @classmethod
    def up(
        cls,
        count: int = 4,
        options: Options | None = None,
        *,
        hide: Sequence[Path] = (),
        share: Sequence[Path] = (),
        daemon: bool = False,
    ) -> Self:
        """Make a lab and wait until all hosts are up.

        `hide`: folders that are empty on hosts; `share`: folders that are the same ones on hosts as here. `daemon`:
        it outlives this process; otherwise it ends with it, however that ends. Unavailable says why there can be none.
        """
        if reason := why_not():
            raise Unavailable(reason)
        options = options or Options()
        for path in share:
            if not path.exists():
                raise LabError("there is no %s to be shared with hosts" % path)
        group = "distrun-lab-" + secrets.token_hex(4)
        argv = ["sh", str(HERE / "warden.sh"), group, sys.executable, "-m", "hostlab.keeper", str(count)]
        argv += ["--group", group, "--options", json.dumps(asdict(options))]
        argv += ["--hide=%s" % path.resolve() for path in hide] + ["--share=%s" % path.resolve() for path in share]
        with tempfile.TemporaryFile() as words:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL if daemon else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                env={**os.environ, **cls.module_env()},
                start_new_session=True,
            )
            assert process.stdout is not None
            line = process.stdout.readline() if select.select([process.stdout], [], [], UP_S)[0] else b""
            process.stdout.close()
            told = json.loads(line or b"{}")
            if "pid" not in told:
                cls._end(process)
                words.seek(0)
                text = told.get("error") or words.read().decode(errors="replace").strip() or "it said nothing"
                raise Unavailable("no lab can be made here: %s" % text)
        lab = cls(told["pid"], process.pid, options, process)
        try:
            for host in lab.hosts.values():
                host.wait_up()
        except BaseException as error:
            lab.down()
            if isinstance(error, LabError) and "a lab needs" in str(error):
                raise Unavailable(str(error)) from error
            raise
        return lab

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        if process.stdin:
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def down(self) -> None:
        """End it, with everything in it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        if self._process:
            self._end(self._process)
        else:
            wait_until(lambda: not os.path.exists("/proc/%d" % self.warden), BOOT_S, "the lab's warden has ended")

    # Entering.

    @staticmethod
    def module_env() -> dict[str, str]:
        """Return the variables with which `python -m hostlab.X` works anywhere."""
        return {"PYTHONPATH": str(HERE.parent), "PATH": search_path(), "PYTHONDONTWRITEBYTECODE": "1"}

    def enter_argv(self, *argv: str, cwd: str = "/") -> list[str]:
        """Return the command that runs `argv` in the launcher's place."""
        target = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "-r", "-w", "--"]
        return [*target, "sh", "-c", 'cd "$0" && exec "$@"', cwd, *argv]

    def launcher_env(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return variables as the launcher has them: its own home, and nothing that leads out of the lab."""
        left = {"XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK"}
        kept = {name: value for name, value in env.items() if name not in left}
        return {**kept, "HOME": str(self.home), "PATH": search_path(), "USER": "root", "LOGNAME": "root"}

    @property
    def home(self) -> Path:
        """The launcher's home, as it is called in the lab."""
        return layout.STATE / "home"

    def file(self, path: Path | str) -> Path:
        """Return the name outside of a path in the launcher's place."""
        return Path("/proc/%d/root%s" % (self.pid, path))

    def inside(self, *argv: str, text: str = "", check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Run a program of the lab itself in the launcher's place and return its stdout."""
        return self.outside(*self.enter_argv(*argv), text=text, check=check, env=env)

    @staticmethod
    def outside(*argv: str, text: str = "", check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Run a program on the machine and return its stdout; LabError with its words if it fails."""
        variables = {**os.environ, "PATH": search_path(), **(env or {})}
        done = subprocess.run(argv, input=text, text=True, capture_output=True, check=False, timeout=60, env=variables)
        if check and done.returncode:
            raise LabError("%s: %s" % (" ".join(argv[-8:]), done.stderr.strip() or "exit code %d" % done.returncode))
        return done.stdout

    def configure(self, host: str, options: Options) -> None:
        """Write what a host reads when it boots."""
        folder = self.state / "hosts.d" / host
        (folder / "boot").write_text(layout.boot_file(options, self._hide, self._share))
        (folder / "sshd_config").write_text(layout.sshd_config(options))

    # Looking.

    def processes(self, only: str = "") -> list[Process]:
        """Return the living processes of the lab, of one place if given; the lab's own keeper is not among them."""
        spaces = {os.readlink("/proc/%d/ns/pid" % self.pid): layout.LAUNCHER}
        for host in self.hosts.values():
            spaces.update(host.spaces())
        chosen = {space: place for space, place in spaces.items() if only in ("", place)}
        return [p for p in processes.of_namespaces(chosen) if p.pid != self.pid]

    def marked(self, job: str | None = None) -> list[Process]:
        """Return the living processes of a job, or of any, by the mark in their environment, wherever they are."""
        found = []
        for process in self.processes():
            mark = process.environ().get(b"DISTRUN_JOB_ID")
            if mark is not None and job in (None, mark.decode()):
                found.append(process)
        return found

    def strangers(self) -> list[Process]:
        """Return what runs on hosts and is not their sshd's: after a job there is nothing."""
        return [p for p in self.processes() if p.host != layout.LAUNCHER and not p.name.startswith("sshd")]

    # Faults.

    def fault(self, verb: str, host: str, *words: Any) -> Any:
        """Do a host what a verb of `Host` says."""
        return getattr(self[host], verb)(*words)

    def restore(self) -> None:
        """Mend every host, and the launcher's ssh files."""
        for host in self.hosts.values():
            host.restore()
        keys = {name: (self.state / "hosts.d" / name / "key.pub").read_text() for name in self.hosts}
        known = layout.known_hosts(keys)
        ssh = self.file(self.home / ".ssh")
        for name, text in (("known_hosts", known), ("config", "")):
            if not (ssh / name).exists() or (ssh / name).read_text() != text:
                (ssh / name).write_text(text)
