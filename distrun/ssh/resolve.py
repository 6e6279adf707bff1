"""Applies the user's ssh configuration to a target. The `ssh` program is asked (`ssh -G`) if there is one."""

from __future__ import annotations

import dataclasses
import getpass
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distrun.ssh.alike import Alike
from distrun.ssh.failure import OTHER, SshFailure, Where
from distrun.ssh.target import CONNECT_S, PROGRAM, Options, Target, ssh_arguments, ssh_flags
from distrun_runtime.contract import environ

ASK_S = 10.0
"""`ssh -G` takes 10 ms, longer only where the configuration runs commands or looks up names."""

JUMPS = 8
"""Hosts in between, at most; a configuration that jumps in circles ends here."""

DEFAULT_IDENTITIES = tuple(
    f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk", "xmss", "dsa")
)
_USUAL = {"~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519"}
_NOT_SET = ("", "none", "any:any")
_TOKEN = re.compile(r"%(.)")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True)
class Resolved:
    """Everything that a connection needs to know. Paths and commands are expanded."""

    target: Target
    hostname: str
    port: int = 22
    user: str = ""
    identities: tuple[str, ...] = ()
    """Key files, in order."""
    is_explicit: bool = False
    """The user named them; else they are those that ssh looks for by itself."""
    identities_only: bool = False
    certificates: tuple[str, ...] = ()
    agent: str = ""
    """Socket of the ssh-agent; empty: none is to be asked."""
    jump: str = ""
    proxy_command: str = ""
    user_known_hosts: tuple[str, ...] = ()
    global_known_hosts: tuple[str, ...] = ()
    host_key_alias: str = ""
    is_strict: bool = False
    """Unknown host keys are refused."""
    hash_known_hosts: bool = False
    connect_s: float = CONNECT_S
    forward_agent: bool = False
    family: str = "any"
    """any, inet or inet6."""
    asks_passwords: bool = True
    asks_passphrases: bool = True
    """Neither with `BatchMode yes`."""
    options: Options = field(default_factory=dict, compare=False, repr=False)
    """As they were found; empty without the `ssh` program."""

    @property
    def where(self) -> Where:
        """For messages."""
        target = self.target
        named = self.identities if self.is_explicit else ()
        identity = next((path for path in named if os.path.exists(path)), named[0] if named else "")
        return Where(
            target.host,
            self.hostname,
            self.port,
            self.user,
            self.connect_s,
            config=target.config,
            identity=identity or target.identity,
            jump=target.jump,
            has_key=bool(self.agent) or any(os.path.exists(path) for path in self.identities),
        )

    @property
    def has_named_key(self) -> bool:
        """Whether the user named a key file that is there, or a public half of one for a key of the ssh-agent."""
        names = [path + end for path in self.identities for end in ("", ".pub")]
        return self.is_explicit and any(os.path.exists(name) for name in names)

    @property
    def known_name(self) -> str:
        """What known_hosts files call it."""
        if self.host_key_alias:
            return self.host_key_alias
        name = self.hostname.lower()
        return name if self.port == 22 else f"[{name}]:{self.port}"


def resolve(target: Target, alike: Alike | None = None) -> Resolved:
    """Return what the user's configuration makes of `target`.

    Args:
        target: where.
        alike: what is known of other hosts of the launch, and is told of this one; None: it is asked for alone.

    Raises:
        SshFailure: the configuration cannot be read.
    """
    if not has_program():
        options = _read_files(target)
    else:
        options = _ask_program(target) if alike is None else alike.options(target)
    return digest(target, options, environ.snapshot())


def many() -> Alike:
    """Return what `resolve` takes where there are many targets."""
    return Alike(_ask_program, _reading)


def has_program() -> bool:
    """Return whether there is an `ssh` program here."""
    return shutil.which(PROGRAM) is not None


def shell(resolved: Resolved, named: bool | None = None, depth: int = 0) -> list[str]:
    """Return the `ssh` program with all it needs for a host but its name.

    Hosts in between get our options too, which the program's own ProxyJump does not hand on. `named`: where the user
    named key files that are there, no others are offered; None: only where the hosts file named them.

    Raises:
        SshFailure: the configuration of a host in between cannot be read.
    """
    target = resolved.target
    only = named and resolved.has_named_key
    if not resolved.jump:
        return ssh_arguments(target, resolved.options, resolved.connect_s, only)
    if depth >= JUMPS:
        raise SshFailure(OTHER, f"more than {JUMPS} hosts in between (ProxyJump in a circle?)")
    way = resolve(hop(resolved))
    words = [word.replace("%", "%%") for word in shell(way, named, depth + 1)]
    proxy = shlex.join([*words, "-W", "[%h]:%p", "--", way.target.host])
    plain = ssh_arguments(dataclasses.replace(target, jump=""), resolved.options, resolved.connect_s, only)
    return [*plain, "-o", f"ProxyCommand={proxy}"]


def hop(resolved: Resolved) -> Target:
    """Return the last host in between of a ProxyJump list; the way to that one goes through the ones before. Pure."""
    *before, last = (part.strip() for part in resolved.jump.split(","))
    last = last.removeprefix("ssh://")
    user, _, place = last.rpartition("@")
    host, port = place, ""
    if place.startswith("["):
        host, _, port = place[1:].partition("]")
        port = port.removeprefix(":")
    elif place.count(":") == 1:
        host, _, port = place.partition(":")
    return dataclasses.replace(
        resolved.target,
        host=host,
        user=user,
        port=int(port) if port.isdigit() else None,
        identity="",
        jump=",".join(before),
        python="",
    )


