"""One worker that pulls rows of a row-sparse key, and as many values of a dense one: ROWS ROUNDS."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from report import WARM_UP

from distrun_runtime import kvstore
from distrun_runtime.kvstore import RowSparse

COLUMNS = 16


def main() -> None:
    """Run the rounds, check every one, and print the seconds of each kind of pull."""
    rows, rounds = int(sys.argv[1]), int(sys.argv[2])
    table = np.arange(rows * COLUMNS, dtype=np.float32).reshape(rows, COLUMNS)
    shuffled = np.random.default_rng(0).permutation(rows)[: rows // 2]
    ascending = np.sort(shuffled)
    sparse, array = RowSparse.empty(table.shape), np.empty((rows // 2, COLUMNS), np.float32)
    with kvstore.create("dist_sync") as kv:
        kv.init("table", RowSparse.from_dense(table))
        kv.init("dense", table[: rows // 2])
        times: dict[str, list[float]] = {}
        for _ in range(rounds + WARM_UP):
            for kind in ("dense", "array", "array, shuffled", "RowSparse", "RowSparse, shuffled"):
                numbers = shuffled if "shuffled" in kind else ascending
                kv.barrier()
                begin = time.perf_counter()
                if kind == "dense":
                    kv.pull("dense", out=array)
                else:
                    kv.row_sparse_pull("table", sparse if "RowSparse" in kind else array, row_ids=numbers)
                times.setdefault(kind, []).append(time.perf_counter() - begin)
                expected = table[: rows // 2] if kind == "dense" else table[ascending if "Row" in kind else numbers]
                if not np.array_equal(sparse.values if "RowSparse" in kind else array, expected):
                    sys.exit("rows_round.py: %s: other rows than were asked for" % kind)
    print(json.dumps({kind: its[WARM_UP:] for kind, its in times.items()}), flush=True)


if __name__ == "__main__":
    main()
