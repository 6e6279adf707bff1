"""Finds the address of this machine that its peers use for data, and the ports of a range in a random order.

Standard library only, Python 3.8. Linux and macOS.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import sys
from typing import List, Mapping, NamedTuple

from distrun_runtime.contract import environ
from distrun_runtime.errors import ContractError

_UP = 0x1  # IFF_UP, the same on Linux and the BSDs


class Interface(NamedTuple):
    """One address of one network interface."""

    name: str
    ip: str
    """Without a zone id."""
    prefix: int
    """Length of the network's prefix, bits."""


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("addr", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def interfaces() -> List[Interface]:
    """Return the addresses of the interfaces that are up, in the system's order; empty where it cannot tell."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        first = ctypes.POINTER(_Ifaddrs)()
        if libc.getifaddrs(ctypes.byref(first)) != 0:
            return []
    except (OSError, AttributeError):
        return []
    found = []
    try:
        entry = first
        while entry:
            row = entry.contents
            raw = _raw_address(row.addr)
            if raw and row.flags & _UP:
                mask = _raw_address(row.netmask, len(raw))
                prefix = bin(int.from_bytes(mask, "big")).count("1") if mask else len(raw) * 8
                name = row.name.decode("utf-8", "surrogateescape")
                found.append(Interface(name, str(ipaddress.ip_address(raw)), prefix))
            entry = row.next
    finally:
        libc.freeifaddrs(first)
    return found


def own() -> List[str]:
    """Return the addresses of this machine, those last that only this machine can reach."""
    rows = interfaces()
    loopback = [row for row in rows if ipaddress.ip_address(row.ip).is_loopback]
    return list(dict.fromkeys(row.ip for row in [*_reachable(rows), *loopback])) or ["127.0.0.1"]


def choose(interface: str = "", subnet: str = "", toward: str = "") -> str:
    """Return the IP address of this machine that peers should use.

    The first of these that is given decides; IPv4 goes before IPv6.

    Args:
        interface: exact names, in order of preference, with commas between them.
        subnet: a network as 10.0.0.0/8 or fd00::/8; an address of this machine inside it is taken.
        toward: IP address or name of a peer; the address from which this machine would send to it is taken.

    Returns:
        The address. With nothing given: the first that is not loopback, else 127.0.0.1.

    Raises:
        ContractError: no such interface, or no address in the subnet; the message lists what there is.
    """
    if interface:
        names = [name.strip() for name in interface.split(",") if name.strip()]
        rows = [row for name in names for row in _ipv4_first(interfaces()) if row.name == name]
        return _first(rows, f"no interface {interface!r} with an address", "--interface (or DMLC_INTERFACE)")
    if subnet:
        try:
            network = ipaddress.ip_network(subnet.strip(), strict=False)
        except ValueError as err:
            raise ContractError(f"--subnet {subnet}: {err}; write it as 10.0.0.0/8 or fd00::/8") from None
        rows = [row for row in _ipv4_first(interfaces()) if ipaddress.ip_address(row.ip) in network]
        return _first(rows, f"no address inside {subnet}", "--subnet")
    if toward:
        source = _source(toward)
        if source:
            return source
    rows = _reachable(_ipv4_first(interfaces()))
    return rows[0].ip if rows else "127.0.0.1"


def reachable(is_six: bool) -> List[str]:
    """Return this machine's addresses of IPv6 or IPv4 that other machines can use; without any, its loopback ones."""
    rows = [row for row in interfaces() if (":" in row.ip) == is_six]
    return [row.ip for row in _reachable(rows) or rows]


def _reachable(rows: List[Interface]) -> List[Interface]:
    # A link-local address means nothing without an interface, which each node calls as it likes.
    found = [(row, ipaddress.ip_address(row.ip)) for row in rows]
    return [row for row, ip in found if not ip.is_loopback and not ip.is_link_local]


def reached_at(env: Mapping[str, str]) -> str:
    """Return the address of this machine at which sshd was reached; empty without one that other machines can use.

    It is the launcher's own way here, and known to work.
    """
    words = environ.text("SSH_CONNECTION", env).split()  # client's address and port, server's address and port
    try:
        ip = ipaddress.ip_address(words[2].split("%")[0])
    except (IndexError, ValueError):
        return ""
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return "" if ip.is_loopback or ip.is_link_local or ip.is_unspecified else str(ip)


def settle(interface: str, subnet: str, toward: str, env: Mapping[str, str]) -> str:
    """Return the address that peers use for this machine, as its agent takes it: where sshd was reached, unless told.

    Args:
        interface: see `choose`; it goes before `subnet`, and either before where sshd was reached.
        subnet: see `choose`.
        toward: see `choose`.
        env: this process's environment, with what sshd says of the connection.

    Raises:
        ContractError: no address of this machine fits.
    """
    reached = "" if interface or subnet else reached_at(env)
    return reached or choose(interface, "" if interface else subnet, toward)


def resolve_host(name: str) -> str:
    """Return the IP address of a host, IPv4 if it has one; an IP address comes back as it is, without a zone id.

    Raises:
        ContractError: the name is not known, or looks like a number but is not an address.
    """
    text = name.strip().split("%")[0].strip("[]")
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        pass
    if not text or text.replace(".", "").isdigit():
        # The resolver would read a host called 116 as the address 0.0.0.116.
        raise ContractError(f"{name!r} is neither an IP address nor a host name; write the address in full")
    try:
        answers = socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)
    except OSError as err:
        raise ContractError(
            f"cannot resolve host {name!r} on {socket.gethostname()}: {err}; give an IP address instead"
        ) from None
    found = [str(answer[4][0]).split("%")[0] for answer in answers]
    return sorted(found, key=lambda ip: ":" in ip)[0]


