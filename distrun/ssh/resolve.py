"""Applies the user's ssh configuration to a target. The `ssh` program is asked (`ssh -G`) if there is one."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from distrun.formats import exact
from distrun.options import BY_KEY
from distrun.ssh.failure import OTHER, SshFailure, Where, known_name, too_many_jumps
from distrun_runtime.contract import environ, process
from distrun_runtime.contract.dataclass import dataclass

if TYPE_CHECKING:
    from distrun.hosts import HostSpec


# A host as the user named it, and the command lines that lead there: of `ssh` here, of sshd there. No side effects.


FABRIC, OPENSSH = BY_KEY["transport"].choices
CONNECT_S: float = BY_KEY["connect_timeout"].default
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
    """FABRIC or OPENSSH."""
    strict: bool = False
    """Unknown host keys are refused too."""
    connect_s: float = CONNECT_S
    python: str = ""
    """An interpreter there to run the agent, if it can be found before anything is activated."""

    @staticmethod
    def parse(texts: Mapping[str, str]) -> Target:
        """Return the target whose members `texts` gives, as `texts` writes them; other names are passed over."""
        kinds: dict[str, Callable[[str], object]] = {
            "port": int,
            "connect_s": float,
            "strict": lambda text: text == YES,
        }
        known = {each.name for each in fields(Target)}
        values = {name: kinds.get(name, str)(text) for name, text in texts.items() if name in known and text}
        return Target(**values)  # type: ignore[arg-type]  # of the kinds above

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
        given = {name: getattr(spec, name) for name in ("user", "identity", "jump", "python")}
        given.update(host=spec.name, port="" if spec.port is None else str(spec.port))
        return Target.parse({**options, **{name: value for name, value in given.items() if value}})


def ssh_flags(target: Target) -> list[str]:
    """Return what a target adds to an `ssh` command line, without the host. No side effects."""
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
    """Return the `ssh` program and what it needs to be told so that nothing ever asks or hangs. No side effects.

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


GONE = "distrun: nothing listens there"
"""What RELAY says if the agent has ended."""
# In no quotes but these, and without a `!`: see `remote_command`. It goes to the folder of the socket because the path
# may be too long for a socket's address. Where the socket takes no more, what came from it last is still on its way.
RELAY = (
    'exec("import os,socket,sys,threading\\n'
    "def copy(read,write,fail=os._exit):\\n"
    " try:\\n"
    "  while True:\\n"
    "   data=read(65536)\\n"
    "   if not data: os._exit(0)\\n"
    "   write(data)\\n"
    " except OSError: fail(0)\\n"
    "def say(data):\\n"
    " while data: data=data[os.write(1,data):]\\n"
    "s=socket.socket(socket.AF_UNIX)\\n"
    "folder,name=os.path.split(sys.argv[1])\\n"
    "try:\\n"
    " os.chdir(folder)\\n"
    " s.connect(name)\\n"
    "except (FileNotFoundError,ConnectionRefusedError) as err:\\n"
    f' print(\\"{GONE}: %s\\" % err,file=sys.stderr)\\n'
    " sys.exit(3)\\n"
    "except OSError as err:\\n"
    " sys.exit(str(err))\\n"
    "threading.Thread(target=copy,args=(lambda size:os.read(0,size),s.sendall,int),daemon=True).start()\\n"
    'copy(s.recv,say)")'
)
"""Connects the standard input and output of a program on a host with the Unix socket there of an agent that waits for
another connection. What it needs is on its command line: a path, no secret."""


# Asks `ssh -G` once for hosts that the user's ssh configuration does not tell apart.
#
# A run of the program takes 5 ms of processor time, a quarter of all that a connection costs here. What it says of a
# host follows from the host's name and from the patterns of `Host` lines that match it. So of the hosts that match the
# same patterns two are asked for. If their answers differ in nothing but the name, those of the others are made from
# them. Where a configuration decides in any other way (`Match`, CanonicalizeHostname), every host is asked for.


Answer = dict[str, list[str]]
"""What `ssh -G` says of a host: keywords in lower case, each with the values of its lines."""

NAMED = ("host", "hostname")
"""Keywords whose value is the host's name, unless the configuration says otherwise."""
UNUSED = ("controlpath",)
"""Keywords that may hold the name in other forms, and that nothing here reads."""
FEW = 4
"""So many hosts are asked for at once; it is not worth comparing them."""
_READ = re.compile(r"^debug1: Reading configuration data (.+)$", re.MULTILINE)
_LINE = re.compile(r"\s*(host|match)(?:\s*=\s*|\s+)(.*)", re.IGNORECASE)


class Alike:
    """What `ssh -G` says of the hosts of a launch. Of any thread's use."""

    def __init__(self, ask: Callable[[Target], Answer], read: Callable[[Target], str], few: int = FEW) -> None:
        """
        Args:
            ask: returns the program's answer for a target, or raises SshFailure.
            read: returns what the program says, with -v, while it reads the configuration for a target.
            few: so many are asked for in any case.
        """
        self._ask = ask
        self._read = read
        self._few = few
        self._lock = threading.Lock()
        self._patterns: dict[str, Patterns | None] = {}
        """By configuration file (ssh -F)."""
        self._groups: dict[tuple[Target, tuple[bool, ...]], _SamePatterns] = {}

    def options(self, target: Target) -> Answer:
        """Return the program's answer for a target. Waits for the program, at most three times.

        Raises:
            SshFailure: the configuration cannot be used.
        """
        group = self._group(target)
        return self._ask(target) if group is None else group.options(target)

    def _group(self, target: Target) -> _SamePatterns | None:
        if target.host != target.host.lower():
            return None
        with self._lock:
            if self._few:
                self._few -= 1
                return None
            if target.config not in self._patterns:
                self._patterns[target.config] = patterns(self._read(target))
            found = self._patterns[target.config]
            if found is None:
                return None
            key = (dataclasses.replace(target, host="", python=""), matches(found, target.host))
            return self._groups.setdefault(key, _SamePatterns(self._ask))


