"""What a lab looks like: names, addresses, files of a host. Pure: text and values only."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STATE = Path("/run/distrun-lab")
"""Where a lab keeps its files: a path inside the lab, the same in each."""

LAUNCHER = "launcher"
PASSWORD = "open-sesame"
"""The password of the user `bob`, who has no key."""
PASSWORD_HASH = "$6$labhosts$cVNxh4jl438EU1V0VXr6FnxIJWFWdizKFEGusbzGANMZitO5fumIGoivrwx17GJB5VuhwQolmi/3uCTLx/tPe0"
USERS = {"alice": 5001, "bob": 5002}
"""Users without privileges on every host, with their numbers: alice logs in by the launcher's key, bob by password."""

SSHD = {
    "Port": "22",
    "HostKey": "/etc/ssh/lab_host_key",
    "AuthorizedKeysFile": ".ssh/authorized_keys",
    "PidFile": "none",
    "UsePAM": "no",
    "PermitRootLogin": "prohibit-password",
    "PasswordAuthentication": "no",
    "KbdInteractiveAuthentication": "no",
    "UseDNS": "no",
    "X11Forwarding": "no",
    "PrintMotd": "no",
    "PrintLastLog": "no",
    "AcceptEnv": "LANG LC_*",
    "Subsystem": "sftp internal-sftp",
    "LogLevel": "VERBOSE",
}
"""A host's sshd: as Debian's, but without PAM and passwords, and with a log. Its limits are the stock ones."""

DISKS = {"/tmp": 1024, "/var/tmp": 256, "/run": 64, "/dev/shm": 1024, "/home": 256, "/root": 1024}
"""File systems that every host has for itself, with their size in MiB."""


@dataclass(frozen=True)
class Options:
    """How one host is set up. `sshd` adds to or replaces lines of its sshd's configuration."""

    sshd: Mapping[str, str] = field(default_factory=dict)
    noisy: bool = False
    """Whether its shells print something when they start, as many a .bashrc does."""
    python: bool = True
    """Whether there is any python on it."""
    mesh: bool = False
    """Whether root has the launcher's key on it, so that hosts reach each other."""
    shared_home: bool = False
    """Whether root's home is the launcher's, as where a file server has the homes. Then hosts reach each other, too."""

    @property
    def port(self) -> int:
        """The port of its sshd."""
        return int(self.sshd.get("Port", SSHD["Port"]))


def name(index: int) -> str:
    """Return the name of host `index`, from 1."""
    return "h%d" % index


def index(host: str) -> int:
    """Return the number of a host's name; 0 is the launcher's."""
    return 0 if host == LAUNCHER else int(host[1:])


