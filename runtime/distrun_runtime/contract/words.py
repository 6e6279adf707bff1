"""Lists as a person reads them."""

from __future__ import annotations

from typing import Sequence


def listed(names: Sequence[str], most: int) -> str:
    """Return names with commas between them, and of more than `most` how many are left out: `a, b and 3 more`."""
    more = " and %d more" % (len(names) - most) if len(names) > most else ""
    return ", ".join(names[:most]) + more
