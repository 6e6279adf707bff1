"""Judges what a host's agent told: facts in, rows out. Pure.

The facts are those of `distrun_runtime.agent.probe`; each check is a function of one host's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distrun.doctor.row import BAD, OK, ON, WARN, Row
from distrun.shell import join, quote
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
        for each in (python, rsync, folders, clock, limits, shm, logout, network, gpus, loose):
            rows += each(patient, wish)
    return rows


def reach(patient: Patient) -> Iterator[Row]:
    """Yield how far the way to the host goes: name, connection, host key, login, agent."""
    problem = patient.problem
    if problem is None or patient.is_met:
        yield Row(patient.name, "reach", OK, "name, connection, host key, login")
        if problem is not None:
            yield Row(patient.name, "agent", BAD, problem.text, problem.fix or _again(patient.name))
        return
    failed = next((step for step, kinds in STEPS if problem.kind in kinds), "agent")
    passed = [step for step, _ in STEPS][: [*(step for step, _ in STEPS), "agent"].index(failed)]
    if passed:
        yield Row(patient.name, "reach", OK, ", ".join(passed))
    yield Row(patient.name, failed, BAD, problem.text, problem.fix or _again(patient.name))


def noise(patient: Patient, wish: Wish) -> Row:
    """Return the row of a login shell that prints: rsync cannot work over it."""
    fix = "in ~/.bashrc there, before what prints: case $- in *i*) ;; *) return ;; esac"
    return Row(patient.name, "shell", BAD if wish.dst else WARN, patient.noise, fix)


def python(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield the interpreters: the agent's, and that of servers with the modules they need."""
    agent, found = patient.facts["agent_python"], patient.facts["python"]
    text = "%s %s" % (agent["version"], agent["path"])
    if version(agent["version"]) < AGENT_PYTHON:
        yield Row(
            patient.name, "python", BAD, text + ": older than 3.8", "python=PATH in the hosts file, or --python PATH"
        )
    else:
        yield Row(patient.name, "python", OK, text)
    if not wish.needs_servers:
        return
    if found.get("error"):
        fix = "python=PATH in the hosts file, or --python PATH; --no-servers if there will be none"
        yield Row(patient.name, "server python", BAD, str(found["error"]), fix)
        return
    text = "%s %s" % (found["version"], found["path"])
    missing = [(name, pip) for name, pip in (("numpy", "numpy"), ("zmq", "pyzmq")) if not found.get(name)]
    if version(found["version"]) < SERVER_PYTHON:
        fix = "python=PATH in the hosts file, or --python PATH, of one that is 3.10 or newer"
        yield Row(patient.name, "server python", BAD, text + ": servers need 3.10 or newer", fix)
    elif missing:
        why = "; ".join(str(found.get(name + "_error") or "no " + name) for name, _ in missing)
        fix = on([found["path"], "-m", "pip", "install", *(pip for _, pip in missing)])
        yield Row(patient.name, "server python", BAD, "%s: %s" % (text, why), fix)
    else:
        yield Row(patient.name, "server python", OK, "%s, numpy %s, zmq %s" % (text, found["numpy"], found["zmq"]))