def address(host: str, interface: int = 0) -> str:
    """Return the IPv4 address of a host's `eth0`, or `eth1`."""
    number = index(host)
    return "10.%d.%d.%d" % (77 + interface, number // 250, number % 250 + (2 if number else 1))


def address6(host: str, interface: int = 0) -> str:
    """Return the IPv6 address of a host's `eth0`, or `eth1`."""
    return "fd%d::%x" % (77 + interface, index(host) + (2 if index(host) else 1))


def mac(host: str, interface: int) -> str:
    """Return the hardware address of an interface."""
    return "02:4c:ab:%02x:%02x:%02x" % (interface, index(host) >> 8, index(host) & 255)


def veth(host: str, interface: int) -> str:
    """Return the name of the launcher's end of a host's cable."""
    return "%s%d" % ("vw"[interface], index(host))


def etc_hosts(hosts: Sequence[str]) -> str:
    """Return /etc/hosts of everybody: plain names; `hN-eth1` is the second interface, `hN-v6` the IPv6 address."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    for host in (LAUNCHER, *hosts):
        lines += ["%s %s" % (address(host), host), "%s %s-eth1" % (address(host, 1), host)]
        lines.append("%s %s-v6" % (address6(host), host))
    return "\n".join(lines) + "\n"


def known_hosts(keys: Mapping[str, str]) -> str:
    """Return a known_hosts with the public key of every host under all its names."""
    lines = []
    for host, key in keys.items():
        names = [host, host + "-eth1", host + "-v6", address(host), address(host, 1), address6(host)]
        lines.append("%s %s" % (",".join(names), " ".join(key.split()[:2])))
    return "\n".join(lines) + "\n"


def links(hosts: Sequence[str], ipv6: bool) -> str:
    """Return the lines for `ip -batch` that make both bridges and every host's cables, in the launcher's place."""
    lines = ["link set lo up"]
    for number, bridge in enumerate(("lab0", "lab1")):
        lines.append("link add %s address %s type bridge" % (bridge, mac(LAUNCHER, number)))
        lines += ["addr add %s/16 dev %s" % (address(LAUNCHER, number), bridge)]
        if ipv6:
            lines.append("addr add %s/64 dev %s nodad" % (address6(LAUNCHER, number), bridge))
        lines.append("link set %s up" % bridge)
    for host in hosts:
        lines.append("netns add %s" % host)
        for number, bridge in enumerate(("lab0", "lab1")):
            lines.append(
                "link add %s type veth peer name eth%d address %s netns %s"
                % (veth(host, number), number, mac(host, number), host)
            )
            lines.append("link set %s master %s up" % (veth(host, number), bridge))
        lines += neighbours([host], bridge="lab")
    return "\n".join(lines) + "\n"


def host_links(host: str, hosts: Sequence[str], ipv6: bool) -> str:
    """Return the lines for `ip -batch` inside one host."""
    lines = ["link set lo up"]
    for number in (0, 1):
        lines.append("addr add %s/16 dev eth%d" % (address(host, number), number))
        if ipv6:
            lines.append("addr add %s/64 dev eth%d nodad" % (address6(host, number), number))
        lines.append("link set eth%d up" % number)
    lines.append("route add default via %s" % address(LAUNCHER))
    lines += neighbours([LAUNCHER, *(peer for peer in hosts if peer != host)], bridge="eth")
    return "\n".join(lines) + "\n"


def neighbours(peers: Iterable[str], bridge: str) -> list[str]:
    """Return lines that make hardware addresses known for good.

    The kernel's table of them is one for all namespaces and overflows at about 32 hosts that all talk to each other;
    permanent entries are not counted, and nobody has to raise a limit of the whole machine.
    """
    return [
        "neigh replace %s lladdr %s dev %s%d nud permanent" % (address(peer, number), mac(peer, number), bridge, number)
        for peer in peers
        for number in (0, 1)
    ]


def sshd_config(options: Options) -> str:
    """Return the configuration of a host's sshd."""
    return "".join("%s %s\n" % line for line in {**SSHD, **options.sshd}.items())


def boot_file(options: Options, hide: Sequence[Path], share: Sequence[Path]) -> str:
    """Return what `host.sh` reads: shell variables."""
    values = {
        "disks": "\n".join("%s %d" % (path, size) for path, size in DISKS.items()),
        "hide": "\n".join(map(str, hide)),
        "share": "\n".join(map(str, share)),
        "noisy": "yes" if options.noisy else "",
        "python": "yes" if options.python else "",
        "mesh": "yes" if options.mesh else "",
        "shared_home": "yes" if options.shared_home else "",
        **{user: str(number) for user, number in USERS.items()},
    }
    return "".join("%s=%s\n" % (key, shlex.quote(value)) for key, value in values.items())


def host_passwd(passwd: str) -> str:
    """Return a host's /etc/passwd, given this machine's: root lives in /root with bash, and there are our users."""
    kept = [line for line in passwd.splitlines() if line.split(":")[0] not in ("root", *USERS)]
    ours = ["root:x:0:0:root:/root:/bin/bash"]
    ours += ["%s:x:%d:%d::/home/%s:/bin/bash" % (user, number, number, user) for user, number in USERS.items()]
    return "\n".join(ours + kept) + "\n"


def host_shadow(shadow: str) -> str:
    """Return a host's /etc/shadow: nobody has this machine's password; only bob has one."""
    kept = [line.split(":")[0] for line in shadow.splitlines()]
    lines = ["%s:*:20000:0:99999:7:::" % user for user in kept if user not in USERS]
    lines += ["%s:%s:20000:0:99999:7:::" % (user, PASSWORD_HASH if user == "bob" else "*") for user in USERS]
    return "\n".join(lines) + "\n"


def host_group(group: str) -> str:
    """Return a host's /etc/group."""
    kept = [line for line in group.splitlines() if line.split(":")[0] not in USERS]
    return "\n".join(kept + ["%s:x:%d:" % item for item in USERS.items()]) + "\n"


def launcher_passwd(passwd: str, home: Path) -> str:
    """Return the launcher's /etc/passwd: root's home is the lab's, so that ~/.ssh is nobody else's."""
    lines = []
    for line in passwd.splitlines():
        fields = line.split(":")
        if fields[0] == "root" and len(fields) == 7:
            fields[5] = str(home)
        lines.append(":".join(fields))
    return "\n".join(lines) + "\n"
