"""Tables of plain words: columns as wide as they need, the last one cut where there is no room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distrun.cli.console import render


def text(headings: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str] | None = None) -> str:
    """Return a table as text, for stdout. `styles`: colours of cells that hold exactly these words."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        is_last = index == len(headings) - 1
        width = None if is_last else max((len(row[index]) for row in (headings, *rows)), default=0)
        table.add_column(heading, no_wrap=True, overflow="ellipsis", min_width=width)
    for row in rows:
        cells = [escape(cell) for cell in row]
        table.add_row(
            *(
                "[%s]%s[/]" % ((styles or {})[raw], cell) if raw in (styles or {}) else cell
                for raw, cell in zip(row, cells, strict=True)
            )
        )
    return render(table)