def parse(text: str) -> dict[str, list[str]]:
    """Return the options that `ssh -G` printed. Pure."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        if name:
            found.setdefault(name.lower(), []).append(value)
    return found


def digest(target: Target, options: Options, env: Mapping[str, str]) -> Resolved:
    """Return `options` in our terms. Pure but for the names of this user and this machine."""

    def one(name: str, default: str = "") -> str:
        values = options.get(name) or [default]
        return default if values[0].strip().lower() in _NOT_SET else values[0].strip()

    def yes(name: str, default: bool = False) -> bool:
        return one(name, "yes" if default else "no").lower() in ("yes", "true", "ask", "point-to-point")

    hostname = one("hostname", target.host)
    port = int(one("port", "22"))
    user = one("user", target.user) or _local_user()
    alias = one("hostkeyalias")
    jump = one("proxyjump")
    if jump == target.host:
        jump = ""  # `Host *` meant all but this one
    tokens = {
        "%": "%",
        "d": os.path.expanduser("~"),
        "h": hostname,
        "i": str(os.getuid()),
        "j": jump,
        "k": alias or target.host,
        "l": socket.gethostname(),
        "L": socket.gethostname().partition(".")[0],
        "n": target.host,
        "p": str(port),
        "r": user,
        "u": _local_user(),
    }

    def paths(values: Sequence[str]) -> tuple[str, ...]:
        found = (_expand(value.strip('"'), tokens, env) for value in values if value not in _NOT_SET)
        return tuple(dict.fromkeys(os.path.expanduser(each) for each in found))

    may_ask = not yes("batchmode")
    named = [value for value in options.get("identityfile", ()) if value not in _NOT_SET]
    is_default = set(named) <= set(DEFAULT_IDENTITIES) and set(named) >= _USUAL
    if target.identity:  # `ssh -G -i` forgets a file that is not there; nobody would hear that it is mistyped
        named, is_default = [target.identity, *([] if is_default else named)], False
    timeout = one("connecttimeout")
    seconds = float(timeout) if timeout.replace(".", "", 1).isdigit() and float(timeout) > 0 else CONNECT_S
    forward = one("forwardagent", "no")
    return Resolved(
        target=target,
        hostname=hostname,
        port=port,
        user=user,
        identities=paths(named or DEFAULT_IDENTITIES),
        is_explicit=bool(named) and not is_default,
        identities_only=yes("identitiesonly"),
        certificates=paths(options.get("certificatefile", ())),
        agent=_agent(options, tokens, env),
        jump=jump,
        proxy_command=_expand(one("proxycommand"), tokens, env),
        user_known_hosts=paths(_words(options, "userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2")),
        global_known_hosts=paths(_words(options, "globalknownhostsfile", "/etc/ssh/ssh_known_hosts")),
        host_key_alias=alias,
        is_strict=target.strict or one("stricthostkeychecking", "ask").lower() in ("yes", "true"),
        hash_known_hosts=yes("hashknownhosts"),
        connect_s=target.connect_s if target.connect_s != CONNECT_S else seconds,
        forward_agent=forward.lower() not in ("no", "false"),
        family=one("addressfamily", "any"),
        asks_passwords=may_ask and (yes("passwordauthentication", True) or yes("kbdinteractiveauthentication", True)),
        asks_passphrases=may_ask,
        options=options,
    )


def _agent(options: Options, tokens: Mapping[str, str], env: Mapping[str, str]) -> str:
    named = (options.get("identityagent") or ["SSH_AUTH_SOCK"])[0].strip().strip('"')
    if named.lower() == "none":
        return ""
    if named == "SSH_AUTH_SOCK":
        return env.get("SSH_AUTH_SOCK", "")
    if named.startswith("$") and not named.startswith("${"):
        return env.get(named[1:], "")
    return os.path.expanduser(_expand(named, tokens, env))


def _words(options: Options, name: str, default: str) -> list[str]:
    return [word for value in options.get(name) or [default] for word in value.split()]


def _expand(text: str, tokens: Mapping[str, str], env: Mapping[str, str]) -> str:
    text = _VARIABLE.sub(lambda found: env.get(found[1], ""), text)
    return _TOKEN.sub(lambda found: tokens.get(found[1], found[0]), text)


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # a user without a name, as in some containers


def _ask_program(target: Target) -> dict[str, list[str]]:
    done = _run(target, "-G")
    if done.returncode != 0:
        words = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        why = "; ".join(line for line in words if "Pseudo-terminal" not in line) or f"code {done.returncode}"
        raise SshFailure(OTHER, f"the ssh configuration cannot be used: {why}", f"try: ssh -G {target.host}")
    return parse(done.stdout.decode("utf-8", "replace"))


def _reading(target: Target) -> str:
    """Return what the program says of the files that it reads for a target."""
    return _run(target, "-v", "-G").stderr.decode("utf-8", "surrogateescape")


def _run(target: Target, *words: str) -> subprocess.CompletedProcess[bytes]:
    argv = [PROGRAM, *words, *ssh_flags(target), "--", target.host]
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise SshFailure(OTHER, f"`ssh -G {target.host}` did not end within {ASK_S:g} s") from None


def _read_files(target: Target) -> dict[str, list[str]]:
    """Read the configuration files as fabric does, where there is no `ssh` program to ask."""
    import fabric
    from paramiko.ssh_exception import SSHException

    try:
        config = fabric.Config(runtime_ssh_path=target.config or None)
        found = config.base_ssh_config.lookup(target.host)
    except (OSError, SSHException, UnicodeDecodeError) as err:
        raise SshFailure(OTHER, f"the ssh configuration cannot be read: {err}") from err
    options = {name: list(value) if isinstance(value, list) else [str(value)] for name, value in found.items()}
    for name, value in (("user", target.user), ("proxyjump", target.jump), ("identityfile", target.identity)):
        if value:
            options[name] = [value]
    if target.port is not None:
        options["port"] = [str(target.port)]
    return options
