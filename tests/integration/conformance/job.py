"""The training script of a job that runs rows of MXNet's conformance tests: parts by name, each with stores of its own.

Every worker runs every part and says so in a line, `PART: exact on worker 3 of 7`; one that is not exact ends the job.
"""

from __future__ import annotations

import sys
import time
from types import ModuleType

import compressed
import dense
import sparse
import training

MODULES: tuple[ModuleType, ...] = (dense, sparse, compressed, training)


def main(*names: str) -> None:
    """Run the parts `names` in their order."""
    parts = {name: part for module in MODULES for name, part in module.PARTS.items()}
    for name in names:
        begun = time.monotonic()
        kv = parts[name]()
        print("%s: exact on worker %d of %d" % (name, kv.rank, kv.num_workers), flush=True)
        if kv.rank == 0:
            print("%s took %.1f s" % (name, time.monotonic() - begun), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
