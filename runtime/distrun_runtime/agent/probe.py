"""Gathers facts about this host for `distrun doctor`: programs, folders, limits, network, GPUs. Judges nothing."""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
import socket
import stat
import sys
import tempfile
import time
from typing import Any, Dict, List, Mapping, Optional, Tuple

from distrun_runtime.agent import commands, helper, interpreters, preflight
from distrun_runtime.agent.commands import TIMED_OUT, Command, CommandResult
from distrun_runtime.contract import address, daemon, environ, process
from distrun_runtime.contract import folder as destination
from distrun_runtime.contract.dataclass import written
from distrun_runtime.contract.gpus import VISIBLE
from distrun_runtime.contract.plan import SERVER_MODULES
from distrun_runtime.errors import ContractError, PreflightFailure

PROGRAM_S = 10.0
"""How long a program may take to answer."""


def probe(args: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the facts. Each takes at most PROGRAM_S.

    Arguments, all optional: `python`, interpreter of servers (python3); `activate`, shell text that is run before, in
    `dst` or `cwd` if these are there; `cwd`, `dst`, folders; `address`, the one for data if it is settled, else
    `interface`, `subnet`, `toward`, as a job's agent takes them.
    """
    base, error = None, ""
    if args.get("activate"):
        try:
            base = activated(str(args["activate"]), str(args.get("dst") or args.get("cwd") or ""))
        except PreflightFailure as err:
            error = str(err)
    return {
        "activation": {"error": error},
        "time": time.time(),
        "hostname": socket.gethostname(),
        "debian": os.path.exists("/etc/debian_version"),
        "uid": os.geteuid(),
        "user": process.user_name() or str(os.geteuid()),
        "shell": _shell(),
        "agent_python": {"version": sys.version.split()[0], "path": sys.executable},
        "python": {"error": error} if error else python(str(args.get("python") or "python3"), base),
        "rsync": _version("rsync"),
        "folders": {name: folder(str(args[name]), name == "dst") for name in ("cwd", "dst") if args.get(name)},
        "tmp": folder(tempfile.gettempdir()),
        "limits": {"nofile": limit(resource.RLIMIT_NOFILE), "memlock": limit(resource.RLIMIT_MEMLOCK)},
        "shm": space("/dev/shm"),
        "logind": {"kill_user_processes": daemon.kills_processes(), "linger": daemon.needs_linger() is None},
        "network": network(args),
        "gpus": gpus(base),
        "loose": loose(os.path.expanduser("~")),
    }


def python(name: str, base: Optional[Mapping[bytes, bytes]] = None) -> Dict[str, Any]:
    """Return what is known of an interpreter of servers, looked for in the environment `base`; or `error`.

    Besides what `interpreters.told` gives: `place`, where the environment for servers is or would be made;
    `environment`, what is known of that one (empty: there is none that will do); `install`, shell text that installs
    the modules for servers and workers, if that is possible.
    """
    env = environ.snapshot_bytes() if base is None else base
    asked = interpreters.command(os.fsencode(os.path.expanduser(name)), SERVER_MODULES, env, b"", PROGRAM_S)
    try:
        found = interpreters.told(asked, commands.run(asked), name, socket.gethostname())
    except PreflightFailure as err:
        return {"error": str(err)}
    if not interpreters.is_new(found):
        return found
    found.update(
        place=interpreters.place(found["version"], found["path"]),
        environment=_environment(found["version"], env),
        install=interpreters.how_to_install(found, interpreters.missing(found, SERVER_MODULES)),
    )
    return found


def _environment(version: str, env: Mapping[bytes, bytes]) -> Dict[str, Any]:
    for path in interpreters.environments(version):
        asked = interpreters.command(os.fsencode(path), SERVER_MODULES, env, b"", PROGRAM_S)
        with contextlib.suppress(PreflightFailure):
            found = interpreters.told(asked, commands.run(asked), path, "")
            if interpreters.fits(found, SERVER_MODULES):
                return dict(found, path=path)
    return {}


def activated(script: str, cwd: str) -> Dict[bytes, bytes]:
    """Return the environment that shell text leaves, as in a launch.

    Raises:
        PreflightFailure: it failed.
    """
    asked = preflight.activation(script, environ.snapshot_bytes(), {}, cwd)
    return preflight.activated(commands.run(asked), asked, socket.gethostname())


def folder(path: str, is_destination: bool = False) -> Dict[str, Any]:
    """Return whether a folder is there and can be written, and what is free; else the nearest one above it.

    Of a destination of files also why it cannot be one: `fault` and `fix`, empty if it can.
    """
    fault = dict(zip(("fault", "fix"), unfit(path))) if is_destination else {}
    path = os.path.expanduser(path)
    near = path
    while not os.path.exists(near) and os.path.dirname(near) != near:
        near = os.path.dirname(near)
    facts = {"path": path, "exists": os.path.exists(path), "is_folder": os.path.isdir(near), "near": near}
    return dict(facts, writable=os.access(near, os.W_OK | os.X_OK), **space(near), **fault)


def unfit(path: str) -> Tuple[str, str]:
    """Return why no files may be copied to a folder, and what to do about it; empty if they may."""
    try:
        found, notes = destination.follow(destination.expand(path), path)
        destination.own(found, path, notes)
    except destination.FolderUnfit as err:
        return str(err), err.fix
    except OSError:  # it is missing, or `folder` says what is wrong with it
        pass
    return "", ""


def space(path: str) -> Dict[str, Optional[int]]:
    """Return `free` and `size` of the file system of a path in bytes; None where it cannot tell."""
    try:
        found = os.statvfs(path)
    except OSError:
        return {"free": None, "size": None}
    return {"free": found.f_bavail * found.f_frsize, "size": found.f_blocks * found.f_frsize}


def limit(which: int) -> List[Optional[int]]:
    """Return the soft and the hard limit; None: unlimited."""
    return [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)]


def network(args: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the interfaces, and the address that tasks here would use or why there is none."""
    found: Dict[str, Any] = {"interfaces": [list(each) for each in address.interfaces()], "error": ""}
    found["address"] = str(args.get("address") or "")
    if found["address"]:
        return found
    interface, subnet, toward = (str(args.get(name) or "") for name in ("interface", "subnet", "toward"))
    try:
        found["address"] = address.settle(interface, subnet, toward, environ.snapshot())
    except ContractError as err:
        found["error"] = str(err)
    return found


def gpus(base: Optional[Mapping[bytes, bytes]] = None) -> Dict[str, Any]:
    """Return what NVIDIA's driver tells (`contract.gpus.HostGpus`), and CUDA_VISIBLE_DEVICES of the environment `base`.

    `how`, by what it tells: `nvml`, `smi` or, if nothing does, nothing; then `error` may say why. `driver`, its
    version; `gpus`, each with `number`, `uuid`, `name`, `memory` (bytes) and `instances` (of MIG; null: not divided).
    """
    found = helper.told(commands.run(helper.command({})))
    env = environ.snapshot_bytes() if base is None else base
    visible = env.get(os.fsencode(VISIBLE))
    return dict(written(found), visible=None if visible is None else os.fsdecode(visible))


def loose(home: str) -> List[str]:
    """Return those of home, ~/.ssh and its authorized_keys that others may write: sshd then takes no key."""
    found = []
    for path in (home, os.path.join(home, ".ssh"), os.path.join(home, ".ssh", "authorized_keys")):
        with contextlib.suppress(OSError):
            if stat.S_IMODE(os.stat(path).st_mode) & 0o022:
                found.append(path)
    return found


def run(*argv: str) -> CommandResult:
    """Run a program, for PROGRAM_S at most; its result is what it prints."""
    words = tuple(map(os.fsencode, argv))
    return commands.run(Command(words, environ.snapshot_bytes(), b"", PROGRAM_S, prints_result=True))


def _version(program: str) -> Dict[str, str]:
    """Return the first line in which a program says its `version`, or the `error`."""
    done = run(program, "--version")
    lines = done.result.decode("utf-8", "replace").strip().splitlines()
    if done.code == 0 and lines:
        return {"version": lines[0].strip(), "error": ""}
    if done.code is None:
        why = done.text if done.fault != TIMED_OUT else f"did not answer within {PROGRAM_S:g} s"
        return {"version": "", "error": f"{program}: {why}"}
    last = (done.last_lines.splitlines() or lines or [""])[-1].strip()[:300]
    return {"version": "", "error": last or f"{program} ended with code {done.code}"}


def _shell() -> str:
    """Return the user's login shell, empty if unknown."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_shell
    except KeyError:
        return ""
