"""Checks of hosts: what their agents told goes in, a row for each finding comes out. No side effects.

The facts are those of `distrun_runtime.agent.probe`. Each check is a function of one host's; `between` compares hosts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distrun.formats import grouped, join, quiet, quote, size
from distrun.hosts.ranges import fold
from distrun_runtime.contract import gpus as contract
from distrun_runtime.contract.plan import SERVER_MODULES, Host
from distrun_runtime.coordinator.failures import Problem

OK = "ok"
WARN = "warn"
BAD = "bad"

HERE = "this machine"
ON = "{on}"

GIB = 1 << 30
MIB = 1 << 20
CLOCK_S = 2.0
"""Seconds that a host's clock may differ from ours."""
AGENT_PYTHON = (3, 8)
SERVER_PYTHON = (3, 10)
NOFILE = 4096
SHM = GIB
FREE = GIB
"""Bytes below which a folder's free space is remarked."""
FREE_LEAST = 64 * MIB
OTHER_PYTHON = "python=PATH in the hosts file, or --python PATH"

STEPS = (
    ("name", ("dns",)),
    ("connection", ("refused", "timeout", "unreachable", "busy")),
    ("host key", ("hostkey",)),
    ("login", ("auth", "password")),
)
"""How a host is reached, in this order, and the kinds of problems of each step; every other kind is the agent's."""


@dataclass(frozen=True)
class Ways:
    """How a user runs a command on hosts."""

    hosts: Mapping[str, Host] = field(default_factory=dict)
    """By name; one that is missing is reached by `ssh NAME`."""
    every: str = ""
    """What runs a command on all of `hosts`: `distrun exec -H hosts`."""

    def typed(self, names: Sequence[str], script: str, asks: bool = False) -> str:
        """Return what to type to run shell text on these hosts. `asks`: it may ask for a password, as sudo does."""
        hosts = [self.hosts.get(name) or Host(name, login=f"ssh {quote(name)}") for name in names]
        if len(hosts) == 1 or not all(host.login for host in hosts):
            return hosts[0].typed(script, asks)
        is_plain = all(host.login == f"ssh {quote(host.name)}" for host in hosts)
        if not asks and self.every and set(names) == set(self.hosts):
            return f"{self.every} {quote(script)}"
        if not asks and is_plain:
            return f"distrun exec --hosts {quote(fold(names))} {quote(script)}"
        if is_plain:  # `distrun exec` gives its command no terminal to ask on
            return f"for host in {' '.join(map(quote, names))}; do ssh -t $host {quote(script)}; done"
        return "; ".join(host.typed(script, asks) for host in hosts)


@dataclass(frozen=True)
class CheckRow:
    """What was found on one host in one respect."""

    host: str
    """Its name; `HERE` for the machine where the command was typed, empty where all hosts together are meant."""
    check: str
    mark: str
    """OK, WARN or BAD."""
    text: str
    fix: str = ""
    """What to do about it, a line each; never empty for BAD. ON stands for what runs `script` on the host."""
    script: str = ""
    """Shell text for the host."""

    def fix_text(self, ways: Ways, hosts: Sequence[str] = ()) -> str:
        """Return what to do, with what is to be typed, for several hosts at once if it says the same of them."""
        if ON not in self.fix:
            return self.fix
        asks = "sudo " in self.script or self.script.startswith("bash -l")
        return self.fix.replace(ON, ways.typed(list(hosts) or [self.host], self.script, asks))


def folded(rows: Iterable[CheckRow]) -> list[tuple[CheckRow, list[str]]]:
    """Return rows that say the same of several hosts once, with these hosts, in the order of the checks."""
    rows = list(rows)
    order = {check: index for index, check in reversed(list(enumerate(row.check for row in rows)))}
    groups = grouped(((row.check, row.mark, row.text, row.fix, row.script), row) for row in rows).values()
    return sorted(((each[0], [row.host for row in each]) for each in groups), key=lambda group: order[group[0].check])


