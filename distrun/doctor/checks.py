"""Judges what a host's agent told: facts in, rows out. Pure.

The facts are those of `distrun_runtime.agent.probe`; each check is a function of one host's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distrun.doctor.row import BAD, OK, ON, WARN, Row
from distrun.shell import join, quote
from distrun_runtime.contract.plan import SERVER_MODULES
from distrun_runtime.coordinator.outcome import Problem

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
    ("connection", ("refused", "timeout", "unreachable")),
    ("host key", ("hostkey",)),
    ("login", ("auth", "password")),
)
"""How a host is reached, in this order, and the kinds of problems of each step; every other kind is the agent's."""


@dataclass(frozen=True)
class Wish:
    """What the hosts are to be used for."""

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


@dataclass(frozen=True)
class Patient:
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
    workdir: str = ""
    """Where its tasks start, if the hosts file says so."""


def check(patient: Patient, wish: Wish) -> list[Row]:
    """Return all rows of one host."""
    rows = list(reach(patient))
    if patient.noise:
        rows.append(noise(patient, wish))
    if patient.facts:
        for each in (activation, python, rsync, folders, clock, limits, shm, logout, network, gpus, loose):
            rows += each(patient, wish)
    return rows


def reach(patient: Patient) -> Iterator[Row]:
    """Yield how far the way to the host goes: name, connection, host key, login, agent."""
    problem = patient.problem
    if problem is None or patient.is_met:
        yield Row(patient.name, "reach", OK, "name, connection, host key, login")
        if problem is not None:
            yield _failed(patient.name, "agent", problem)
        return
    failed = next((step for step, kinds in STEPS if problem.kind in kinds), "agent")
    passed = [step for step, _ in STEPS][: [*(step for step, _ in STEPS), "agent"].index(failed)]
    if passed:
        yield Row(patient.name, "reach", OK, ", ".join(passed))
    yield _failed(patient.name, failed, problem)


def noise(patient: Patient, wish: Wish) -> Row:
    """Return the row of a login shell that prints: rsync cannot work over it."""
    fix = "put this first into ~/.bashrc there: case $- in *i*) ;; *) return ;; esac"
    return Row(patient.name, "shell", BAD if wish.dst else WARN, patient.noise, fix)