def _ipv4_first(rows: List[Interface]) -> List[Interface]:
    """Order by use: IPv4, IPv6, and last addresses that mean nothing without a zone id."""
    return sorted(rows, key=lambda row: (":" in row.ip, row.ip.startswith("fe80:")))


def _first(rows: List[Interface], wrong: str, option: str) -> str:
    if rows:
        return rows[0].ip
    known = ", ".join(f"{row.name} {row.ip}/{row.prefix}" for row in interfaces()) or "none that the system would tell"
    raise ContractError(f"{wrong} on host {socket.gethostname()}; it has: {known}. Give one of them with {option}")


def _source(peer: str) -> str:
    """Return the address that the system would send from; nothing is sent. Empty if there is no route."""
    try:
        ip = resolve_host(peer)
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((ip, 9))
            return str(probe.getsockname()[0]).split("%")[0]
    except (ContractError, OSError):
        return ""


def _raw_address(pointer: int, size: int = 0) -> bytes:
    """Return the 4 or 16 bytes of the address in a sockaddr; `size` for a netmask, whose family may be absent."""
    if not pointer:
        return b""
    bsd = not sys.platform.startswith("linux")
    head = ctypes.string_at(pointer, 2)
    # BSD: length byte, family byte; Linux: family as a 16-bit number of this machine.
    family = head[1] if bsd else int.from_bytes(head, sys.byteorder)
    if not size:
        size = {int(socket.AF_INET): 4, int(socket.AF_INET6): 16}.get(family, 0)
    start = 4 if size == 4 else 8
    if not size:
        return b""
    if bsd:
        # Netmasks come cut short: what is missing is zero.
        return ctypes.string_at(pointer, max(head[0], start))[start : start + size].ljust(size, b"\0")
    return ctypes.string_at(pointer + start, size)


def ports_to_try(port_range: str) -> List[int]:
    """Return the ports to try, from a random one on; [0] (any) for an empty range.

    Raises:
        ContractError: not A-B with 1 <= A <= B <= 65535.
    """
    if not port_range.strip():
        return [0]
    first, dash, last = port_range.partition("-")
    try:
        low, high = int(first), int(last if dash else first)
    except ValueError:
        low = high = 0
    if not 1 <= low <= high <= 65535:
        raise ContractError(f"port range {port_range!r}: expected A-B with 1 <= A <= B <= 65535")
    # Jobs that start together should not all try the same ports first.
    at = low + int.from_bytes(os.urandom(2), "big") % (high - low + 1)
    return [*range(at, high + 1), *range(low, at)]
