"""A host as the user named it, and the command lines that lead there: of `ssh` here, of sshd there. No side effects."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING

from distrun.errors import UsageError
from distrun.units import exact

if TYPE_CHECKING:
    from distrun.hosts import HostSpec

FABRIC = "fabric"
OPENSSH = "openssh"
TRANSPORTS = (FABRIC, OPENSSH)
CONNECT_S = 10.0
"""Until a host has answered and shown its key, unless the user's configuration or command line says otherwise."""
YES = "yes"

PROGRAM = "ssh"
ALIVE_S = 5
"""Seconds between two signs of life that the `ssh` program asks a host for."""
ALIVE_COUNT = 3
"""It gives a host up that owes so many."""

Options = Mapping[str, Sequence[str]]
"""What `ssh -G` says: keywords in lower case, each with the values of its lines."""

PYTHONS = (
    "python3",
    "/usr/bin/python3",
    "/usr/local/bin/python3",
    "$HOME/miniconda3/bin/python3",
    "$HOME/miniforge3/bin/python3",
    "$HOME/anaconda3/bin/python3",
    "/opt/conda/bin/python3",
    "/opt/homebrew/bin/python3",
    "$HOME/.local/bin/python3",
    "$HOME/.pyenv/shims/python3",
)
"""Where a python3 is looked for, in order; the first by PATH."""

# -S: the program needs nothing of what site adds, and it is a tenth of its start.
# No single quote, no newline and no `!`: whatever the login shell is, it hands this on to /bin/sh as it stands.
_SEARCH = (
    'm=$1; b=$2; n=$3; p=$3; shift 3; until [ "$1" = -- ]; do export "$1"; shift; done; shift; '
    'case $p in "~/"*) p=$HOME/${p#??};; esac; for p in ${p:+"$p"} %s; do '
    'if command -v "$p" >/dev/null 2>&1; then exec "$p" -I -S -c "$b" "$@"; fi; done; '
    'echo "$m there is no python3 on this host${n:+, nor $n} (looked along PATH=$PATH and in the usual places)" '
    ">&2; exit 127"
)


@dataclass(frozen=True)
class Target:
    """One host as the user named it. Empty members are left to the user's ssh configuration."""

    host: str
    """What one would type after `ssh`: an alias, a name or an address."""
    user: str = ""
    port: int | None = None
    identity: str = ""
    """Key file (ssh -i)."""
    jump: str = ""
    """ssh -J."""
    config: str = ""
    """ssh -F."""
    transport: str = FABRIC
    """One of TRANSPORTS."""
    strict: bool = False
    """Unknown host keys are refused too."""
    connect_s: float = CONNECT_S
    python: str = ""
    """An interpreter there to run the agent, if it can be found before anything is activated."""

    @staticmethod
    def parse(texts: Mapping[str, str]) -> Target:
        """Return the target whose members `texts` gives; other names are passed over.

        Raises:
            UsageError: a value is not of its kind.
        """
        known = {each.name for each in fields(Target)}
        values: dict[str, object] = {name: value for name, value in texts.items() if name in known and value}
        if "host" not in values:
            raise UsageError(f"there is no host in {dict(texts)!r}")
        if "port" in values:
            values["port"] = int(_number("port", texts["port"]))
        if "connect_s" in values:
            values["connect_s"] = _number("connect_s", texts["connect_s"])
        values["strict"] = texts.get("strict", "") in (YES, "1", "true", "True")
        if values.get("transport", FABRIC) not in TRANSPORTS:
            raise UsageError(f"--transport: there is no {values['transport']!r}", f"one of: {', '.join(TRANSPORTS)}")
        return Target(**values)  # type: ignore[arg-type]  # checked above, member by member

    def texts(self) -> dict[str, str]:
        """Return the members that are set, as text; `parse` gives the target back."""
        plain = Target(self.host)
        found = {"host": self.host}
        for each in fields(self):
            value = getattr(self, each.name)
            if value != getattr(plain, each.name):
                found[each.name] = YES if value is True else exact(value) if isinstance(value, float) else str(value)
        return found

    @staticmethod
    def of(spec: HostSpec, **options: str) -> Target:
        """Return the target of a line of the hosts file; `options` are the command line's, for all hosts."""
        given = {
            "host": spec.name,
            "user": spec.user,
            "port": "" if spec.port is None else str(spec.port),
            "identity": spec.identity,
            "jump": spec.jump,
            "python": spec.python,
        }
        return Target.parse({**options, **{name: value for name, value in given.items() if value}})


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name}: {text!r} is not a number") from None


