"""Which engines a run of the tests must not do without: `DISTRUN_ENGINES=sge,slurm,mpi,yarn,kubernetes`, or some."""

from __future__ import annotations

import os


def is_required(name: str) -> bool:
    """Return whether the tests of an engine fail, instead of being skipped, where it cannot be brought up."""
    return name in os.environ.get("DISTRUN_ENGINES", "").split(",")
