"""One host of a lab: what happens in it, and what can be done to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hostlab import layout, processes
from hostlab.errors import LabError
from hostlab.keeper import boot_argv
from hostlab.processes import Process

if TYPE_CHECKING:
    from hostlab.lab import Lab

BOOT_S = 60.0
LISTENING = "Server listening"
FILTERS = """
table inet lab {
    set dropped4 { type ipv4_addr; }
    set dropped6 { type ipv6_addr; }
    chain refused { }
    chain lossy { }
    chain input {
        type filter hook input priority 0;
        iifname "lo" accept
        ip saddr @dropped4 drop
        ip6 saddr @dropped6 drop
        jump refused
        jump lossy
    }
}
"""


def wait_until(is_true: Callable[[], Any], limit_s: float, what: str) -> Any:
    """Wait until `is_true()` gives something true, and return it; LabError after `limit_s`.

    To ask takes at most half of the time: some questions start a program.
    """
    asked = time.monotonic()
    end = asked + limit_s
    while not (value := is_true()):
        now = time.monotonic()
        if now > end:
            raise LabError("after %g s still not: %s" % (limit_s, what))
        time.sleep(max(0.01, now - asked))
        asked = time.monotonic()
    return value


class Host:
    """A host, by its name. Whatever is done to it, `clear` and `boot` mend it."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.name = name
        self.address, self.address6 = layout.address(name), layout.address6(name)
        self.options = lab.options
        self.touched = False
        self._folder = lab.state / "hosts.d" / name

    # What is in it.

    def processes(self) -> list[Process]:
        """Return its living processes; none if it is off."""
        return list(processes.of_namespaces(self.spaces()))

    def spaces(self) -> Mapping[str, str]:
        """Return {its pid namespace: its name}, if it was ever up."""
        try:
            kept = os.stat(self._folder / "pid")
        except FileNotFoundError:
            return {}
        is_there = kept.st_dev == os.stat("/proc/self/ns/pid").st_dev  # else it is the empty file
        return {"pid:[%d]" % kept.st_ino: self.name} if is_there else {}

    @property
    def pid(self) -> int:
        """The machine's pid of its first process, sshd. LabError if it is off."""
        for process in self.processes():
            if process.inner == 1:
                return process.pid
        raise LabError("%s is off" % self.name)

    @property
    def root(self) -> Path:
        """Its file system, readable and writable from outside."""
        return Path("/proc/%d/root" % self.pid)

    @property
    def log(self) -> str:
        """What its sshd wrote since it booted."""
        return (self._folder / "log").read_text(errors="replace")

    def enter_argv(self, *argv: str) -> list[str]:
        """Return the command that runs `argv` as the host's root, without ssh."""
        target = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "-r", "-w", "--"]
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return [*target, "env", "-i", "PATH=" + path, "HOME=/root", "USER=root", "LOGNAME=root", *argv]

    def exec(self, *argv: str, text: str = "", timeout_s: float = 60.0, check: bool = True) -> str:
        """Run a command as its root, without ssh, and return its stdout; LabError if it fails and `check`."""
        done = subprocess.run(
            self.enter_argv(*argv), input=text, text=True, capture_output=True, timeout=timeout_s, check=False
        )
        if check and done.returncode:
            raise LabError("%s: %s: %s" % (self.name, " ".join(argv), done.stderr.strip() or done.returncode))
        return done.stdout

    def ps(self) -> str:
        """Return its processes as text, with the machine's pids."""
        return "".join("%7d  %s\n" % (process.pid, process) for process in self.processes())

    # The network.

    def down(self) -> None:
        """Pull its cables: packets vanish silently, both ways."""
        self._links("down")

    def up(self) -> None:
        """Plug them in again."""
        self._links("up")

    def _links(self, state: str) -> None:
        self.touched = True
        text = "".join("link set %s %s\n" % (layout.veth(self.name, number), state) for number in (0, 1))
        self.lab.inside("ip", "-batch", "-", text=text)

    def _net(self, *argv: str, text: str = "", check: bool = True) -> str:
        """Run one of this machine's programs in the host's network namespace; also when the host is off."""
        space = "/proc/%d/root/run/netns/%s" % (self.lab.pid, self.name)
        return self.lab.outside("nsenter", "--net=" + space, "--", *argv, text=text, check=check)

    def _filter(self, *commands: str) -> None:
        self.touched = True
        there = self._net("nft", "list", "tables")
        self._net("nft", "-f", "-", text=("" if "inet lab" in there else FILTERS) + "\n".join(commands) + "\n")

    def _peer(self, peer: str, verb: str) -> None:
        four = "%s, %s" % (layout.address(peer), layout.address(peer, 1))
        six = "%s, %s" % (layout.address6(peer), layout.address6(peer, 1))
        self._filter("%s element inet lab dropped4 { %s }" % (verb, four))
        self._filter("%s element inet lab dropped6 { %s }" % (verb, six))

    def drop(self, peer: str) -> None:
        """Let packets from `peer` (a host, or `launcher`) vanish."""
        self._peer(peer, "add")

    def undrop(self, peer: str) -> None:
        """End what `drop` began."""
        self._peer(peer, "delete")

    def reject(self, port: int) -> None:
        """Answer connections to a port as if nobody listened; open ones are reset at their next packet."""
        self._filter("add rule inet lab refused tcp dport %d reject with tcp reset" % int(port))

    def loss(self, percent: float) -> None:
        """Lose incoming packets at random."""
        some = "numgen random mod 10000 < %d" % round(float(percent) * 100) if percent < 100 else ""
        self._filter("flush chain inet lab lossy", "add rule inet lab lossy %s drop" % some)

    def delay(self, ms: float, jitter_ms: float = 0.0, seconds: float = 30.0) -> None:
        """Delay incoming packets by `ms` for some seconds."""
        self.touched = True
        self._stop_delay()
        argv = ["setsid", "-f", sys.executable, "-m", "hostlab.netem", str(ms), str(jitter_ms), str(seconds), self.name]
        script = 'exec nsenter --net=/run/netns/%s "$@" </dev/null >/dev/null 2>&1' % self.name
        self.lab.inside("sh", "-c", script, "sh", *argv, env=self.lab.module_env())
        rules = ("iptables", "-S", "INPUT")
        wait_until(lambda: "NFQUEUE" in self._net(*rules), BOOT_S, "%s delays its packets" % self.name)

    def _stop_delay(self) -> None:
        def delays() -> list[int]:
            mark = b"hostlab.netem\0"
            here = self.lab.processes(layout.LAUNCHER)
            return [p.pid for p in here if mark in p.command and p.command.endswith(b"\0%s\0" % self.name.encode())]

        for pid in delays():
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not delays(), BOOT_S, "%s no longer delays" % self.name)

    def rate(self, kbit: int) -> None:
        """Shape traffic, both ways."""
        self.touched = True
        burst = max(32 * 1024, int(kbit) * 1000 // 8 // 250)  # what a timer of 250 Hz lets through at this rate
        words = ("root", "tbf", "rate", "%dkbit" % int(kbit), "burst", "%db" % burst, "latency", "400ms")
        for number in (0, 1):
            self._net("tc", "qdisc", "replace", "dev", "eth%d" % number, *words)
            self.lab.inside("tc", "qdisc", "replace", "dev", layout.veth(self.name, number), *words)

    # Its processes.

    def _pids(self) -> list[int]:
        return [process.pid for process in self.processes()]

    def stop(self) -> None:
        """Freeze all its processes: connections stay open, its kernel still accepts, nobody answers."""
        self.touched = True
        self.lab.groups.freeze(self.name, self._pids)

    def cont(self) -> None:
        """Thaw them."""
        self.lab.groups.thaw(self.name)

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        self.touched = True
        seen: set[int] = set()
        while new := set(self._pids()) - seen:
            for pid in new:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            seen |= new

    def sigcont(self) -> None:
        """Let them go on."""
        self.signal(signal.SIGCONT)
        self._wake_entries()

    def _entries(self) -> dict[int, str]:
        """Return the state of each `nsenter` by which somebody entered from outside, by its pid."""
        inside = self.processes()
        found = {}
        for parent in {process.parent for process in inside} - {process.pid for process in inside}:
            with contextlib.suppress(OSError):
                name, _, rest = Path("/proc/%d/stat" % parent).read_text().partition("(")[2].rpartition(") ")
                if name == "nsenter":
                    found[parent] = rest[0]
        return found

    def _wake_entries(self) -> None:
        """Let those go on that stopped themselves when their child was stopped."""
        for pid in self._entries():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """End all its processes at once; its kernel still answers, so peers hear of it."""
        self.touched = True
        self.lab.groups.thaw(self.name)
        self._wake_entries()  # A stopped one would not collect its child, without which the first process cannot end.
        os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: not self.processes(), BOOT_S, "%s is off" % self.name)

    def poweroff(self) -> None:
        """Cut cables and power: peers hear nothing."""
        self.down()
        self.kill()

    def boot(self, options: layout.Options | None = None) -> None:
        """Start it (again): same address and keys, empty disks. LabError if it is not up in time."""
        self.touched = True
        if self.processes():
            self.kill()
        self.up()
        self.options = options or self.lab.options
        self.lab.configure(self.name, self.options)
        self.lab.inside(*boot_argv(self.name))
        self.wait_up()

    def wait_up(self) -> None:
        """Wait until its sshd listens; LabError with its words if it does not."""
        with contextlib.suppress(LabError):
            wait_until(lambda: LISTENING in self.log or (self.log and not self.processes()), BOOT_S, "up")
        if LISTENING not in self.log:
            raise LabError("%s did not come up; it says: %s" % (self.name, self.log.strip()[-2000:]))

    # Its sshd.

    def sessions(self) -> list[Process]:
        """Return the processes of sshd that serve somebody."""
        return [process for process in self.processes() if process.name.startswith("sshd") and process.inner != 1]

    def kill_sessions(self) -> None:
        """Kill every session's sshd: connections are reset, what ran in them is left alone."""
        self.touched = True
        for process in self.sessions():
            os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not self.sessions(), BOOT_S, "no session on %s" % self.name)

    def restart_sshd(self, sshd: Mapping[str, str] | None = None) -> None:
        """Restart its sshd, with other options if given; sessions stay, as with `systemctl restart ssh`."""
        self.touched = True
        if sshd is not None:
            self.options = replace(self.options, sshd=sshd)
            (self.root / "etc/ssh/lab_sshd_config").write_text(layout.sshd_config(self.options))
        before = self.log.count(LISTENING)
        os.kill(self.pid, signal.SIGHUP)
        wait_until(lambda: self.log.count(LISTENING) > before, BOOT_S, "sshd of %s listens again" % self.name)

    # Its means.

    def mem(self, mb: int) -> None:
        """Limit its memory; who wants more is killed."""
        self._limit("memory", ("%dM" % int(mb), "%dM" % int(mb)))

    def cpu(self, percent: int) -> None:
        """Limit it to a part of one processor."""
        self._limit("cpu", ("%d 100000" % (int(percent) * 1000), "%d" % (int(percent) * 1000)))

    def pids(self, number: int) -> None:
        """Limit how many processes it has."""
        self._limit("pids", (str(int(number)), str(int(number))))

    def _limit(self, controller: str, values: tuple[str, str]) -> None:
        self.touched = True
        self.lab.groups.limit(self.name, controller, values, self._pids)

    def disk(self, mb: int, path: str = "/tmp") -> None:
        """Leave so many MiB free in one of its file systems."""
        if path not in layout.DISKS:
            raise LabError("%s is not a file system of its own; those are: %s" % (path, " ".join(layout.DISKS)))
        self.touched = True
        disk = os.statvfs(self.root / path.lstrip("/"))
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        self.exec("mount", "-o", "remount,size=%dk" % ((used >> 10) + int(mb) * 1024), path)

    # Mending.

    def clear(self) -> None:
        """Undo every fault but kill and poweroff."""
        self.lab.groups.thaw(self.name)
        self.lab.groups.unlimit(self.name)
        self._stop_delay()
        unshape = "for i in %s; do tc qdisc del dev $i root; done"
        self._net("sh", "-c", "nft delete table inet lab; " + unshape % "eth0 eth1", check=False)
        ours = "%s %s" % (layout.veth(self.name, 0), layout.veth(self.name, 1))
        self.lab.inside("sh", "-c", unshape % ours, check=False)
        self.up()
        if self.processes():
            self.sigcont()
            small = " && ".join("mount -o remount,size=%dm %s" % (size, path) for path, size in layout.DISKS.items())
            self.exec("sh", "-c", small)

    def restore(self) -> None:
        """Make it as it was when the lab came up, if anything was done to it."""
        if self.touched:
            self.clear()
            if self.options != self.lab.options or not self.processes():
                self.boot()
            self.touched = False


def numbers(words: Sequence[str]) -> list[Any]:
    """Return words as typed, those that are numbers as such."""
    found: list[Any] = []
    for word in words:
        try:
            found.append(float(word) if "." in word else int(word))
        except ValueError:
            found.append(word)
    return found