@dataclass(frozen=True)
class DoctorRequest:
    """What the hosts are to be used for, and where to look."""

    dst: str = ""
    """--sync-dst-dir."""
    needs_servers: bool = True
    count: int = 1
    """How many hosts."""
    activate: str = ""
    """Shell text of --activate."""
    is_activated_later: bool = False
    """What is activated may come with the files that are copied."""
    doctor: str = "distrun doctor"
    """What was typed to examine these hosts."""
    cwd: str = ""
    interface: str = ""
    subnet: str = ""
    port_range: str = ""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Interpreters of servers, by host; python3 for the others."""
    workdirs: Mapping[str, str] = field(default_factory=dict)
    """`workdir=` of the hosts file, by host: tasks start there, wherever files are copied."""
    gpus: Mapping[str, str] = field(default_factory=dict)
    """`gpus=` of the hosts file, by host."""
    where: Mapping[str, str] = field(default_factory=dict)
    """The line of each host there, `hosts:3`."""


@dataclass(frozen=True)
class ExaminedHost:
    """One host, and all that is known of it."""

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What its agent's `probe` told; empty if it told nothing."""
    problem: Problem | None = None
    is_met: bool = False
    """There was an agent, whatever came then."""
    noise: str = ""
    offset_s: float | None = None
    """How much its clock is ahead of ours."""


def check(host: ExaminedHost, request: DoctorRequest) -> list[CheckRow]:
    """Return all rows of one host."""
    rows = list(reach(host))
    if host.noise:
        rows.append(noise(host, request))
    if host.facts:
        for each in (activation, python, rsync, folders, clock, limits, shm, logout, network, gpus, loose):
            rows += each(host, request)
    return rows


def reach(host: ExaminedHost) -> Iterator[CheckRow]:
    """Yield how far the way to the host goes: name, connection, host key, login, agent."""
    problem = host.problem
    if problem is None or host.is_met:
        yield CheckRow(host.name, "reach", OK, "name, connection, host key, login")
        if problem is not None:
            yield _failed(host.name, "agent", problem)
        return
    failed = next((step for step, kinds in STEPS if problem.kind in kinds), "agent")
    passed = [step for step, _ in STEPS][: [*(step for step, _ in STEPS), "agent"].index(failed)]
    if passed:
        yield CheckRow(host.name, "reach", OK, ", ".join(passed))
    yield _failed(host.name, failed, problem)


def noise(host: ExaminedHost, request: DoctorRequest) -> CheckRow:
    """Return the row of a login shell that prints: rsync cannot work over it."""
    fix = quiet(host.facts.get("shell", ""))
    return CheckRow(host.name, "shell", BAD if request.dst else WARN, host.noise, fix)


def activation(host: ExaminedHost, request: DoctorRequest) -> Iterator[CheckRow]:
    """Yield whether --activate works."""
    if not request.activate:
        return
    error = host.facts["activation"]["error"]
    if not error:
        yield CheckRow(host.name, "activation", OK, "works")
    elif request.dst and request.is_activated_later:
        text = f"{error}; it may come with the files that --sync-dst-dir copies"
        yield CheckRow(host.name, "activation", WARN, text)
    else:
        fix = f"try the text of --activate in the shell that this starts: {ON}"
        yield CheckRow(host.name, "activation", BAD, error, fix, "bash -l")


def python(host: ExaminedHost, request: DoctorRequest) -> Iterator[CheckRow]:
    """Yield the interpreters: the agent's, and that of servers with the modules they need."""
    agent = host.facts["agent_python"]
    text = f"{agent['version']} {agent['path']}"
    if version(agent["version"]) < AGENT_PYTHON:
        yield CheckRow(host.name, "python", BAD, text + ": older than 3.8", OTHER_PYTHON)
    else:
        yield CheckRow(host.name, "python", OK, text)
    if request.needs_servers and not host.facts["activation"]["error"]:
        row = _server_python(host, request)
        more = f"\nif the command does not use the store: {request.doctor} --no-servers, then launch with -s 0"
        yield replace(row, fix=row.fix + more) if row.mark == BAD else row