class _SamePatterns:
    """Hosts that match the same patterns."""

    def __init__(self, ask: Callable[[Target], Answer]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._first: tuple[str, Answer] | None = None
        self._is_alike: bool | None = None
        """None: not known before a second host was asked for."""

    def options(self, target: Target) -> Answer:
        with self._lock:
            if self._is_alike is None:
                return self._compare(target)
        if self._is_alike and self._first is not None:
            return renamed(*self._first, target.host)
        return self._ask(target)

    def _compare(self, target: Target) -> Answer:
        answer = self._ask(target)
        if self._first is None:
            self._first = (target.host, answer)
        elif target.host != self._first[0]:
            expected = renamed(*self._first, target.host)
            self._is_alike = expected == _used(answer) and _only_by_name(answer)
        return answer


Patterns = Sequence[re.Pattern[str]]


def patterns(said: str) -> Patterns | None:
    """Return the patterns of all `Host` lines of the files that `ssh -v -G` says it has read.

    None: there is more to it than such lines, or it is unknown which files count.
    """
    found: list[re.Pattern[str]] = []
    paths = _READ.findall(said)
    try:
        texts = [Path(path.strip()).read_text(encoding="utf-8", errors="surrogateescape") for path in paths]
    except OSError:
        return None
    for line in "\n".join(texts).splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        if match[1].lower() == "match":
            return None
        found += [_pattern(word) for word in match[2].replace('"', " ").split()]
    return found if texts else None


def _pattern(word: str) -> re.Pattern[str]:
    letters = {"*": ".*", "?": "."}
    return re.compile("".join(letters.get(each) or re.escape(each) for each in word.lstrip("!")), re.DOTALL)


def matches(found: Patterns, host: str) -> tuple[bool, ...]:
    """Return which patterns match a host's name. No side effects."""
    return tuple(each.fullmatch(host) is not None for each in found)


def renamed(name: str, answer: Answer, host: str) -> Answer:
    """Return the answer for the host `name` as it is for another one that is alike. No side effects."""
    return {
        key: [host if key in NAMED and value == name else value for value in values]
        for key, values in _used(answer).items()
    }


def _used(answer: Answer) -> Answer:
    return {key: values for key, values in answer.items() if key not in UNUSED}


def _only_by_name(answer: Answer) -> bool:
    """Return whether the answer needed no look at the network."""
    return all(value.lower() in ("no", "none", "false") for value in answer.get("canonicalizehostname", ()))


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
        return self.host_key_alias or known_name(self.hostname.lower(), self.port)


def resolve(target: Target, alike: Alike | None = None) -> Resolved:
    """Return what the user's configuration makes of `target`.

    Args:
        target: where.
        alike: what is known of other hosts of the launch, and is told of this one; None: it is asked for alone.

    Raises:
        SshFailure: the configuration cannot be read.
    """
    if shutil.which(PROGRAM) is None:
        options = _read_files(target)
    else:
        options = _ask_program(target) if alike is None else alike.options(target)
    return digest(target, options, environ.snapshot())


def many() -> Alike:
    """Return what `resolve` takes where there are many targets."""
    return Alike(_ask_program, _reading)


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
        raise too_many_jumps(target.host, JUMPS)
    way = resolve(hop(resolved))
    words = [word.replace("%", "%%") for word in shell(way, named, depth + 1)]
    proxy = shlex.join([*words, "-W", "[%h]:%p", "--", way.target.host])
    plain = ssh_arguments(dataclasses.replace(target, jump=""), resolved.options, resolved.connect_s, only)
    return [*plain, "-o", f"ProxyCommand={proxy}"]


def hop(resolved: Resolved) -> Target:
    """Return the last host in between of a ProxyJump list; the way to that one goes through the ones before."""
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
    """Return the options that `ssh -G` printed. No side effects."""
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
    me = process.user_name() or str(os.getuid())
    user = one("user", target.user) or me
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
        "u": me,
    }

    def paths(values: Sequence[str]) -> tuple[str, ...]:
        found = (_expand(value.strip('"'), tokens, env) for value in values if value not in _NOT_SET)
        return tuple(dict.fromkeys(os.path.expanduser(each) for each in found))

    may_ask = not yes("batchmode")
    named = [value for value in options.get("identityfile", ()) if value not in _NOT_SET]
    is_default = set(named) <= set(DEFAULT_IDENTITIES) and set(named) >= _USUAL
    if target.identity:  # `ssh -G -i` drops a missing file without a word, a mistyped one too
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
        text = f"`ssh -G {target.host}` did not end within {ASK_S:g} s"
        raise SshFailure(OTHER, text, "a `Match exec` of ~/.ssh/config may wait for something") from None


def _read_files(target: Target) -> dict[str, list[str]]:
    """Read the configuration files as fabric does, where there is no `ssh` program to ask."""
    import fabric
    from paramiko.ssh_exception import SSHException

    try:
        config = fabric.Config(runtime_ssh_path=target.config or None)
        found = config.base_ssh_config.lookup(target.host)
    except (OSError, SSHException, UnicodeDecodeError) as err:
        raise SshFailure(OTHER, f"the ssh configuration cannot be read: {err}", "correct ~/.ssh/config") from err
    options = {name: list(value) if isinstance(value, list) else [str(value)] for name, value in found.items()}
    for name, value in (("user", target.user), ("proxyjump", target.jump), ("identityfile", target.identity)):
        if value:
            options[name] = [value]
    if target.port is not None:
        options["port"] = [str(target.port)]
    return options
