"""The command line of the `ssh` program. Pure but for looking whether there is one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from distrun.ssh.target import Target

PROGRAM = "ssh"
ALIVE_S = 5
ALIVE_COUNT = 3

Options = Mapping[str, Sequence[str]]
"""What `ssh -G` says: keywords in lower case, each with the values of its lines."""


def has_program() -> bool:
    """Return whether there is an `ssh` program here."""
    return shutil.which(PROGRAM) is not None


def flags(target: Target) -> list[str]:
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


def arguments(target: Target, options: Options, connect_s: float, only: bool | None = None) -> list[str]:
    """Return the `ssh` program and what it needs to be told so that nothing ever asks or hangs. Pure.

    What the user's configuration says stands, but for a StrictHostKeyChecking of "no". `only`: no key of the
    ssh-agent is offered that was not named. The program offers those first, and a host hangs up after a few wrong
    ones. None: so if the target names its key.
    """
    found = [PROGRAM, *flags(target), "-T"]

    def say(name: str, value: object) -> None:
        found.extend(["-o", "%s=%s" % (name, value)])

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