def _server_python(host: ExaminedHost, request: DoctorRequest) -> CheckRow:
    found, check = host.facts["python"], "server python"
    if found.get("error"):
        return CheckRow(host.name, check, BAD, str(found["error"]), OTHER_PYTHON)
    text = f"{found['version']} {found['path']}"
    if version(found["version"]) < SERVER_PYTHON:
        fix = f"{OTHER_PYTHON}, of one that is 3.10 or newer"
        return CheckRow(host.name, check, BAD, text + ": servers need 3.10 or newer", fix)
    missing = [name for name in SERVER_MODULES if not found.get(name)]
    if not missing:
        return CheckRow(host.name, check, OK, f"{text}, numpy {found['numpy']}, zmq {found['zmq']}")
    lacks = f"{text}: no {', no '.join(missing)}"
    other = found["environment"]
    if other:
        own = f"{other['version']} {other['path']}, numpy {other['numpy']}, zmq {other['zmq']}"
        return CheckRow(host.name, check, OK, f"{lacks}; servers use {own}")
    why = "; ".join(str(found.get(name + "_error") or "no " + name) for name in missing)
    script = needed_for_venv(host)
    if script:
        return CheckRow(host.name, check, BAD, f"{text}: {why}", f"{ON}\nthen: {request.doctor} --fix", script)
    fixes = [f"for servers: {request.doctor} --fix"]
    if found["install"]:
        then = ", then --activate venv:~/venv" if "~/venv" in found["install"] else ""
        fixes.append(f"for servers and workers: {ON}{then}")
    return CheckRow(host.name, check, BAD, f"{text}: {why}", "\n".join(fixes), found["install"])


def needed_for_venv(host: ExaminedHost) -> str:
    """Return shell text that installs what virtual environments need on Debian and Ubuntu; empty if it is there."""
    found = host.facts["python"]
    if not {"venv", "ensurepip"} & set(found["lacks"]) or not host.facts["debian"]:
        return ""
    return apt(host, "python{}.{}-venv".format(*version(found["version"])))


def rsync(host: ExaminedHost, request: DoctorRequest) -> Iterator[CheckRow]:
    """Yield whether files can be copied to it."""
    found = host.facts["rsync"]
    if found["version"]:
        yield CheckRow(host.name, "rsync", OK, " ".join(str(found["version"]).split()[:3]))
    else:
        script = apt(host, "rsync")
        yield CheckRow(host.name, "rsync", BAD if request.dst else WARN, f"not there: {found['error']}", ON, script)


def folders(host: ExaminedHost, request: DoctorRequest) -> Iterator[CheckRow]:
    """Yield the folder in which tasks will start, and the one for temporary files."""
    found = host.facts["folders"]
    if request.dst:
        place = found["dst"]
        if place["fault"]:
            yield CheckRow(host.name, "sync folder", BAD, place["fault"], place["fix"])
        elif place["is_folder"] and place["writable"]:
            how = "there" if place["exists"] else "can be made"
            yield _space(host.name, "sync folder", place, f"{place['path']} {how}")
        else:
            yield _unusable(host, "sync folder", place, "cannot be written", "give another --sync-dst-dir; or ")
    own = request.workdirs.get(host.name, "")
    if "cwd" in found and (own or not request.dst):
        place = found["cwd"]
        if place["exists"] and place["is_folder"]:
            read_only = "" if place["writable"] else ", not writable"
            yield _space(host.name, "folder", place, place["path"] + read_only)
        else:
            other = "" if own else "--sync-dst-dir DIR copies the current directory there; or "
            yield _unusable(host, "folder", place, "does not exist", other)
    tmp = host.facts["tmp"]
    if not tmp["writable"]:
        script = as_root(host, f"chmod 1777 {quote(tmp['path'])}")
        yield CheckRow(host.name, "temporary files", BAD, f"{tmp['path']} cannot be written", ON, script)
    else:
        yield _space(host.name, "temporary files", tmp, tmp["path"])


def _unusable(host: ExaminedHost, check: str, place: Mapping[str, Any], what: str, other: str) -> CheckRow:
    """Return the row of a folder that is missing or not this user's to write to."""
    path = quote(place["path"])
    if not place["is_folder"]:
        text = f"{place['path']}: {place['near']} is not a folder"
        fix = f"{other}see what it is: {ON}"
        return CheckRow(host.name, check, BAD, text, fix, f"ls -l {quote(place['near'])}")
    script = f"mkdir -p {path}"
    if not place["writable"]:
        script = as_root(host, script, f"chown $(id -u) {path}")
    return CheckRow(host.name, check, BAD, f"{place['path']} {what}", other + ON, script)