def ssh_flags(target: Target) -> list[str]:
    """Return what a target adds to an `ssh` command line, without the host. Pure."""
    found: list[str] = []
    for flag, value in (
        ("-F", target.config),
        ("-p", "" if target.port is None else str(target.port)),
        ("-l", target.user),
        ("-i", target.identity),
        ("-J", target.jump),
    ):
        found += [flag, value] if value else []
    return found


def ssh_arguments(target: Target, options: Options, connect_s: float, only: bool | None = None) -> list[str]:
    """Return the `ssh` program and what it needs to be told so that nothing ever asks or hangs. Pure.

    What the user's configuration says stands, but for a StrictHostKeyChecking of "no". `only`: no key of the
    ssh-agent is offered that was not named. The program offers those first, and a host hangs up after a few wrong
    ones. None: so if the target names its key.
    """
    found = [PROGRAM, *ssh_flags(target), "-T"]

    def say(name: str, value: object) -> None:
        found.extend(["-o", f"{name}={value}"])

    def unset(name: str, *defaults: str) -> bool:
        return (options.get(name) or ("",))[0].strip().lower() in ("", *defaults)

    say("BatchMode", "yes")
    if (bool(target.identity) if only is None else only) and unset("identitiesonly", "no"):
        say("IdentitiesOnly", "yes")
    if unset("connecttimeout", "none", "0") or connect_s != target.connect_s:
        say("ConnectTimeout", max(1, round(connect_s)))
    if unset("serveraliveinterval", "0"):
        say("ServerAliveInterval", ALIVE_S)
        say("ServerAliveCountMax", ALIVE_COUNT)
    if target.strict:
        say("StrictHostKeyChecking", "yes")
    elif unset("stricthostkeychecking", "ask", "no", "false", "off"):
        say("StrictHostKeyChecking", "accept-new")
    say("ForwardX11", "no")
    say("ClearAllForwardings", "yes")
    if unset("loglevel", "info"):
        say("LogLevel", "ERROR")
    for name, keyword, default in (
        ("remotecommand", "RemoteCommand", "none"),
        ("permitlocalcommand", "PermitLocalCommand", "no"),
        ("stdinnull", "StdinNull", "no"),
        ("forkafterauthentication", "ForkAfterAuthentication", "no"),
        ("sessiontype", "SessionType", "default"),
    ):
        if not unset(name, default):
            say(keyword, default)
    return found


def remote_command(
    boot: str,
    python: str = "",
    words: Sequence[str] = (),
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    begin: str = "",
    missing: str = "distrun:",
) -> str:
    """Return the command for a login shell of any kind: sh, csh and fish read it alike.

    Args:
        boot: the one line of Python that reads the program.
        python: an interpreter to try first. Servers may find it only once the environment is activated, so the usual
            ones do for the agent where it is not there yet.
        words: arguments of the program.
        env: variables that it is started with.
        begin: a line that is written to stderr at once.
        missing: what the line begins with that says that there is no python3.
    """
    search = _SEARCH % " ".join(f'"{place}"' for place in PYTHONS)
    if begin:
        search = f'echo "{begin}" >&2; {search}'
    added = [f"{name}={value}" for name, value in env.items()]
    return "exec " + shlex.join(["/bin/sh", "-c", search, "distrun", missing, boot, python, *added, "--", *words])
