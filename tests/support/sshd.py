"""A real sshd of this user's on the loopback address, and channels to it."""

from __future__ import annotations

import contextlib
import getpass
import os
import queue
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sizes
from ports import free_port
from slowness import scaled

from distrun import shipping
from distrun.ssh.ask import Asker
from distrun.ssh.connector import Connector, SshChannel
from distrun.ssh.resolve import CONNECT_S, Target, remote_command
from distrun_runtime.contract import agent_messages
from distrun_runtime.coordinator import messages

PROGRAM = "/usr/sbin/sshd"
USER = getpass.getuser()
WAIT_S = scaled(60.0)


def key(path: Path, *options: str) -> Path:
    """Make a key without a passphrase (unless `options` say so); return its path."""
    silent = [] if "-N" in options else ["-N", ""]
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-f", path, *silent, *options], check=True)
    return path


class Sshd:
    """One sshd with a host key of its own. `id` may log in."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.id = key(folder / "id")
        self.host_key = key(folder / "host_key")
        self.known_hosts = folder / "known_hosts"
        self.authorized = folder / "authorized_keys"
        self.authorized.write_text((folder / "id.pub").read_text())
        self.log = folder / "log"
        self._options = options
        self._child: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self) -> None:
        """Start it; returns when it listens."""
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where root's sshd locks itself in
        for _ in range(5):
            self.port = self.port or free_port()
            if self._listens():
                return
            self.stop()
            self.port = 0  # somebody else was given it meanwhile
        raise AssertionError(self.log.read_text())

    def _listens(self) -> bool:
        options = {
            "ListenAddress": "127.0.0.1",
            "Port": self.port,
            "HostKey": self.host_key,
            "PidFile": "none",
            "AuthorizedKeysFile": self.authorized,
            "UsePAM": "no",
            "StrictModes": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "LogLevel": "VERBOSE",
            **self._options,
        }
        argv = [PROGRAM, "-D", "-f", "/dev/null", "-E", str(self.log)]
        for name, value in options.items():
            argv += ["-o", "%s=%s" % (name, value)]
        self.log.write_text("")
        self._child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            if "Server listening" in self.log.read_text():
                return True
            if self._child.poll() is not None:
                return False
            time.sleep(0.01)
        return False

    def stop(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def config(self, *lines: str, identity: bool = True, name: str = "config", hosts: str = "*") -> str:
        """Write an ssh configuration in which every name means this sshd; return its path."""
        given = [
            *lines,
            "HostName 127.0.0.1",
            "Port %d" % self.port,
            "UserKnownHostsFile %s" % self.known_hosts,
            "GlobalKnownHostsFile none",
        ]
        if identity:
            given += ["IdentityFile %s" % self.id, "IdentitiesOnly yes"]
        path = self.folder / name
        path.write_text("Host %s\n" % hosts + "".join("    %s\n" % line for line in given))
        return str(path)


@contextlib.contextmanager
def running(folder: Path, **options: object) -> Iterator[Sshd]:
    """Give a running sshd with further options."""
    sizes.require("ssh")
    if not os.path.exists(PROGRAM) or shutil.which("ssh") is None:
        pytest.skip("needs OpenSSH, client and server")
    server = Sshd(folder, **options)
    try:
        server.start()
        yield server
    finally:
        server.stop()


class Meeting:
    """Channels to some targets, their events by host, until each has an agent or has failed."""

    def __init__(
        self, *targets: Target, connector: Connector | None = None, command: str = "", asker: Asker | None = None
    ) -> None:
        self.connector = connector or Connector(asker)
        # A busy machine takes its time; who tests the time says how long.
        targets = tuple(replace(each, connect_s=WAIT_S) if each.connect_s == CONNECT_S else each for each in targets)
        self._queue: queue.SimpleQueue[messages.Event] = queue.SimpleQueue()
        self.channels = {
            target.host: SshChannel(
                target.host,
                target,
                command or remote_command(shipping.BOOT, target.python),
                shipping.agent(),
                self.connector,
            )
            for target in targets
        }
        self.events: dict[str, list[messages.Event]] = {name: [] for name in self.channels}

    def __enter__(self) -> Meeting:
        for channel in self.channels.values():
            channel.start(self._queue.put)
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self.channels.values():
            channel.kill()
        for channel in self.channels.values():
            assert channel.join(WAIT_S)
        self.connector.close()

    def wait(self, *kinds: type, limit_s: float = WAIT_S) -> dict[str, Any]:
        """Return each host's first event of one of these kinds (an agent, or none, if no kind is given)."""
        wanted = kinds or (agent_messages.AgentHello, agent_messages.StartFailed, messages.AgentLost)
        until = time.monotonic() + limit_s
        while True:
            found = {
                name: next((event for event in had if isinstance(event, wanted)), None)
                for name, had in self.events.items()
            }
            if all(found.values()):
                return found
            event = self._queue.get(timeout=max(until - time.monotonic(), 0.001))
            self.events[event.host].append(event)  # type: ignore[union-attr]


