"""Connections of both sides over TLS: all that was read ahead is taken, both directions at once, and ends are seen."""

from __future__ import annotations

import datetime
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from slowness import scaled

from distrun_runtime.agent.channel import Channel, StreamSocket
from distrun_runtime.contract import agent_messages
from distrun_runtime.contract.session import Frame
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.channel import SessionChannel, SocketConnection

LIMIT_S = scaled(60.0)


def certificate(folder: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime(2020, 1, 1)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=36500))
        .sign(key, hashes.SHA256())
    )
    path = folder / "cert.pem"
    kept = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(kept + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture(params=["tls", "plain"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The coordinator's end and the agent's."""
    ours, theirs = socket.socketpair()
    if request.param == "tls":
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certificate(tmp_path))
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        wrapped: list[socket.socket] = []
        thread = threading.Thread(target=lambda: wrapped.append(server.wrap_socket(ours, server_side=True)))
        thread.start()
        theirs = client.wrap_socket(theirs)
        thread.join(LIMIT_S)
        ours = wrapped[0]
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_session_runs_both_ways_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    found: list[messages.Event] = []
    coordinator = SessionChannel("d1", greets=False)
    coordinator.start(found.append)
    coordinator.attach(SocketConnection(ours))
    agent = Channel(StreamSocket(theirs))
    size = 3 * 1024 * 1024
    heard: list[Frame] = []
    for number in range(8):
        coordinator.send(Frame({"type": "spawn", "n": number}, bytes(size)))
    coordinator.send_large({"type": "runtime"}, bytes(4 * size))
    said = 0
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        if said < 100 and agent.takes_output():
            agent.say(agent_messages.Output, data=bytes(250_000), task="w", stream="out", offset=250_000 * said)
            said += 1
        agent.flush()
        assert agent.connection is not None
        select.select([theirs], [theirs] if agent.wants_to_write else [], [], 0.05)
        heard += agent.receive()
        outputs = [event for event in found if isinstance(event, agent_messages.Output)]
        if len(outputs) == 100 and heard and heard[-1].header.get("last"):
            break
    assert [event.offset for event in outputs] == [250_000 * number for number in range(100)]
    spawns = [frame for frame in heard if frame.type == "spawn"]
    assert [(frame.header["n"], len(frame.body)) for frame in spawns] == [(number, size) for number in range(8)]
    assert sum(len(frame.body) for frame in heard if frame.type == "runtime") == 4 * size
    coordinator.close()
    while not agent.is_over and time.monotonic() < until:
        agent.flush()
        select.select([theirs], [], [], 1.0)
        agent.receive()
    assert agent.is_over, "it sees the end of its input"
    agent.cut()
    while not any(isinstance(event, messages.AgentLost) for event in found) and time.monotonic() < until:
        time.sleep(0.01)
    assert isinstance(found[-1], messages.AgentLost)


def test_kill_ends_a_connection_whose_other_end_does_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = ends
    before = threading.active_count()
    coordinator = SessionChannel("d1", greets=False)
    coordinator.start(lambda event: None)
    coordinator.attach(SocketConnection(ours))
    coordinator.send(Frame({"type": "spawn"}, bytes(10_000_000)))
    coordinator.kill()
    until = time.monotonic() + LIMIT_S
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before
