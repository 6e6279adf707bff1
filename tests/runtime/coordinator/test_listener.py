"""Who is let in by the coordinator's listener, and what the others get."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import tempfile
from collections.abc import Iterator

import pytest
from dialkit import CERTIFICATE, JOB, PIN, SECRET, WAIT_S, Hall, agent, hall, read

from distrun_runtime.agent.dial import client_context
from distrun_runtime.contract import enrolment
from distrun_runtime.contract.enrolment import AGENT, CLAIM, COORDINATOR, REDIAL, Claim
from distrun_runtime.coordinator import listener
from distrun_runtime.coordinator.listener import Admitted, ConnectionRejected, Register
from distrun_runtime.errors import ContractError

NONCE = "c" * 32


def register() -> Register:
    return Register(JOB, SECRET, PIN, ["0", "1"], make_key=lambda: "1d" * 32)


def line(
    place: str = "0",
    *,
    key: str = SECRET,
    kind: str = CLAIM,
    job: str = JOB,
    pin: str = PIN,
    nonce: str = "a" * 32,
    heard: str = NONCE,
) -> bytes:
    proof = enrolment.proof(key, AGENT, kind, job=job, place=place, pin=pin, nonces=(heard, nonce))
    return enrolment.claim(Claim(kind == REDIAL, job, place, nonce, proof))


# Decisions


def test_a_claim_is_answered_by_a_proof_and_a_key_of_its_own() -> None:
    found = register().decide(line(), NONCE, "10.0.0.1:5")
    assert isinstance(found, Admitted)
    answer = json.loads(found.reply)
    proof = enrolment.proof(SECRET, COORDINATOR, CLAIM, job=JOB, place="0", pin=PIN, nonces=(NONCE, "a" * 32))
    assert answer == {"type": "welcome", "proof": proof, "key": "1d" * 32}


def test_the_agent_whose_answer_was_lost_may_claim_its_place_again() -> None:
    places = register()
    first = places.decide(line(), NONCE, "10.0.0.1:5")
    again = places.decide(line(heard="d" * 32), "d" * 32, "10.0.0.1:7")
    assert isinstance(first, Admitted)
    assert isinstance(again, Admitted)
    assert json.loads(first.reply)["key"] == json.loads(again.reply)["key"]


def test_a_redial_needs_the_key_of_its_place() -> None:
    places = register()
    early = places.decide(line(kind=REDIAL, key="1d" * 32), NONCE, "10.0.0.1:5")
    assert isinstance(early, ConnectionRejected), "nobody has that place yet"
    places.decide(line(), NONCE, "10.0.0.1:5")
    found = places.decide(line(kind=REDIAL, key="1d" * 32), NONCE, "10.0.0.1:6")
    assert isinstance(found, Admitted)
    assert "key" not in json.loads(found.reply)
    assert isinstance(places.decide(line(kind=REDIAL), NONCE, "10.0.0.1:7"), ConnectionRejected), (
        "the job's secret is not it"
    )
    assert isinstance(places.decide(line("1", kind=REDIAL, key="1d" * 32), NONCE, "10.0.0.1:8"), ConnectionRejected)


@pytest.mark.parametrize(
    "wrong",
    [
        line(key="5f" * 32),
        line(job="other"),
        line(pin="00" * 32),
        line(heard="d" * 32),
        line("7", key="5f" * 32),
        line(kind=REDIAL),
        line(key=""),
    ],
    ids=["secret", "job", "certificate", "nonce", "place and secret", "redial without a claim", "no secret"],
)
def test_a_wrong_proof_learns_nothing(wrong: bytes) -> None:
    places = register()
    found = places.decide(wrong, NONCE, "10.0.0.9:1")
    assert isinstance(found, ConnectionRejected)
    assert json.loads(found.reply) == {
        "type": "denied",
        "reason": "the proof is wrong: the secret, the key or the certificate is not that of this job",
    }


def test_an_agent_that_proves_itself_is_told_that_there_is_no_such_place() -> None:
    found = register().decide(line("7"), NONCE, "10.0.0.9:1")
    assert isinstance(found, ConnectionRejected)
    assert found.reason == "job calm-otter-7f3 has no place '7'"


# Sockets


def test_agents_of_all_places_are_let_in_and_may_send_and_receive() -> None:
    with hall("0", "1") as here:
        for place in ("0", "1"):
            with agent(here.credentials(place, nonce=place * 32)) as dialing:
                dialed = dialing.dial()
                name, connected = here.agent()
                assert name == place
                assert connected.address.startswith("127.0.0.1:")
                connected.socket.setblocking(True)
                connected.socket.sendall(b"to the agent")
                assert read(dialed.socket, 12) == b"to the agent"
                dialed.socket.sendall(b"to the coordinator")
                assert read(connected.socket, 18) == b"to the coordinator"


def test_a_second_agent_of_a_place_is_told_and_reported() -> None:
    with hall() as here, agent(here.credentials()) as one, agent(here.credentials(nonce="b" * 32)) as other:
        one.dial()
        here.agent()
        other.dialer.begin()
        other.until(lambda: other.dialer.denied)
        assert "has its agent already, at 127.0.0.1:" in other.dialer.denied
        found = here.twice.get(timeout=WAIT_S)
        assert found.place == "0"
        assert found.first != found.second


def test_the_wrong_secret_is_refused_for_good_and_reported() -> None:
    with hall() as here, agent(here.credentials(key="5f" * 32)) as dialing:
        dialing.dialer.begin()
        dialing.until(lambda: dialing.dialer.denied)
        address, reason = here.denied.get(timeout=WAIT_S)
        assert address.startswith("127.0.0.1:")
        assert "the proof is wrong" in reason
        assert here.agents.empty()


@contextlib.contextmanager
def tls(here: Hall) -> Iterator[ssl.SSLSocket]:
    with socket.create_connection(("127.0.0.1", here.port), WAIT_S) as raw, client_context().wrap_socket(raw) as found:
        yield found


def test_what_is_no_enrolment_ends_the_connection_after_one_line() -> None:
    with hall() as here, tls(here) as stranger:
        stranger.sendall(b"x" * 4 * enrolment.LINE_BYTES)
        _, reason = here.denied.get(timeout=WAIT_S)
        assert reason == f"a line of an enrolment is longer than {enrolment.LINE_BYTES} bytes"


def test_what_is_no_tls_ends_the_connection() -> None:
    with hall() as here, socket.create_connection(("127.0.0.1", here.port), WAIT_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        here.denied.get(timeout=WAIT_S)
        stranger.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(4096):
                pass


def test_a_connection_that_proves_nothing_is_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.2)
    with hall() as here, socket.create_connection(("127.0.0.1", here.port), WAIT_S) as silent, tls(here) as greeted:
        reasons = [here.denied.get(timeout=WAIT_S)[1] for _ in range(2)]
        assert all("had not proven itself" in reason for reason in reasons)
        silent.settimeout(WAIT_S)
        assert silent.recv(1) == b""
        read(greeted, 1)  # the first line
        with contextlib.suppress(ConnectionError):
            while greeted.recv(4096):
                pass


def test_connections_beyond_the_limit_wait_and_an_agent_gets_in_when_one_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "UNPROVEN_LIMIT", 2)
    with hall() as here, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(tls(here)) for _ in range(2)]
        for each in strangers:
            read(each, 1)  # both are served: the limit is reached
        dialing = stack.enter_context(agent(here.credentials()))
        dialing.dialer.begin()
        for _ in range(10):
            for key, _ in dialing.selector.select(0.02):
                key.data()
        assert not dialing.found
        strangers[0].close()
        dialing.until(lambda: dialing.found)


def test_ports_come_from_the_range_and_a_full_one_is_named() -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    with hall(port_range=f"{port}-{port}") as here:
        assert here.port == port
        with pytest.raises(ContractError, match=f"no free port in {port}-{port} on .*; give a wider --port-range"):
            Hall(["0"], port_range=f"{port}-{port}")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_both_families_reach_one_port() -> None:
    with hall() as here, agent(here.credentials(addresses=(("::1", here.port),))) as dialing:
        dialing.dial()
        assert here.agent()[1].address.startswith("[::1]:")


def test_the_key_is_never_in_a_file_that_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no memory files, it is removed at once."""
    monkeypatch.delattr("os.memfd_create", raising=False)
    named: list[str] = []
    true = tempfile.mkstemp

    def mkstemp() -> tuple[int, str]:
        fd, path = true()
        named.append(path)
        return fd, path

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    listener.server_context(CERTIFICATE)
    assert named
    assert not any(os.path.exists(path) for path in named)


def test_a_certificate_without_its_key_is_refused() -> None:
    with pytest.raises(ContractError, match="the certificate of the job cannot be used"):
        listener.server_context(CERTIFICATE.partition(b"-----BEGIN PRIVATE")[0])