def activation(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield whether --activate works."""
    if not wish.activate:
        return
    error = patient.facts["activation"]["error"]
    if not error:
        yield Row(patient.name, "activation", OK, "works")
    elif wish.dst and wish.is_activated_later:
        text = "%s; it may come with the files that --sync-dst-dir copies" % error
        yield Row(patient.name, "activation", WARN, text)
    else:
        fix = "try the text of --activate in the shell that this starts: %s" % ON
        yield Row(patient.name, "activation", BAD, error, fix, "bash -l")


def python(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield the interpreters: the agent's, and that of servers with the modules they need."""
    agent = patient.facts["agent_python"]
    text = "%s %s" % (agent["version"], agent["path"])
    if version(agent["version"]) < AGENT_PYTHON:
        yield Row(patient.name, "python", BAD, text + ": older than 3.8", OTHER_PYTHON)
    else:
        yield Row(patient.name, "python", OK, text)
    if wish.needs_servers and not patient.facts["activation"]["error"]:
        yield _server_python(patient, wish)


def _server_python(patient: Patient, wish: Wish) -> Row:
    found, check = patient.facts["python"], "server python"
    if found.get("error"):
        fix = "%s; --no-servers if there will be none (launch with -s 0)" % OTHER_PYTHON
        return Row(patient.name, check, BAD, str(found["error"]), fix)
    text = "%s %s" % (found["version"], found["path"])
    if version(found["version"]) < SERVER_PYTHON:
        fix = "%s, of one that is 3.10 or newer" % OTHER_PYTHON
        return Row(patient.name, check, BAD, text + ": servers need 3.10 or newer", fix)
    missing = [name for name in SERVER_MODULES if not found.get(name)]
    if not missing:
        return Row(patient.name, check, OK, "%s, numpy %s, zmq %s" % (text, found["numpy"], found["zmq"]))
    lacks = "%s: no %s" % (text, ", no ".join(missing))
    other = found["environment"]
    if other:
        own = "%s %s, numpy %s, zmq %s" % (other["version"], other["path"], other["numpy"], other["zmq"])
        return Row(patient.name, check, OK, "%s; servers use %s" % (lacks, own))
    why = "; ".join(str(found.get(name + "_error") or "no " + name) for name in missing)
    script = needed_for_venv(patient)
    if script:
        return Row(patient.name, check, BAD, "%s: %s" % (text, why), "%s\nthen: %s --fix" % (ON, wish.doctor), script)
    fixes = ["for servers: %s --fix" % wish.doctor]
    if found["install"]:
        then = ", then --activate venv:~/venv" if "~/venv" in found["install"] else ""
        fixes.append("for servers and workers: %s%s" % (ON, then))
    return Row(patient.name, check, BAD, "%s: %s" % (text, why), "\n".join(fixes), found["install"])


def needed_for_venv(patient: Patient) -> str:
    """Return shell text that installs what virtual environments need on Debian and Ubuntu; empty if it is there."""
    found = patient.facts["python"]
    if not {"venv", "ensurepip"} & set(found["lacks"]) or not patient.facts["debian"]:
        return ""
    return apt(patient, "python%d.%d-venv" % version(found["version"]))


def rsync(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield whether files can be copied to it."""
    found = patient.facts["rsync"]
    if found["version"]:
        yield Row(patient.name, "rsync", OK, " ".join(str(found["version"]).split()[:3]))
    else:
        script = apt(patient, "rsync")
        yield Row(patient.name, "rsync", BAD if wish.dst else WARN, "not there: %s" % found["error"], ON, script)


def folders(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield the folder in which tasks will start, and the one for temporary files."""
    found = patient.facts["folders"]
    if wish.dst:
        place = found["dst"]
        if place["fault"]:
            yield Row(patient.name, "sync folder", BAD, place["fault"], place["fix"])
        elif place["is_folder"] and place["writable"]:
            how = "there" if place["exists"] else "can be made"
            yield _space(patient.name, "sync folder", place, "%s %s" % (place["path"], how))
        else:
            yield _unusable(patient, "sync folder", place, "cannot be written", "give another --sync-dst-dir; or ")
    if "cwd" in found and (patient.workdir or not wish.dst):
        place = found["cwd"]
        if place["exists"] and place["is_folder"]:
            read_only = "" if place["writable"] else ", not writable"
            yield _space(patient.name, "folder", place, place["path"] + read_only)
        else:
            other = "" if patient.workdir else "--sync-dst-dir DIR copies the current directory there; or "
            yield _unusable(patient, "folder", place, "does not exist", other)
    tmp = patient.facts["tmp"]
    if not tmp["writable"]:
        script = as_root(patient, "chmod 1777 %s" % quote(tmp["path"]))
        yield Row(patient.name, "temporary files", BAD, "%s cannot be written" % tmp["path"], ON, script)
    else:
        yield _space(patient.name, "temporary files", tmp, tmp["path"])


def _unusable(patient: Patient, check: str, place: Mapping[str, Any], what: str, other: str) -> Row:
    """Return the row of a folder that is missing or not this user's to write to."""
    path = quote(place["path"])
    if not place["is_folder"]:
        text = "%s: %s is not a folder" % (place["path"], place["near"])
        fix = "%ssee what it is: %s" % (other, ON)
        return Row(patient.name, check, BAD, text, fix, "ls -l %s" % quote(place["near"]))
    script = "mkdir -p %s" % path
    if not place["writable"]:
        script = as_root(patient, script, "chown $(id -u) %s" % path)
    return Row(patient.name, check, BAD, "%s %s" % (place["path"], what), other + ON, script)


def clock(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield how much its clock differs: exits are ordered by the clocks of hosts."""
    offset = patient.offset_s
    if offset is None:
        return
    if abs(offset) < CLOCK_S:
        yield Row(patient.name, "clock", OK, "less than %g s off" % CLOCK_S)
    else:
        text = "%.1f s %s of this machine" % (abs(offset), "ahead" if offset > 0 else "behind")
        sudo = sudo_of(patient)
        script = "%schronyc makestep || %stimedatectl set-ntp true" % (sudo, sudo)
        yield Row(patient.name, "clock", BAD, text, ON, script)


def limits(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield open files and locked memory."""
    found = patient.facts["limits"]
    files, memory = found["nofile"][0], found["memlock"][0]
    text = "%s open files, %s locked memory" % (
        "unlimited" if files is None else files,
        "unlimited" if memory is None else size(memory),
    )
    if files is not None and files < NOFILE:
        # `*` is every user but root.
        line = "echo '%s - nofile 65536'" % ("root" if patient.facts["uid"] == 0 else "*")
        script = "%s | %stee /etc/security/limits.d/90-nofile.conf" % (line, sudo_of(patient))
        yield Row(patient.name, "limits", WARN, text, "%s (at the next login)" % ON, script)
    else:
        yield Row(patient.name, "limits", OK, text)


def shm(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield the shared memory: data loaders and collective libraries use it."""
    total = patient.facts["shm"]["size"]
    if total is None:
        script = as_root(patient, "mkdir -p /dev/shm", "mount -t tmpfs shm /dev/shm")
        yield Row(patient.name, "shared memory", WARN, "no /dev/shm", ON, script)
    elif total < SHM:
        script = as_root(patient, "mount -o remount,size=50% /dev/shm")
        fix = "%s (in a container: docker run --shm-size=8g)" % ON
        yield Row(patient.name, "shared memory", WARN, "/dev/shm has %s only" % size(total), fix, script)
    else:
        yield Row(patient.name, "shared memory", OK, "/dev/shm has %s" % size(total))


def logout(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield whether the system ends what a login leaves behind: a job outlives no connection then."""
    found = patient.facts["logind"]
    if found["kill_user_processes"] and not found["linger"]:
        script = as_root(patient, "loginctl enable-linger %s" % quote(patient.facts["user"]))
        yield Row(patient.name, "logout", WARN, "KillUserProcesses=yes: what runs ends with the login", ON, script)
    else:
        yield Row(patient.name, "logout", OK, "what runs may stay" + (" (linger)" if found["linger"] else ""))


def network(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield the address that peers would use for data."""
    found = patient.facts["network"]
    if found["error"]:
        yield Row(patient.name, "address", BAD, found["error"], "--interface NAME or --subnet CIDR that all hosts have")
        return
    names = [name for name, ip, _ in found["interfaces"] if ip == found["address"]]
    every = ", ".join(dict.fromkeys(name for name, _, _ in found["interfaces"]))
    text = "%s (%s)" % (found["address"], "on %s of %s" % (names[0], every) if names else "on none of %s" % every)
    if wish.count > 1 and (found["address"].startswith("127.") or found["address"] == "::1"):
        fix = "--interface NAME or --subnet CIDR of the network that the hosts share"
        yield Row(patient.name, "address", BAD, text + ": no other host can use it", fix)
    elif not names:
        yield Row(patient.name, "address", BAD, text, "addr= in the hosts file must be an address of the host itself")
    else:
        yield Row(patient.name, "address", OK, text)


def gpus(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield what nvidia-smi shows, if it is there."""
    found = patient.facts["gpus"]
    if found["error"]:
        yield Row(patient.name, "GPUs", WARN, found["error"], ON, "nvidia-smi")
    elif found["gpus"]:
        kinds: dict[str, int] = {}
        for cells in found["gpus"]:
            kinds[", ".join(cells)] = kinds.get(", ".join(cells), 0) + 1
        yield Row(patient.name, "GPUs", OK, "; ".join("%d x %s" % (n, kind) for kind, n in kinds.items()))


def loose(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield permissions that make sshd refuse keys (StrictModes)."""
    if patient.facts["loose"]:
        text = "others may write %s: sshd then refuses keys" % ", ".join(patient.facts["loose"])
        yield Row(patient.name, "permissions", WARN, text, ON, join(["chmod", "go-w", *patient.facts["loose"]]))


def sudo_of(patient: Patient) -> str:
    """Return what a command for root begins with: nothing where the user is root, who often has no sudo."""
    return "" if patient.facts["uid"] == 0 else "sudo "


def as_root(patient: Patient, *commands: str) -> str:
    """Return shell text that runs these commands, one after the other, as root."""
    return " && ".join(sudo_of(patient) + command for command in commands)


def apt(patient: Patient, package: str) -> str:
    """Return shell text that installs a package of Debian or Ubuntu, also where no list of packages is there yet."""
    return as_root(patient, "apt-get update", "apt-get install -y %s" % package)


def version(text: str) -> tuple[int, int]:
    """Return major and minor number of a version."""
    major, minor = [*text.split("."), "0", "0"][:2]
    return _number(major), _number(minor)


def size(count: int) -> str:
    """Return bytes for people."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB)):
        if count >= scale:
            return "%.1f %s" % (count / scale, unit)
    return "%d KiB" % (count >> 10)


def _space(host: str, check: str, place: Mapping[str, Any], text: str) -> Row:
    free = place["free"]
    if free is None:
        return Row(host, check, OK, text)
    text = "%s, %s free" % (text, size(free))
    if free >= FREE:
        return Row(host, check, OK, text)
    fix = "%s shows what fills it" % ON
    return Row(host, check, BAD if free < FREE_LEAST else WARN, text, fix, "df -h %s" % quote(place["near"]))


def _number(text: str) -> int:
    return int("".join(filter(str.isdigit, text)) or 0)


def _failed(host: str, check: str, problem: Problem) -> Row:
    if problem.fix:
        return Row(host, check, BAD, problem.text, problem.fix)
    return Row(host, check, BAD, problem.text, "does this print ok? %s" % ON, "echo ok")