def meet(target: Target, **options: Any) -> Any:
    """Return the first word of or about one host: AgentHello, StartFailed or AgentLost."""
    with Meeting(target, **options) as meeting:
        return meeting.wait()[target.host]


class Deaf:
    """A listener on the loopback address that takes connections and says nothing."""

    def __init__(self) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port = self._sock.getsockname()[1]
        self._taken: list[socket.socket] = []
        self.arrived = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._sock.accept()
                self._taken.append(sock)
                self.arrived.set()

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for sock in self._taken:
            sock.close()


class Hole:
    """A port of the loopback address that answers nothing: its queue is full, and the system drops what comes."""

    def __init__(self) -> None:
        self._sock = socket.socket()
        self._sock.bind(("127.0.0.1", 0))
        self._sock.listen(0)
        self.port = self._sock.getsockname()[1]
        self._waiting: list[socket.socket] = []
        while len(self._waiting) < 64:
            sock = socket.socket()
            sock.settimeout(0.5)
            self._waiting.append(sock)
            try:
                sock.connect(("127.0.0.1", self.port))
            except TimeoutError:
                return
        pytest.skip("this system takes connections that nobody asked for")

    def close(self) -> None:
        for sock in (*self._waiting, self._sock):
            sock.close()


class PasswordServer:
    """An ssh server that lets anybody in who knows the password, and runs commands as this user."""

    def __init__(self, folder: Path, password: str, interactive: bool = False) -> None:
        import paramiko

        self._key = paramiko.PKey.from_path(key(folder / "server_key"))
        self._password = password
        self._methods = "keyboard-interactive" if interactive else "password"
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port = self._sock.getsockname()[1]
        self.tries: list[str] = []
        self._transports: list[Any] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        import paramiko

        server = self

        class Interface(paramiko.ServerInterface):  # type: ignore[misc]  # paramiko has no types
            def get_allowed_auths(self, username: str) -> str:
                return server._methods

            def check_auth_password(self, username: str, password: str) -> int:
                server.tries.append(password)
                return int(paramiko.AUTH_SUCCESSFUL if password == server._password else paramiko.AUTH_FAILED)

            def check_auth_interactive(self, username: str, submethods: str) -> Any:
                return paramiko.InteractiveQuery("", "", ("Password: ", False))

            def check_auth_interactive_response(self, responses: list[str]) -> int:
                return self.check_auth_password("", responses[0])

            def check_channel_request(self, kind: str, chanid: int) -> int:
                return int(paramiko.OPEN_SUCCEEDED)

            def check_channel_exec_request(self, channel: Any, command: bytes) -> bool:
                threading.Thread(target=server._execute, args=(channel, command), daemon=True).start()
                return True

        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._sock.accept()
                transport = paramiko.Transport(sock)
                transport.add_server_key(self._key)
                self._transports.append(transport)
                with contextlib.suppress(Exception):
                    transport.start_server(server=Interface(), event=threading.Event())

    def _execute(self, channel: Any, command: bytes) -> None:
        pipe = subprocess.PIPE
        child = subprocess.Popen(["/bin/sh", "-c", command], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
        assert child.stdout is not None

        def tell() -> None:
            with contextlib.suppress(OSError):
                while data := child.stderr.read(65536):  # type: ignore[union-attr]
                    channel.sendall_stderr(data)

        def up() -> None:
            with contextlib.suppress(OSError):
                while data := channel.recv(65536):
                    child.stdin.write(data)  # type: ignore[union-attr]
            with contextlib.suppress(OSError):
                child.stdin.close()  # type: ignore[union-attr]

        threading.Thread(target=up, daemon=True).start()
        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        with contextlib.suppress(OSError):
            while data := child.stdout.read(65536):
                channel.sendall(data)
        child.stdout.close()
        teller.join()
        child.stderr.close()
        code = child.wait()
        with contextlib.suppress(Exception):  # whoever asked may have gone
            channel.send_exit_status(code)
            channel.close()

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for transport in self._transports:
            transport.close()


@pytest.fixture
def ssh_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of an ssh configuration that leaves a password as the only way in."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    path = tmp_path / "config"
    path.write_text(
        "Host *\n  HostName 127.0.0.1\n  UserKnownHostsFile %s/kh\n  IdentityFile /nowhere/key\n" % tmp_path
    )
    return str(path)
