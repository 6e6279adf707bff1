"""Which address peers use, and which ports."""

from __future__ import annotations

import ipaddress

import pytest

from distrun_runtime.contract import address
from distrun_runtime.contract.address import Interface
from distrun_runtime.errors import ContractError

TWO = [
    Interface("lo", "127.0.0.1", 8),
    Interface("eth0", "fe80::1", 64),
    Interface("eth0", "fd00::5", 64),
    Interface("eth0", "192.0.2.5", 24),
    Interface("ib0", "fd11::7", 64),
    Interface("ib1", "198.51.100.7", 25),
]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "interfaces", lambda: TWO)


def test_this_machine_has_a_loopback_interface() -> None:
    found = address.interfaces()
    assert ("127.0.0.1", 8) in [(row.ip, row.prefix) for row in found]
    for row in found:
        assert "%" not in row.ip
        assert 0 <= row.prefix <= ipaddress.ip_address(row.ip).max_prefixlen


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("interface", "subnet", "expected"),
    [
        ("eth0", "", "192.0.2.5"),
        ("ib0", "", "fd11::7"),
        ("ib9, ib1,eth0", "", "198.51.100.7"),
        ("", "198.51.100.0/24", "198.51.100.7"),
        ("", "fd00::/16", "fd00::5"),
        ("lo", "198.51.100.0/24", "127.0.0.1"),
        ("", "", "192.0.2.5"),
    ],
)
def test_interface_then_subnet_then_first_that_is_not_loopback(interface: str, subnet: str, expected: str) -> None:
    assert address.choose(interface, subnet) == expected


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("interface", "subnet", "words"),
    [
        ("eth", "", "no interface 'eth' with an address"),
        ("", "10.0.0.0/8", "no address inside 10.0.0.0/8"),
        ("", "ten", "write it as 10.0.0.0/8"),
    ],
)
def test_error_says_what_there_is(interface: str, subnet: str, words: str) -> None:
    with pytest.raises(ContractError, match=words) as caught:
        address.choose(interface, subnet)
    if "write it" not in words:
        assert "eth0 192.0.2.5/24" in str(caught.value)


def test_address_toward_a_peer_is_the_one_packets_leave_from() -> None:
    assert address.choose(toward="127.0.0.1") == "127.0.0.1"


def test_machine_without_network_still_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "interfaces", list)
    assert address.choose(toward="no.such.host.invalid") == "127.0.0.1"


@pytest.mark.parametrize(
    ("name", "ip"),
    [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1"), ("fe80::1%eth0", "fe80::1"), ("localhost", "127.0.0.1")],
)
def test_hosts_become_addresses(name: str, ip: str) -> None:
    assert address.resolve_host(name) == ip


@pytest.mark.parametrize("name", ["116", "10.0.0", "", "no.such.host.invalid"])
def test_what_is_no_host_is_refused(name: str) -> None:
    """A host called 116 was once taken for 0.0.0.116."""
    with pytest.raises(ContractError):
        address.resolve_host(name)


def test_what_other_machines_can_reach_leaves_out_loopback_and_link_local(monkeypatch: pytest.MonkeyPatch) -> None:
    ips = ("127.0.0.1", "169.254.1.2", "10.0.0.1", "::1", "fe80::1", "fd00::1")
    rows = [address.Interface("eth%d" % number, ip, 24) for number, ip in enumerate(ips)]
    monkeypatch.setattr(address, "interfaces", lambda: rows)
    assert (address.reachable(False), address.reachable(True)) == (["10.0.0.1"], ["fd00::1"])
    monkeypatch.setattr(address, "interfaces", lambda: rows[:1])
    assert (address.reachable(False), address.reachable(True)) == (["127.0.0.1"], [])


@pytest.mark.parametrize("text", ["x", "0-5", "9-8", "1-65536", "1-2-3"])
def test_malformed_range_is_refused(text: str) -> None:
    with pytest.raises(ContractError, match="expected A-B"):
        address.ports_to_try(text)


def test_every_port_of_a_range_is_tried_once() -> None:
    assert sorted(address.ports_to_try("100-110")) == list(range(100, 111))
    assert address.ports_to_try("7") == [7]
    assert address.ports_to_try("") == [0]
