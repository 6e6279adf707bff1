"""How an agent finds its coordinator: several addresses, the pin, redials."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from dialkit import JOB, PIN, SECRET, WAIT_S, agent, credentials, hall, read

from distrun.backends import bootstrap
from distrun_runtime.agent import dial
from distrun_runtime.contract import enrolment
from distrun_runtime.coordinator.listener import Admitted, Register, pin_of, server_context
from distrun_runtime.errors import ContractError


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    with socket.socket() as bound:  # bound and not listening: nobody else gets it, and connections are refused
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_of_several_addresses_the_one_that_answers_is_found() -> None:
    with hall() as here, silent_port() as silent, closed_port() as closed:
        places = (("127.0.0.1", closed), ("127.0.0.1", silent), ("no.such.name", 1), ("127.0.0.1", here.port))
        with agent(here.credentials(addresses=places)) as dialing:
            dialing.dial()
            assert here.agent()[0] == "0"
            assert "refused" in dialing.dialer.problems[f"127.0.0.1:{closed}"]
            assert "no.such.name:1" in dialing.dialer.problems


def test_only_one_of_several_good_addresses_is_used() -> None:
    """A second claim would end the job."""
    with hall() as here:
        places = (("127.0.0.1", here.port), ("127.0.0.2", here.port), ("127.0.0.3", here.port))
        with agent(here.credentials(addresses=places)) as dialing:
            dialing.dial()
            here.agent()
            assert here.twice.empty()
            assert here.agents.empty()


def test_a_man_in_the_middle_gets_nothing() -> None:
    """Another certificate: the connection ends before the agent has sent a byte."""
    other = bootstrap.certificate(JOB)
    heard: list[bytes] = []

    def serve(listening: socket.socket) -> None:
        raw, _ = listening.accept()
        raw.settimeout(WAIT_S)
        with server_context(other).wrap_socket(raw, server_side=True) as tls, contextlib.suppress(OSError):
            tls.sendall(b'{"nonce":"%s","type":"enrol","version":1}\n' % (b"c" * 32))
            heard.append(tls.recv(4096))

    with hall() as here, socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        address = ("127.0.0.1", listening.getsockname()[1])
        with agent(here.credentials(addresses=(address,))) as dialing:
            dialing.dialer.begin()
            dialing.until(lambda: dialing.dialer.problems)
            thread.join(WAIT_S)
            [problem] = dialing.dialer.problems.values()
            assert problem == (
                f"its certificate is not this job's: SHA-256 {pin_of(other)}, expected {PIN}; nothing was sent"
            )
            assert heard in ([], [b""])


def test_a_coordinator_that_does_not_know_the_secret_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    anybody = Admitted("0", enrolment.welcome("0" * 64, "1d" * 32))
    monkeypatch.setattr(Register, "decide", lambda self, line, nonce, address: anybody)
    with hall() as here, agent(here.credentials()) as dialing:
        dialing.dialer.begin()
        dialing.until(lambda: dialing.dialer.problems)
        assert list(dialing.dialer.problems.values()) == ["the other side does not know this job's secret"]
        assert not dialing.found


def test_with_the_key_of_its_place_an_agent_dials_again() -> None:
    with hall() as here:
        with agent(here.credentials()) as first:
            dialed = first.dial()
            here.agent()
        with agent(here.credentials(key=dialed.key, is_redial=True)) as again:
            found = again.dial()
            place, connected = here.agent()
            assert place == "0"
            assert found.key == dialed.key
            connected.socket.setblocking(True)
            connected.socket.sendall(b"hello again")
            assert read(found.socket, 11) == b"hello again"
        assert here.twice.empty()


def test_an_agent_goes_on_dialing_until_there_is_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "PAUSES_S", (0.01, 0.05))
    with closed_port() as port, hall() as here:
        credentials = here.credentials(addresses=(("127.0.0.1", port),))
        with agent(credentials) as dialing:
            dialing.dialer.begin()
            dialing.until(lambda: dialing.dialer.problems)
            dialing.dialer._credentials = here.credentials()
            dialing.until(lambda: dialing.found)


def test_an_address_that_never_answers_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "ATTEMPT_S", 0.1)
    with silent_port() as port, agent(credentials(("127.0.0.1", port))) as dialing:
        dialing.dialer.begin()
        dialing.until(lambda: dialing.dialer.problems)
        assert dialing.dialer.problems == {f"127.0.0.1:{port}": "no answer within 0 s"}
        assert dialing.dialer.is_dialing


def test_a_stopped_dialer_leaves_nothing_in_the_loop() -> None:
    with silent_port() as port, agent(credentials(("127.0.0.1", port), ("127.0.0.1", port))) as dialing:
        dialing.dialer.begin()
        assert len(dialing.selector.get_map()) == 2
        dialing.dialer.close()
        assert not dialing.selector.get_map()
        assert dialing.dialer.next_at == float("inf")


def test_credentials_do_not_show_their_key() -> None:
    assert SECRET not in repr(credentials(("127.0.0.1", 1)))


def test_addresses_are_read_with_and_without_brackets() -> None:
    words = ["10.0.0.1:4711", "[fe80::1%eth0]:4712", "head:1"]
    found = dial.addresses(words)
    assert found == (("10.0.0.1", 4711), ("fe80::1%eth0", 4712), ("head", 1))
    assert [enrolment.with_port(*each) for each in found] == words


@pytest.mark.parametrize("word", ["", "10.0.0.1", ":1", "a:", "a:b"])
def test_what_is_no_address_is_refused(word: str) -> None:
    with pytest.raises(ContractError, match="is not ADDRESS:PORT"):
        dial.addresses([word])
