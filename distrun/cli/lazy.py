"""A group of commands whose modules are loaded when they are used, so that --help is quick."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """Commands by a table: name -> ("module:attribute", short help)."""

    def __init__(self, *args: Any, commands_table: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = commands_table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the table."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command."""
        if cmd_name not in self._table:
            return None
        module, _, attribute = self._table[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names.

        Raises:
            click.UsageError: there is none; says which one may have been meant.
        """
        name = args[0]
        if name not in self._table and not name.startswith("-"):
            import difflib  # for a mistake only

            near = difflib.get_close_matches(name, list(self._table), n=1)
            guess = "Did you mean %s?" % near[0] if near else "Known: %s." % ", ".join(self._table)
            raise click.UsageError("No such command %r. %s" % (name, guess), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._table.items()])
