"""`distrun sync`: copy the current directory to all hosts, and start nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from distrun.cli.common import hosts_of, takes
from distrun.cli.console import print_err, print_json, terminal_size
from distrun.errors import SyncError, UsageError
from distrun.options import COPYING, HOSTS
from distrun.requesting import current_folder
from distrun.sync.copier import REPORT_S, Copier, CopyRequest, error
from distrun.sync.rules import check_folder, make_rules
from distrun.sync.tree import scan
from distrun_runtime.contract import environ

if TYPE_CHECKING:
    from distrun.sync.copier import CopyResult
    from distrun.sync.tree import Tree
    from distrun_runtime.contract.control import CopyProgress

SCHEMA = "distrun.sync/1"
DST_DIR, *RULES, DELETE = COPYING
MEMBERS = ("host", "names", "ok", "same", "shared", "files", "code", "reason", "fix", "words")
"""Members of a result that have the same names in JSON."""
REFRESH_S = 0.25
"""Between two states of the line of progress on a terminal."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@takes(*HOSTS, DST_DIR._replace(required=True, default=None), *RULES, DELETE._replace(name="--delete/--sync-delete"))
@click.option("--dry-run", is_flag=True, help="Say what would be copied, and copy nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def sync(**options: Any) -> int:
    """Copy the current directory to DIR on every host.

    \b
    Examples:
      distrun sync -H hosts --sync-dst-dir '~/job'
      distrun sync --hosts gpu[01-08] --sync-dst-dir '~/job' --sync-exclude '*.ckpt'

    It is the copy that `distrun launch --sync-dst-dir DIR` makes: files that only a host has are kept, and nothing is
    replaced before all files have arrived. .git, __pycache__, environments and caches stay here, and what the patterns
    in .distrunignore name. --delete works in a directory that was made by a copy (or was empty), nowhere else. A host
    that fails does not keep the others from their copy; the exit code is then 4.
    """
    dst, delete = options["sync_dst_dir"], options["sync_delete"]
    check_folder(dst)
    source = current_folder()
    rules = make_rules(*(options[row.key] for row in RULES), cwd=source, delete=delete)
    _, backend, hosts = hosts_of(options, environ.snapshot(), "ssh")
    screen = _ProgressScreen(is_quiet=options["quiet"] or options["as_json"])
    tree = scan(source, rules)
    for warning in tree.warnings():
        screen.say(warning, "warning")
    screen.say(f"{tree.text()} to copy to each of {len(hosts)} hosts")
    names = [host.name for host in hosts]
    if options["dry_run"]:
        for name in names:
            screen.say(f"rsync {os.path.join(source, '')} -> {name}:{dst}")
        if options["as_json"]:
            print_json(SCHEMA, **_facts(source, options, tree), dry_run=True, hosts=[{"host": name} for name in names])
        return 0
    request = CopyRequest(
        source,
        dst,
        rules,
        delete,
        tree,
        keep_going=True,
        may_ask=True,
        on_progress=(lambda progress: screen.progress(str(progress))) if screen.is_live else None,
        report_s=REFRESH_S if screen.is_live else REPORT_S,
    )
    copier = backend.copier(hosts, request, screen)
    if not isinstance(copier, Copier):
        raise UsageError(
            f"--launcher {backend.name} copies files for a job only", "distrun launch --sync-dst-dir DIR ... does it"
        )
    try:
        results = copier.copy()
    finally:
        screen.progress("")
    problem = error(results)
    if options["as_json"]:
        code = SyncError.exit_code if problem else 0
        print_json(SCHEMA, **_facts(source, options, tree), exit_code=code, hosts=[as_json(each) for each in results])
        return code
    for result in results:
        if result.ok:
            screen.say(result.line())
    if problem is not None:
        raise problem
    return 0


def as_json(result: CopyResult) -> dict[str, Any]:
    """Return a result in its JSON form."""
    same = {name: getattr(result, name) for name in MEMBERS}
    return {**same, "bytes": result.size, "seconds": round(result.seconds, 3)}


def _facts(source: str, options: Mapping[str, Any], tree: Tree) -> dict[str, Any]:
    return {
        "source": source,
        "destination": options["sync_dst_dir"],
        "files": tree.files,
        "bytes": tree.size,
        "delete": options["sync_delete"],
    }


class _ProgressScreen:
    """Says things on stderr; on a terminal with one line of progress below, which is replaced."""

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self.is_live = os.isatty(2) and not is_quiet
        self._shown = ""

    def say(self, text: str, level: str = "info", progress: CopyProgress | None = None) -> None:
        """Print a message."""
        if level in ("warning", "error") or (level == "info" and not self._is_quiet):
            mark = "" if level == "info" else level + ": "
            print_err(f"{_CLEAR if self._shown else ''}distrun: {mark}{text}\n")
            self._shown = ""

    def progress(self, text: str) -> None:
        """Replace the line of progress; empty: take it away."""
        text = text[: max(0, terminal_size(2)[0] - 1)]
        if text != self._shown:
            print_err(_CLEAR + text if self._shown else text)
            self._shown = text


_CLEAR = "\r\x1b[K"
