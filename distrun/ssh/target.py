"""Where ssh is to go, and what the user said about the way. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from distrun.errors import UsageError
from distrun.request import exact

if TYPE_CHECKING:
    from distrun.hosts import HostSpec

FABRIC = "fabric"
OPENSSH = "openssh"
TRANSPORTS = (FABRIC, OPENSSH)
CONNECT_S = 10.0
"""Until a host has answered and shown its key, unless the user's configuration or command line says otherwise."""
YES = "yes"


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
    def from_reach(reach: Mapping[str, str]) -> Target:
        """Return the target that `reach` wrote.

        Raises:
            UsageError: a value is not of its kind.
        """
        known = {each.name for each in fields(Target)}
        values: dict[str, object] = {name: value for name, value in reach.items() if name in known and value}
        if "host" not in values:
            raise UsageError("there is no host in %r" % dict(reach))
        if "port" in values:
            values["port"] = int(_number("port", reach["port"]))
        if "connect_s" in values:
            values["connect_s"] = _number("connect_s", reach["connect_s"])
        values["strict"] = reach.get("strict", "") in (YES, "1", "true", "True")
        if values.get("transport", FABRIC) not in TRANSPORTS:
            raise UsageError("--transport: there is no %r" % values["transport"], "one of: %s" % ", ".join(TRANSPORTS))
        return Target(**values)  # type: ignore[arg-type]  # checked above, member by member

    def reach(self) -> dict[str, str]:
        """Return the members that are set, as text: `Host.reach` of a plan."""
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
        return Target.from_reach({**options, **{name: value for name, value in given.items() if value}})


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError("%s: %r is not a number" % (name, text)) from None
