"""The first process of a lab: builds the launcher's place and the network, boots the hosts, then only waits.

It runs inside the lab's outer namespaces as their pid 1: when it ends, for whatever reason, the kernel ends every
process in them, and with the last one go mounts, network namespaces, bridges and cables. It ends when its standard
input does, if that is a pipe: whoever made the lab holds the other end.

It says on its standard output one line of JSON: {"pid": its pid as the machine sees it} or {"error": text}.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

from hostlab import cgroups, layout

HERE = Path(__file__).resolve().parent


def run(*argv: str, text: str = "") -> None:
    """Run a program; raise RuntimeError with its words if it fails."""
    done = subprocess.run(argv, input=text, text=True, capture_output=True, check=False, timeout=60)
    if done.returncode:
        raise RuntimeError("%s: %s" % (" ".join(argv), done.stderr.strip() or "exit code %d" % done.returncode))


def boot_argv(host: str) -> list[str]:
    """Return the command that boots a host, to be run in the lab's outer namespaces; it returns at once.

    The pid namespace is kept, as a mount, until the host boots again: the number of one that has ended is given to the
    next, maybe another lab's, and whoever goes by it would take that one's processes for this host's.
    """
    mine = layout.STATE / "hosts.d" / host
    start = (
        "umount {mine}/pid 2>/dev/null; : >{mine}/log; [ -e {mine}/pid ] || : >{mine}/pid;"
        " exec setsid -f nsenter --net=/run/netns/{host}"
        " unshare --mount --uts --ipc --pid={mine}/pid --fork --kill-child=KILL --propagation private"
        " sh {script} {lab} {host} </dev/null >>{mine}/log 2>&1"
    )
    return ["sh", "-c", start.format(mine=mine, host=host, script=shlex.quote(str(HERE / "host.sh")), lab=layout.STATE)]


def make_keys(hosts: list[str]) -> dict[str, str]:
    """Make the launcher's key and one for every host; return the public keys by host."""
    paths = {host: layout.STATE / "hosts.d" / host / "key" for host in hosts}
    waiting = [layout.STATE / "home" / ".ssh" / "id_ed25519", *paths.values()]
    while waiting:
        some, waiting = waiting[:8], waiting[8:]
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f"]
        children = [subprocess.Popen([*argv, str(path)], stdout=subprocess.DEVNULL) for path in some]
        if any(child.wait(30) for child in children):
            raise RuntimeError("ssh-keygen failed")
    return {host: path.with_name("key.pub").read_text() for host, path in paths.items()}


def private_run() -> None:
    """Give the lab a /run of its own, with folders for its state, for `ip netns` and for sshd."""
    run("mount", "-t", "tmpfs", "-o", "mode=755", "lab", "/run")
    for folder in ("netns", "lock", "distrun-lab/root", "distrun-lab/etc", "distrun-lab/hosts.d"):
        (Path("/run") / folder).mkdir(parents=True)


def launcher_place(hosts: list[str]) -> None:
    """Make this mount namespace the launcher's: name, home, names of hosts, its ssh files."""
    etc, home = layout.STATE / "etc", layout.STATE / "home"
    (home / ".ssh").mkdir(mode=0o700, parents=True)
    home.chmod(0o700)
    keys = make_keys(hosts)
    (home / ".ssh" / "known_hosts").write_text(layout.known_hosts(keys))
    (home / ".ssh" / "config").touch(mode=0o600)
    (layout.STATE / "hosts").write_text("".join(host + "\n" for host in hosts))
    (etc / "hosts").write_text(layout.etc_hosts(hosts))
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    machine = Path("/etc")
    (etc / "passwd").write_text(layout.launcher_passwd((machine / "passwd").read_text(), home))
    (etc / "host-passwd").write_text(layout.host_passwd((machine / "passwd").read_text()))
    (etc / "host-group").write_text(layout.host_group((machine / "group").read_text()))
    (etc / "host-shadow").write_text(layout.host_shadow((machine / "shadow").read_text()))
    (etc / "host-shadow").chmod(0o600)
    for name in ("hosts", "nsswitch.conf", "passwd"):
        if (machine / name).exists():
            run("mount", "--bind", str(etc / name), str(machine / name))
    run("hostname", layout.LAUNCHER)


def build(count: int, group: str, options: layout.Options, hide: list[Path], share: list[Path]) -> None:
    """Build the lab and start to boot its hosts."""
    hosts = [layout.name(number) for number in range(1, count + 1)]
    private_run()
    config = {"group": group, "hide": list(map(str, hide)), "share": list(map(str, share))}
    (layout.STATE / "config.json").write_text(json.dumps(config))
    for host in hosts:
        folder = layout.STATE / "hosts.d" / host
        folder.mkdir()
        (folder / "boot").write_text(layout.boot_file(options, hide, share))
        (folder / "sshd_config").write_text(layout.sshd_config(options))
    launcher_place(hosts)
    if not cgroups.unified(cgroups.MACHINE):
        cgroups.mount(layout.STATE / "cgroup")
    ipv6 = Path("/proc/net/if_inet6").exists()
    run("ip", "-batch", "-", text=layout.links(hosts, ipv6))
    for host in hosts:
        run("ip", "-n", host, "-batch", "-", text=layout.host_links(host, hosts, ipv6))
        run(*boot_argv(host))


def wait_for_the_end() -> None:
    """Reap orphans until standard input ends (if it is a pipe) or a signal comes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    waker, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    watched = [waker]
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        watched.append(0)
    while True:
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        ready, _, _ = select.select(watched, [], [])
        if 0 in ready and not os.read(0, 4096):
            return
        if waker in ready:
            os.read(waker, 4096)


def main() -> None:
    """Build, report, wait."""
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--group", required=True, help="name of the lab's control groups")
    parser.add_argument("--options", default="{}")
    parser.add_argument("--hide", action="append", type=Path, default=[])
    parser.add_argument("--share", action="append", type=Path, default=[])
    told = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    try:
        build(told.count, told.group, layout.Options(**json.loads(told.options)), told.hide, told.share)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(json.dumps({"error": str(error)}), file=out, flush=True)
        sys.exit(1)
    print(json.dumps({"pid": int(os.environ["DISTRUN_LAB_PID"])}), file=out, flush=True)
    out.close()
    wait_for_the_end()


if __name__ == "__main__":
    main()
