"""What one copy consists of: the runs of rsync that bring the folder, and then the extras, to a host."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from distrun.sync import listing, options, remote, rules, tool
from distrun.sync.rules import Extra, Rules
from distrun_runtime.contract.folder import identity


@dataclass(frozen=True)
class Order:
    """A copy, the same for all hosts."""

    program: tool.Tool
    source: str
    """Absolute."""
    dst: str
    rules: Rules
    filters: tuple[str, ...]
    files_from: str
    """A file with the names of what is copied; empty: the filters say it."""
    scratch: str
    """A folder of ours, for that file and for links to extras."""
    delete: bool
    size: int
    files: int
    stall_s: float
    run: str
    """What tells this copy from any other into the same folder."""

    def runs(self, host: str, shell: Sequence[str], python: str = "") -> list[list[str]]:
        """Return the command lines for a host, in order. Makes links in `scratch`.

        `python` is an interpreter there to try first.
        """
        # Hosts may share the folder too.
        partial = "%s%s-%s" % (rules.PARTIAL, self.run, sha256(os.fsencode(host)).hexdigest()[:8])
        there = remote.rsync_path(
            self.dst,
            size=self.size,
            files=self.files,
            source=identity(self.source),
            delete=self.delete,
            partial=partial,
            python=python,
        )
        argv = options.sending(
            self.program,
            self.filters,
            os.path.join(self.source, ""),
            host,
            shell=shell,
            rsync_path=there,
            partial=partial,
            stall_s=self.stall_s,
            delete=self.delete,
            files_from=self.files_from,
        )
        found = [argv]
        for number, extra in enumerate(self.rules.extra):
            is_folder = os.path.isdir(extra.source)
            source = extra.source if is_folder else self._link(number, extra)
            below = extra.name if is_folder else os.path.dirname(extra.name)
            argv = options.sending(
                self.program,
                rules.extra_filters() if is_folder else (),
                os.path.join(source, ""),
                host,
                shell=shell,
                rsync_path=remote.rsync_path(os.path.join(self.dst, below), extra=True, partial=partial, python=python),
                partial=partial,
                stall_s=self.stall_s,
                follow=not is_folder,
            )
            found.append(argv)
        return found

    def _link(self, number: int, extra: Extra) -> str:
        """Return a folder that has only a link to an extra that is a file: so rsync gives the file its new name."""
        folder = os.path.join(self.scratch, str(number))
        os.makedirs(folder, exist_ok=True)
        link = os.path.join(folder, os.path.basename(extra.name))
        if not os.path.lexists(link):
            os.symlink(extra.source, link)
        return folder


def make_order(
    source: str, dst: str, wanted: Rules, scratch: str, *, delete: bool, size: int, files: int, stall_s: float
) -> Order:
    """Return the copy of `source` to `dst`. Asks rsync what it can do, and reads the rules of the source.

    Raises:
        SyncError: there is no rsync here.
        UsageError: the rules cannot be read.
    """
    program = tool.find()
    filters = rules.filters(wanted, source)
    chosen = listing.chosen(program, wanted, filters, source)
    files_from = ""
    if chosen is not None:
        files_from = os.path.join(scratch, "files")
        with open(files_from, "wb") as file:
            file.write(b"\0".join(chosen))
    return Order(
        program=program,
        source=source,
        dst=dst,
        rules=wanted,
        filters=tuple(filters),
        files_from=files_from,
        scratch=scratch,
        delete=delete,
        size=size,
        files=files,
        stall_s=stall_s,
        run=secrets.token_hex(4),
    )
