"""Command-line options for selecting and reaching hosts, shared by several commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from distrun.cli.common import seconds
from distrun.cli.console import print_err
from distrun.ssh.target import CONNECT_S, TRANSPORTS
from distrun.units import exact

if TYPE_CHECKING:
    from distrun.backends.base import Backend
    from distrun.hosts import Inventory
    from distrun_runtime.contract.plan import Host

Function = TypeVar("Function", bound=Callable[..., Any])

HOST_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("-H", "--hostfile", "hostfile", metavar="FILE", help="Hosts file; - reads standard input."),
    click.option("--hosts", "hosts", metavar="A,B", help="Hosts, instead of a file: names, user@host, gpu[01-08]."),
    click.option(
        "--hostfile-format", default="auto", metavar="FORM", help="How the hosts file is read. [default: auto]"
    ),
    click.option(
        "--transport",
        type=click.Choice(TRANSPORTS),
        default=TRANSPORTS[0],
        show_default=True,
        help="SSH client: the built-in library, or the ssh program (GSSAPI, FIDO keys, ControlMaster).",
    ),
    click.option("--strict-host-keys", is_flag=True, help="Refuse hosts whose key is not known yet."),
    click.option("--ssh-config", default="", metavar="FILE", help="ssh configuration. [default: ~/.ssh/config]"),
    seconds(
        "--connect-timeout",
        default=CONNECT_S,
        show_default=True,
        help="Seconds that one connection may take.",
    ),
)


def host_options(function: Function) -> Function:
    """Add the options to a command, in the order of the table."""
    for option in reversed(HOST_OPTIONS):
        function = option(function)
    return function


def reach_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Return what `Backend.reach` takes of a command's options; empty ones are left out."""
    found = {
        "transport": str(options["transport"]),
        "strict": "yes" if options["strict_host_keys"] else "",
        "config": str(options["ssh_config"] or ""),
        "connect_s": exact(options["connect_timeout"]),
    }
    return {name: value for name, value in found.items() if value}


def typed(options: Mapping[str, Any], inventory: Inventory | None) -> list[str]:
    """Return the words by which another command reaches the same hosts in the same way."""
    words: list[str] = []
    if options["hostfile"] == "-" and inventory is not None:
        from distrun.hosts import fold

        words += ["--hosts", fold(list(inventory.names))]  # what was on standard input has been read
    elif options["hostfile"] is not None:
        words += ["-H", options["hostfile"]]
    elif options["hosts"] is not None:
        words += ["--hosts", options["hosts"]]
    for name, default in (("hostfile_format", "auto"), ("transport", TRANSPORTS[0]), ("ssh_config", "")):
        if options[name] != default:
            words += ["--" + name.replace("_", "-"), options[name]]
    words += ["--strict-host-keys"] if options["strict_host_keys"] else []
    if options["connect_timeout"] != CONNECT_S:
        words += ["--connect-timeout", f"{options['connect_timeout']:g}"]
    return words + (["--launcher", options["launcher"]] if options.get("launcher") else [])


def typed_python(options: Mapping[str, Any]) -> list[str]:
    """Return the words by which another command looks at the same Python, activated in the same way."""
    words = ["--python", options["python"]] if options["python"] else []
    for word in options["activate"]:
        words += ["--activate", word]
    return words


def tell_warnings(inventory: Inventory) -> None:
    """Print what is odd about the hosts that were named."""
    for warning in inventory.warnings:
        print_err(f"distrun: warning: {warning}\n")


def find_hosts(options: Mapping[str, Any], env: Mapping[str, str]) -> Inventory | None:
    """Return the hosts that the options, or else the environment, name; None if nobody named any.

    Raises:
        HostsError: what names them cannot be read or understood.
    """
    from distrun import hosts

    return hosts.find(options["hostfile"], options["hosts"], env, form=options["hostfile_format"])


def hosts_of(
    options: Mapping[str, Any], env: Mapping[str, str], launcher: str = ""
) -> tuple[Inventory, Backend, list[Host]]:
    """Return the hosts that a command means, the backend that reaches them, and what it needs to do so.

    Without a `launcher` it is ssh where hosts are named, else local: this machine.

    Raises:
        HostsError: what names the hosts cannot be read or understood.
        UsageError: there is no such launcher.
    """
    from distrun import backends

    found = find_hosts(options, env)
    backend = backends.load(launcher or ("local" if found is None else "ssh"))
    inventory = backend.inventory(found)
    return inventory, backend, hosts_for(inventory, backend, reach_options(options))


def hosts_for(inventory: Inventory, backend: Backend, options: Mapping[str, str]) -> list[Host]:
    """Return each host once, with the way that the backend takes to it."""
    from distrun_runtime.contract.plan import Host

    hosts = []
    for spec in inventory.specs:
        way = backend.reach(spec, options)
        hosts.append(Host(spec.name, spec.addr, reach=way, interface=spec.iface, login=backend.login(way)))
    return hosts
