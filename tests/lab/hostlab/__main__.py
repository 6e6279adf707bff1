"""`scripts/lab`: test hosts by hand."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from hostlab import layout
from hostlab.errors import LabError
from hostlab.host import numbers
from hostlab.lab import Lab
from hostlab.layout import Options

VERBS = (
    *("down", "up", "drop", "undrop", "reject", "loss", "delay", "rate", "stop", "cont"),
    *(
        "kill",
        "poweroff",
        "boot",
        "restart_sshd",
        "kill_sessions",
        "ps",
        "mem",
        "cpu",
        "pids",
        "disk",
        "clear",
    ),
)
SPACES = {"net": 0x40000000, "uts": 0x04000000, "ipc": 0x08000000, "mnt": 0x00020000, "pid": 0x20000000}

HELP = """\
scripts/lab up [N] [--share DIR]... [--hide DIR]...   N hosts (4), until `scripts/lab down`
  --shared-home                         hosts and launcher have one home, as on a file server
scripts/lab shell [COMMAND...]          run a command (a shell) as the launcher, here, with this environment
scripts/lab exec HOST [COMMAND...]      run a command (a shell) on a host, without ssh
scripts/lab fault VERB HOST [VALUE...]  break something; `clear` mends it, `boot` starts a host again
scripts/lab down

verbs (peers: h1 h2 ... launcher):
  down | up                 pull and plug the cables: silence, nothing is reset
  drop PEER | undrop PEER   packets from PEER vanish
  reject PORT               connections to PORT are refused
  loss PERCENT              incoming packets are lost
  delay MS [JITTER] [S]     incoming packets come later, for S seconds (30)
  rate KBIT                 slow link
  stop | cont               freeze and thaw all processes
  kill                      end all processes: peers hear of it
  poweroff                  cut cable and power: peers hear nothing
  boot                      start again, with empty disks
  restart_sshd | kill_sessions
  mem MB | cpu PERCENT | pids N    small means
  disk MB [DIR]             leave only MB free in /tmp, or DIR
  ps                        its processes
  clear                     undo all but kill and poweroff
"""


def record(name: str) -> Path:
    """Return the file that says which lab has a name."""
    return Path("/run/distrun-lab-%s.json" % name)


def started(pid: int) -> str:
    """Return when a process was started, as the kernel counts; empty if there is none."""
    try:
        return Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def find(name: str) -> Lab | None:
    """Return the running lab of a name."""
    try:
        told = json.loads(record(name).read_text())
    except FileNotFoundError:
        return None
    if started(told["pid"]) != told["started"]:
        return None
    return Lab(told["pid"], told["warden"], Options(**told["options"]))


def found(name: str) -> Lab:
    """Return the running lab of a name, or raise LabError."""
    lab = find(name)
    if lab is None:
        raise LabError("no lab is up. Type:  scripts/lab up 4")
    return lab


def enter(pid: int, argv: list[str], env: dict[str, str], cwd: str) -> int:
    """Run a command in another process's place, as its user would in a terminal; return its exit code.

    `nsenter` would do but for Ctrl-C: it dies of it before the command has ended.
    """
    spaces = {name: os.open("/proc/%d/ns/%s" % (pid, name), os.O_RDONLY) for name in SPACES}
    root = os.open("/proc/%d/root" % pid, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    for name, flag in SPACES.items():
        if libc.setns(spaces[name], flag):
            raise LabError("cannot enter the lab's %s namespace: %s" % (name, os.strerror(ctypes.get_errno())))
    os.fchdir(root)
    os.chroot(".")
    try:
        os.chdir(cwd)
    except OSError as error:
        raise LabError("cannot start in %s there: %s" % (cwd, error.strerror)) from error
    try:
        child = subprocess.Popen(argv, env=env)
    except OSError as error:
        raise LabError("%s: %s" % (argv[0], error.strerror)) from error
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: child.send_signal(number))
    code = child.wait()
    return code if code >= 0 else 128 - code


def up(told: argparse.Namespace) -> None:
    """Make a lab and say how to use it."""
    if find(told.name):
        raise LabError("a lab is up already; `scripts/lab down` ends it, --name NAME makes another")
    sshd = dict(item.split("=", 1) for item in told.sshd)
    options = Options(sshd, told.noisy, not told.no_python, told.mesh, told.shared_home)
    lab = Lab.up(told.count, options, hide=told.hide, share=told.share, daemon=True)
    value = {
        "pid": lab.pid,
        "started": started(lab.pid),
        "warden": lab.warden,
        "options": asdict(options),
    }
    record(told.name).write_text(json.dumps(value))
    more = "" if told.name == "default" else " --name %s" % told.name
    first, last = next(iter(lab.hosts)), list(lab.hosts)[-1]
    print("lab: %d hosts, %s to %s, are up" % (told.count, first, last))
    print("hosts file (in the lab): %s" % (layout.STATE / "hosts"))
    print("as the launcher:  scripts/lab%s shell ssh h1 hostname" % more)
    # Tasks start in the current directory, and hosts need not have the one in which this is typed.
    launch = "distrun launch -H %s/hosts -n 4 -s 0 hostname" % layout.STATE
    print("                  scripts/lab%s shell env -C / %s" % (more, launch))
    print("break and repair: scripts/lab%s fault down h1   (scripts/lab help)" % more)
    print("end:              scripts/lab%s down      or kill process %d" % (more, lab.pid))


def run(told: argparse.Namespace) -> int:
    """Do what was asked; return the exit code."""
    if told.command == "help":
        print(HELP, end="")
    elif told.command == "up":
        up(told)
    elif told.command == "down":
        if lab := find(told.name):
            lab.down()
        record(told.name).unlink(missing_ok=True)
    elif told.command == "shell":
        lab = found(told.name)
        return enter(lab.pid, told.words or ["bash"], lab.launcher_env(os.environ), os.getcwd())
    elif told.command == "exec":
        host = found(told.name)[told.host]
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        env["TERM"] = os.environ.get("TERM", "dumb")
        return enter(host.pid, told.words or ["bash"], env, "/root")
    else:
        host = found(told.name)[told.host]
        text = getattr(host, told.verb)(*numbers(told.words))
        if text:
            print(text, end="")
    return 0


def main() -> int:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(prog="scripts/lab", usage="\n" + HELP)
    parser.add_argument("--name", default="default", help="which lab, where there are several")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("up")
    make.add_argument("count", nargs="?", type=int, default=4)
    make.add_argument("--share", action="append", type=Path, default=[])
    make.add_argument("--hide", action="append", type=Path, default=[])
    make.add_argument("--sshd", action="append", default=[], metavar="OPTION=VALUE")
    make.add_argument("--noisy", action="store_true")
    make.add_argument("--no-python", action="store_true")
    make.add_argument("--mesh", action="store_true")
    make.add_argument("--shared-home", action="store_true")
    commands.add_parser("down")
    commands.add_parser("help")
    shell = commands.add_parser("shell")
    inner = commands.add_parser("exec")
    fault = commands.add_parser("fault")
    fault.add_argument("verb", choices=VERBS)
    for command in (inner, fault):
        command.add_argument("host")
    for command in (shell, inner, fault):
        command.add_argument("words", nargs=argparse.REMAINDER)
    told = parser.parse_args()
    try:
        return run(told)
    except (LabError, TypeError) as error:
        print("lab: %s" % error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
