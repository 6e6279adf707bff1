"""`distrun exec`: run one command on all hosts, and show what they said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from distrun import formats
from distrun.cli.common import hosts_of, takes
from distrun.cli.console import print_err, print_json, print_out
from distrun.errors import UsageError
from distrun.fleet.commands import KEPT, Ran, run
from distrun.options import BY_KEY, HOSTS, LAUNCHER, seconds
from distrun_runtime.contract import environ, facts
from distrun_runtime.coordinator.failures import Problem

SCHEMA = "distrun.exec/1"
RULE = b"-" * 15 + b"\n"


@click.command("exec", context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@takes(*HOSTS, LAUNCHER)
@click.option("--cwd", default="", metavar="DIR", help="Run it there. [default: the home directory]")
@takes(BY_KEY["shell"], seconds("--timeout", "End it after so many seconds."))
@click.option("--no-fold", is_flag=True, help="Print lines as they come, each with its host.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def execute(command: tuple[str, ...], **options: Any) -> int:
    """Run COMMAND once on every host.

    \b
    Examples:
      distrun exec -H hosts nvidia-smi -L
      distrun exec --hosts gpu[01-08] 'df -h /data | tail -n 1'

    Hosts that said the same are shown once. Several words are executed exactly; a single word with blanks or shell
    characters is run with bash -c. Your environment is not forwarded. Background processes that the command leaves are
    ended. The exit code is the largest of all hosts: 124 for a host that took longer than --timeout, 3 for one that
    cannot be reached or whose output did not arrive completely.
    """
    _, backend, hosts = hosts_of(options, environ.snapshot(), options["launcher"])
    if not backend.needs_hosts and not options["launcher"]:
        raise UsageError("no hosts are given", "distrun exec -H FILE COMMAND, or --hosts A,B")
    is_streamed = options["no_fold"] and not options["as_json"]
    streams: dict[tuple[str, str], Lines] = {}

    def print_lines(host: str, stream: str, data: bytes) -> None:
        _print(stream, streams.setdefault((host, stream), Lines(host + ": ")).feed(data))

    argv = formats.to_argv(command, options["shell"])
    found = run(
        backend,
        hosts,
        argv,
        cwd=options["cwd"],
        limit_s=options["timeout"],
        on_output=print_lines if is_streamed else None,
        keep=0 if is_streamed else KEPT,
    )
    code = exit_code(found)
    if options["as_json"]:
        print_json(SCHEMA, command=command, exit_code=code, hosts=as_json(found))
        return code
    for (_, stream), lines in streams.items():
        _print(stream, lines.end())
    if not is_streamed:
        ran = {name: each for name, each in found.items() if isinstance(each, Ran)}
        _print("out", folded({name: bytes(each.out) for name, each in ran.items()}))
        _print("err", folded({name: bytes(each.err) for name, each in ran.items()}, "stderr"))
    for line in remarks(found):
        print_err(f"distrun: {line}\n")
    return code


def exit_code(found: Mapping[str, Ran | Problem]) -> int:
    """Return the command's exit code: the largest of all; a host with a problem counts as 3."""
    ran = [each for each in found.values() if isinstance(each, Ran)]
    has_problem = len(ran) < len(found) or any(each.problem for each in ran)
    return max([0, *(each.code or 0 for each in ran), facts.EXIT_PREFLIGHT if has_problem else 0])


def remarks(found: Mapping[str, Ran | Problem]) -> list[str]:
    """Return what went wrong, a line for each kind of it."""
    from distrun.hosts.ranges import fold

    codes: dict[str, list[str]] = {}
    lines = []
    for name, each in found.items():
        problem = each if isinstance(each, Problem) else each.problem
        if problem is not None:
            lines.append(f"error: {name}: {problem.text}")
            lines += [f"hint: {line}" for line in problem.fix.splitlines()]
        if isinstance(each, Ran) and each.code:
            text = f"it took too long and was ended, code {each.code}" if each.is_late else f"exit code {each.code}"
            codes.setdefault(text + (": " + each.reason if each.reason else ""), []).append(name)
    cut = [name for name, each in found.items() if isinstance(each, Ran) and each.is_cut]
    if cut:
        text = f"only the first {KEPT >> 20} MiB of the output are shown; --no-fold shows all as it comes"
        lines.append(f"warning: {fold(cut)}: {text}")
    return [f"{fold(names)}: {text}" for text, names in codes.items()] + lines


def as_json(found: Mapping[str, Ran | Problem]) -> list[dict[str, Any]]:
    """Return the JSON form of what hosts said."""
    rows: list[dict[str, Any]] = []
    for name, each in found.items():
        row: dict[str, Any] = {"host": name, "code": None, "stdout": "", "stderr": "", "timed_out": False, "cut": False}
        problem = each if isinstance(each, Problem) else each.problem
        told = None if problem is None else {"kind": problem.kind, "text": problem.text, "fix": problem.fix}
        row["problem"] = told
        if isinstance(each, Ran):
            out, err = (bytes(data).decode("utf-8", "replace") for data in (each.out, each.err))
            row.update(code=each.code, stdout=out, stderr=err, timed_out=each.is_late, reason=each.reason)
            row.update(cut=each.is_cut)
        rows.append(row)
    return rows


def _print(stream: str, data: bytes) -> None:
    if stream == "out":
        print_out(data)
    else:
        print_err(data.decode("utf-8", "surrogateescape"))


def folded(said: Mapping[str, bytes], what: str = "") -> bytes:
    """Return outputs of hosts, equal ones once, under the names of the hosts; empty ones are left out.

    Args:
        said: by host.
        what: added to each heading.
    """
    from distrun.formats import grouped
    from distrun.hosts.ranges import fold

    parts = []
    for data, names in grouped((data, host) for host, data in said.items() if data).items():
        count = f" ({len(names)})" if len(names) > 1 else ""
        heading = f"{fold(names)}{count}{', ' + what if what else ''}\n"
        parts += [RULE, heading.encode("utf-8", "surrogateescape"), RULE, data, b"" if data.endswith(b"\n") else b"\n"]
    return b"".join(parts)


class Lines:
    """Cuts a stream into whole lines, each with a prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode("utf-8", "surrogateescape")
        self._rest: list[bytes] = []
        """Pieces of the line that has not ended: adding to one long piece again and again would copy it each time."""

    def feed(self, data: bytes) -> bytes:
        """Add bytes and return the lines that are whole now."""
        if b"\n" not in data:
            self._rest.append(data)
            return b""
        *lines, rest = b"".join([*self._rest, data]).split(b"\n")
        self._rest = [rest]
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def end(self) -> bytes:
        """Return the line that was not ended."""
        rest, self._rest = b"".join(self._rest), []
        return self._prefix + rest + b"\n" if rest else b""