def rsync(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield whether files can be copied to it."""
    found = patient.facts["rsync"]
    if found["version"]:
        yield Row(patient.name, "rsync", OK, " ".join(str(found["version"]).split()[:3]))
    else:
        fix = on(["sudo", "apt-get", "install", "-y", "rsync"])
        yield Row(patient.name, "rsync", BAD if wish.dst else WARN, "not there: %s" % found["error"], fix)


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
            what = "cannot be written" if place["is_folder"] else "%s is no folder" % place["near"]
            script = "sudo mkdir -p %s && sudo chown $(id -u) %s" % (quote(place["path"]), quote(place["path"]))
            yield Row(patient.name, "sync folder", BAD, "%s: %s" % (place["path"], what), on([script]))
    if "cwd" in found and (patient.workdir or not wish.dst):
        place = found["cwd"]
        if place["exists"] and place["is_folder"]:
            read_only = "" if place["writable"] else ", not writable"
            yield _space(patient.name, "folder", place, place["path"] + read_only)
        else:
            fix = on(["mkdir", "-p", place["path"]])
            if not patient.workdir:
                fix = "--sync-dst-dir DIR copies the current directory there; or " + fix
            yield Row(patient.name, "folder", BAD, "%s does not exist" % place["path"], fix)
    tmp = patient.facts["tmp"]
    if not tmp["writable"]:
        fix = on(["sudo", "chmod", "1777", tmp["path"]])
        yield Row(patient.name, "temporary files", BAD, "%s cannot be written" % tmp["path"], fix)
    else:
        yield _space(patient.name, "temporary files", tmp, tmp["path"])


def clock(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield how much its clock differs: exits are ordered by the clocks of hosts."""
    offset = patient.offset_s
    if offset is None:
        return
    if abs(offset) < CLOCK_S:
        yield Row(patient.name, "clock", OK, "less than %g s off" % CLOCK_S)
    else:
        text = "%.1f s %s of this machine" % (abs(offset), "ahead" if offset > 0 else "behind")
        fix = on(["sudo chronyc makestep || sudo timedatectl set-ntp true"])
        yield Row(patient.name, "clock", BAD, text, fix)


def limits(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield open files and locked memory."""
    found = patient.facts["limits"]
    files, memory = found["nofile"][0], found["memlock"][0]
    text = "%s open files, %s locked memory" % (
        "unlimited" if files is None else files,
        "unlimited" if memory is None else size(memory),
    )
    if files is not None and files < NOFILE:
        line = "echo '* - nofile 65536' | sudo tee /etc/security/limits.d/90-nofile.conf"
        yield Row(patient.name, "limits", WARN, text, on([line]) + " (at the next login)")
    else:
        yield Row(patient.name, "limits", OK, text)


def shm(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield the shared memory: data loaders and collective libraries use it."""
    total = patient.facts["shm"]["size"]
    if total is None:
        fix = on(["sudo", "mount", "-t", "tmpfs", "shm", "/dev/shm"])
        yield Row(patient.name, "shared memory", WARN, "no /dev/shm", fix)
    elif total < SHM:
        fix = on(["sudo", "mount", "-o", "remount,size=50%", "/dev/shm"]) + " (docker run --shm-size=8g)"
        yield Row(patient.name, "shared memory", WARN, "/dev/shm has %s only" % size(total), fix)
    else:
        yield Row(patient.name, "shared memory", OK, "/dev/shm has %s" % size(total))


def logout(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield whether the system ends what a login leaves behind: a job outlives no connection then."""
    found = patient.facts["logind"]
    if found["kill_user_processes"] and not found["linger"]:
        fix = on(["sudo", "loginctl", "enable-linger", patient.facts["user"]])
        yield Row(patient.name, "logout", WARN, "KillUserProcesses=yes: what runs ends with the login", fix)
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
        yield Row(patient.name, "GPUs", WARN, found["error"], on(["nvidia-smi"]))
    elif found["gpus"]:
        kinds: dict[str, int] = {}
        for cells in found["gpus"]:
            kinds[", ".join(cells)] = kinds.get(", ".join(cells), 0) + 1
        yield Row(patient.name, "GPUs", OK, "; ".join("%d x %s" % (n, kind) for kind, n in kinds.items()))


def loose(patient: Patient, wish: Wish) -> Iterator[Row]:
    """Yield permissions that make sshd refuse keys (StrictModes)."""
    if patient.facts["loose"]:
        fix = on(["chmod", "go-w", *patient.facts["loose"]])
        text = "others may write %s: sshd then refuses keys" % ", ".join(patient.facts["loose"])
        yield Row(patient.name, "permissions", WARN, text, fix)


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


def on(words: Sequence[str]) -> str:
    """Return what runs a command on the row's host; a single word is shell text."""
    return "%s %s" % (ON, quote(words[0] if len(words) == 1 else join(words)))


def _space(host: str, check: str, place: Mapping[str, Any], text: str) -> Row:
    free = place["free"]
    if free is None:
        return Row(host, check, OK, text)
    text = "%s, %s free" % (text, size(free))
    fix = on(["df", "-h", place["near"]]) + " shows what fills it"
    return (
        Row(host, check, BAD, text, fix)
        if free < FREE_LEAST
        else Row(host, check, WARN if free < FREE else OK, text, fix if free < FREE else "")
    )


def _number(text: str) -> int:
    return int("".join(filter(str.isdigit, text)) or 0)


def _again(host: str) -> str:
    return "ssh -v %s true shows more" % quote(host)
