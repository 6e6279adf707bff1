"""Options and helpers that several commands share. Those that concern hosts are in `distrun.cli.common`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from distrun import formats, request
from distrun.cli.console import print_err
from distrun.errors import UsageError
from distrun.formats import exact
from distrun.ssh import CONNECT_S, TRANSPORTS
from distrun_runtime.contract import environ

if TYPE_CHECKING:
    from distrun.backends.base import Backend
    from distrun.hosts import Inventory
    from distrun_runtime.contract.plan import Host
    from distrun_runtime.coordinator.jobfolder import JobFolder
    from distrun_runtime.coordinator.jobstore import JobStore


Function = TypeVar("Function", bound=Callable[..., Any])


def seconds(*names: str, low: float | None = None, variable: str = "", **more: Any) -> Callable[[Function], Function]:
    """Return an option for a time in seconds, from `low` (more than 0 if it is None) to a year.

    An error names the option, the accepted range and what was found. `variable` is one of the environment table whose
    range the option has.
    """
    least = environ.BY_NAME[variable].low if variable else low

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
        return None if value is None else request.seconds("/".join(param.opts), value, least)

    return click.option(*names, type=str, callback=convert, metavar="S", **more)


def count(*names: str, low: int, high: int = request.MOST, **more: Any) -> Callable[[Function], Function]:
    """Return an option for a whole number from `low` to `high`. Errors are as those of `seconds`."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
        if value == "p" and "-n" in param.opts:
            raise UsageError("there is no option -np", "it is mpirun's; type -n N")
        return None if value is None else request.count("/".join(param.opts), value, low, high)

    return click.option(*names, type=str, callback=convert, metavar="N", **more)


def size(*names: str, low: int, **more: Any) -> Callable[[Function], Function]:
    """Return an option for a number of bytes from `low` on; 0 if it is not given, or `all`."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> int:
        return 0 if value in (None, "all") else formats.parse_size("/".join(param.opts), str(value), low)

    return click.option(*names, type=str, callback=convert, metavar="SIZE", **more)


def current_folder() -> str:
    """Return the path of the current directory.

    Raises:
        UsageError: it was removed.
    """
    try:
        return os.getcwd()
    except OSError as err:
        raise UsageError("the current directory does not exist any more", "cd to one that does") from err


def find_job(store: JobStore, wanted: str) -> JobFolder:
    """Return the job, as `found_job` does, of which is known here what its coordinator's host knows.

    Raises:
        NoSuchJob: there is none, or several ids begin so.
    """
    return fetched(found_job(store, wanted))


def found_job(store: JobStore, wanted: str) -> JobFolder:
    """Return the job, as `JobStore.find` does; if several have exactly that name the newest, and say so.

    Raises:
        NoSuchJob: there is none, or several ids begin so.
    """
    folder = store.find(wanted)
    count = len(store.named(wanted)) if folder.id != wanted else 0
    if count > 1:
        print_err(f"distrun: {wanted}: the newest of {count} jobs of that name, {folder.id}\n")
    return folder


def fetched(folder: JobFolder) -> JobFolder:
    """Return a job of which is known here what its coordinator's host knows; say so if that host cannot be asked."""
    from distrun import remote_jobs

    warning = remote_jobs.refreshed(folder)
    if warning:
        print_err(f"distrun: warning: {warning}\n")
    return folder


def agree(question: str, yes: bool, hint: str = "look first: --dry-run") -> None:
    """Ask on the terminal, unless `yes`. `hint`: for the error if stdin is no terminal.

    Raises:
        UsageError: stdin is no terminal.
        click.Abort: the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{question} stdin is not a terminal to answer on; -y answers yes", hint)
    click.confirm(question, abort=True, err=True)


def placed(folder: JobFolder) -> tuple[int, int]:
    """Return how many agents and tasks the plan in a job's folder has; 0 and 0 if there is none yet."""
    from distrun_runtime.errors import RuntimeFault

    try:
        if folder.is_unplanned:
            return 0, 0
        plan = folder.plan()
    except (OSError, RuntimeFault):
        return 0, 0
    return len(plan.all_places), len(plan.tasks)


# Command-line options for selecting and reaching hosts, shared by several commands.


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
