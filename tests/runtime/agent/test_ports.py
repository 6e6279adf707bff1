"""Held ports."""

from __future__ import annotations

import socket

import pytest

from distrun_runtime.agent import ports
from distrun_runtime.errors import ContractError


def test_held_port_is_within_the_range_and_not_given_twice() -> None:
    with ports.hold("127.0.0.1") as first:
        base = ports.number(first)
        low = max(1024, min(base, 65435))
        span = "%d-%d" % (low, low + 100)
        with ports.hold("127.0.0.1", span) as second, ports.hold("127.0.0.1", span) as third:
            numbers = {base, ports.number(second), ports.number(third)}
            assert len(numbers) == 3
            assert numbers - {base} <= set(range(low, low + 101))


def test_range_without_a_free_port_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        number = taken.getsockname()[1]
        with pytest.raises(ContractError, match="no free port in %d-%d" % (number, number)):
            ports.hold("127.0.0.1", "%d-%d" % (number, number))


@pytest.mark.parametrize("text", ["x", "0-5", "9-8", "1-65536", "1-2-3"])
def test_malformed_range_is_refused(text: str) -> None:
    with pytest.raises(ContractError, match="expected A-B"):
        ports.candidates(text)


def test_every_port_of_a_range_is_tried_once() -> None:
    assert sorted(ports.candidates("100-110")) == list(range(100, 111))
    assert ports.candidates("7") == [7]
    assert ports.candidates("") == [0]


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_address_family_of_the_host_is_held() -> None:
    with ports.hold("fd00::5") as held:
        assert held.family == socket.AF_INET6