def clock(host: ExaminedHost, request: DoctorRequest) -> Iterator[CheckRow]:
    """Yield how much its clock differs: exits are ordered by the clocks of hosts."""
    offset = host.offset_s
    if offset is None:
        return
    if abs(offset) < CLOCK_S:
        yield CheckRow(host.name, "clock", OK, f"less than {CLOCK_S:g} s off")
    else:
        text = f"{abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'} of this machine"
        sudo = sudo_of(host)
        script = f"{sudo}chronyc makestep || {sudo}timedatectl set-ntp true"
        yield CheckRow(host.name, "clock", BAD, text, ON, script)


def limits(host: ExaminedHost, request: DoctorRequest) -> Iterator[CheckRow]:
    """Yield open files and locked memory."""
    found = host.facts["limits"]
    files, memory = found["nofile"][0], found["memlock"][0]
    shown, locked = ("unlimited" if files is None else files), ("unlimited" if memory is None else size(memory))
    text = f"{shown} open files, {locked} locked memory"
    if files is not None and files < NOFILE:
        # `*` is every user but root.
        line = f"echo '{'root' if host.facts['uid'] == 0 else '*'} - nofile 65536'"
        script = f"{line} | {sudo_of(host)}tee /etc/security/limits.d/90-nofile.conf"
        yield CheckRow(host.name, "limits", WARN, text, f"{ON} (at the next login)", script)
    else:
        yield CheckRow(host.name, "limits", OK, text)


def shm(host: ExaminedHost, request: DoctorRequest) -> Iterator[CheckRow]:
    """Yield the shared memory: data loaders and collective libraries use it."""
    total = host.facts["shm"]["size"]
    if total is None:
        script = as_root(host, "mkdir -p /dev/shm", "mount -t tmpfs shm /dev/shm")
        yield CheckRow(host.name, "shared memory", WARN, "no /dev/shm", ON, script)
    elif total < SHM:
        script = as_root(host, "mount -o remount,size=50% /dev/shm")
        fix = f"{ON} (in a container: docker run --shm-size=8g)"
        yield CheckRow(host.name, "shared memory", WARN, f"/dev/shm has {size(total)} only", fix, script)
    else:
        yield CheckRow(host.name, "shared memory", OK, f"/dev/shm has {size(total)}")


def logout(host: ExaminedHost, request: DoctorRequest) -> Iterator[CheckRow]:
    """Yield whether the system ends what a login leaves behind: a job outlives no connection then."""
    found = host.facts["logind"]
    if found["kill_user_processes"] and not found["linger"]:
        script = as_root(host, f"loginctl enable-linger {quote(host.facts['user'])}")
        yield CheckRow(host.name, "logout", WARN, "KillUserProcesses=yes: what runs ends with the login", ON, script)
    else:
        yield CheckRow(host.name, "logout", OK, "what runs may stay" + (" (linger)" if found["linger"] else ""))


def network(host: ExaminedHost, request: DoctorRequest) -> Iterator[CheckRow]:
    """Yield the address that peers would use for data."""
    found = host.facts["network"]
    if found["error"]:
        fix = "--interface NAME or --subnet CIDR that all hosts have"
        yield CheckRow(host.name, "address", BAD, found["error"], fix)
        return
    names = [name for name, ip, _ in found["interfaces"] if ip == found["address"]]
    every = ", ".join(dict.fromkeys(name for name, _, _ in found["interfaces"]))
    text = f"{found['address']} ({(f'on {names[0]} of {every}' if names else f'on none of {every}')})"
    if request.count > 1 and (found["address"].startswith("127.") or found["address"] == "::1"):
        fix = "--interface NAME or --subnet CIDR of the network that the hosts share"
        yield CheckRow(host.name, "address", BAD, text + ": no other host can use it", fix)
    elif not names:
        yield CheckRow(host.name, "address", BAD, text, "addr= in the hosts file must be an address of the host itself")
    else:
        yield CheckRow(host.name, "address", OK, text)


def gpus(host: ExaminedHost, request: DoctorRequest) -> Iterator[CheckRow]:
    """Yield what the driver tells, if there is one, and whether that is what the hosts file says."""
    told = host.facts["gpus"]
    found, said = contract.found_of(told), request.gpus.get(host.name, "")
    try:
        contract.view(said, told["visible"], found, host.name, request.where.get(host.name, ""))
    except contract.GpusUnfit as err:
        yield CheckRow(host.name, "GPUs", BAD, str(err), err.fix)
        return
    if found.error:
        yield CheckRow(host.name, "GPUs", WARN, found.error, ON, "nvidia-smi")
    elif found.gpus:
        visible = "" if told["visible"] is None else f"; {contract.VISIBLE}={told['visible']}"
        yield CheckRow(host.name, "GPUs", OK, f"{found.kinds}; driver {found.driver}{visible}")
    elif said and not found.how:
        text = f"gpus={said} cannot be checked: {contract.NO_DRIVER}"
        yield CheckRow(host.name, "GPUs", WARN, text, ON, "nvidia-smi -L")


def loose(host: ExaminedHost, request: DoctorRequest) -> Iterator[CheckRow]:
    """Yield permissions that make sshd refuse keys (StrictModes)."""
    if host.facts["loose"]:
        text = f"others may write {', '.join(host.facts['loose'])}: sshd then refuses keys"
        yield CheckRow(host.name, "permissions", WARN, text, ON, join(["chmod", "go-w", *host.facts["loose"]]))


def sudo_of(host: ExaminedHost) -> str:
    """Return what a command for root begins with: nothing where the user is root, who often has no sudo."""
    return "" if host.facts["uid"] == 0 else "sudo "


def as_root(host: ExaminedHost, *commands: str) -> str:
    """Return shell text that runs these commands, one after the other, as root."""
    return " && ".join(sudo_of(host) + command for command in commands)


def apt(host: ExaminedHost, package: str) -> str:
    """Return shell text that installs a package of Debian or Ubuntu, also where no list of packages is there yet."""
    return as_root(host, "apt-get update", f"apt-get install -y {package}")


def version(text: str) -> tuple[int, int]:
    """Return major and minor number of a version."""
    major, minor = (*map(int, re.findall("[0-9]+", text)), 0, 0)[:2]
    return major, minor


def _space(host: str, check: str, place: Mapping[str, Any], text: str) -> CheckRow:
    free = place["free"]
    if free is None:
        return CheckRow(host, check, OK, text)
    text = f"{text}, {size(free)} free"
    if free >= FREE:
        return CheckRow(host, check, OK, text)
    fix = f"{ON} shows what fills it"
    return CheckRow(host, check, BAD if free < FREE_LEAST else WARN, text, fix, f"df -h {quote(place['near'])}")


def _failed(host: str, check: str, problem: Problem) -> CheckRow:
    if problem.fix:
        return CheckRow(host, check, BAD, problem.text, problem.fix)
    return CheckRow(host, check, BAD, problem.text, f"does this print ok? {ON}", "echo ok")


def between(examined: Sequence[ExaminedHost], request: DoctorRequest) -> list[CheckRow]:
    """Return what is wrong only between hosts: different versions, one address twice."""
    known = [each for each in examined if each.facts]
    rows = []
    asked = ["version", "numpy", "zmq"] if request.needs_servers else []
    for name in asked:
        found = grouped((str(told), each.name) for each in known if (told := each.facts["python"].get(name)))
        if len(found) > 1:
            what = "python" if name == "version" else name
            text = f"{what} differs: {'; '.join((f'{v} on {fold(h)}' for v, h in found.items()))}"
            rows.append(CheckRow("", "versions", WARN, text, "--python PATH, or --activate, of the same on all hosts"))
    drivers = grouped((told, each.name) for each in known if (told := contract.found_of(each.facts["gpus"]).driver))
    if len(drivers) > 1:
        text = f"GPU drivers differ: {'; '.join((f'{v} on {fold(h)}' for v, h in drivers.items()))}"
        rows.append(CheckRow("", "versions", WARN, text))
    for address, names in grouped((str(each.facts["network"]["address"]), each.name) for each in known).items():
        if address and len(names) > 1:
            text = f"{address} is the address of {fold(names)}: are they one machine?"
            rows.append(CheckRow("", "address", WARN, text, "name each machine once in the hosts file"))
    return rows
