"""Measure reading from an object store beside reading the same records from files.

    python benchmarks/remote.py --write          # docs/benchmarks.md

The store is a plain web server on the loopback address, in a process of its own, that answers ranges by sendfile: at
once, to measure the cost of our side, and after a delay, which only reading ahead can hide.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from distrun_runtime.data import ImageRecords, IRHeader, Reader, RecordFile, RecordWriter, pack_image

Way = Callable[[], int]

WORKS = ("records in order", "records shuffled", "images")
DELAY_S = 0.05
"""Delay of each answer of the slow server."""
SOURCES = ("file", "server", "disk cache", "slow server")


def serve(folder: Path, pipe: Connection) -> None:
    """Answer ranges of the files of a folder for ever, below `/slow/` after a delay; tell the port first."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path.startswith("/slow/"):
                time.sleep(DELAY_S)
            with open(folder / self.path.removeprefix("/slow").lstrip("/"), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin, end = map(int, re.findall(r"\d+", self.headers["Range"]))
                end = min(end + 1, size)
                self.send_response(206)
                self.send_header("ETag", '"1"')
                self.send_header("Content-Length", str(end - begin))
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
                self.end_headers()
                while begin < end:
                    begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, end - begin)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    pipe.send(server.server_port)
    server.serve_forever()


def write_records(folder: Path, megabytes: int) -> None:
    """Write records of 8 KB, and images of 256 x 256 as JPEG, with their indexes."""
    rng = np.random.default_rng(0)
    with RecordWriter(folder / "records.rec", folder / "records.idx") as file:
        for _ in range(megabytes * 125):
            file.write(rng.bytes(8000))
    smooth = rng.integers(256, size=(64, 16, 16, 3), dtype=np.uint8).repeat(16, axis=1).repeat(16, axis=2)
    with RecordWriter(folder / "images.rec", folder / "images.idx") as file:
        for i in range(megabytes * 5):
            image = smooth[i % 64] // 2 + rng.integers(128, size=(256, 256, 3), dtype=np.uint8)
            file.write(pack_image(IRHeader(0, i % 10, i), image.astype(np.uint8)))


class Lengths:
    """A data set of the lengths of records, for a `Reader`."""

    def __init__(self, records: RecordFile) -> None:
        self.records, self.expect = records, records.expect

    def __len__(self) -> int:
        return len(self.records)

    def read(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths, twice."""
        found = np.array([len(self.records[i]) for i in positions.tolist()])
        return found, found


def way(work: str, place: str) -> Way:
    """Return what reads all of a file at a place, a folder or an address."""
    name = place + ("/images" if work == "images" else "/records")

    def read() -> int:
        records = RecordFile(name + ".rec", name + ".idx")
        if work == "records in order":
            return sum(map(len, records))
        if work == "records shuffled":
            return sum(int(data.sum()) for data, _ in Reader(Lengths(records), 64, shuffle=True, seed=0))
        return sum(len(data) for data, _ in Reader(ImageRecords(records, (3, 224, 224)), 64))

    return read


def timed(read: Way) -> float:
    """Return the seconds that it takes."""
    begin = time.perf_counter()
    read()
    return time.perf_counter() - begin


def measure(folder: Path, url: str, runs: int) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each run, by work and source, which take turns. Both servers find no disk cache."""
    found: dict[tuple[str, str], list[float]] = {(work, source): [] for work in WORKS for source in SOURCES}
    for run in range(runs + 1):
        for (work, source), times in found.items():
            if source.endswith("server"):
                shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"]) / "distrun" / "data", ignore_errors=True)
            place = {"file": str(folder), "slow server": url + "/slow"}.get(source, url)
            seconds = timed(way(work, place))
            if run:  # the first warms up
                times.append(seconds)
    return found


def table(found: dict[tuple[str, str], list[float]]) -> str:
    """Return milliseconds, and the ratio to files: the median of the runs' ratios, and their range."""
    rows = [f"| work | {' | '.join(SOURCES)} |", "|---" * (len(SOURCES) + 1) + "|"]
    for work in WORKS:
        cells = []
        for source in SOURCES:
            cells.append(f"{statistics.median(found[work, source]) * 1e3:.0f}")
            if source != "file":
                ratios = [one / other for one, other in zip(found[work, source], found[work, "file"], strict=True)]
                cells[-1] += f" ({statistics.median(ratios):.1f}, {min(ratios):.1f}-{max(ratios):.1f})"
        rows.append(f"| {work} | {' | '.join(cells)} |")
    return "\n".join(rows)


HEADING = "Reading from an object store"


def section(text: str, options: argparse.Namespace, circumstances: str) -> str:
    """Return the body of the page's section."""
    note = f"* {options.note}\n" if options.note else ""
    return f"""\
Measured by `benchmarks/remote.py`, in one process. {options.megabytes} MB of records of 8 KB are read in order and,
by a `Reader`, shuffled; {options.megabytes * 5} JPEG images of 256 x 256 are decoded and cut.

`file`: from files. `server`: by ranges from a web server on the loopback address, with nothing in the disk cache.
`disk cache`: the same, with all of it in the disk cache. `slow server`: as `server`, with a delay of
{DELAY_S * 1e3:.0f} ms before each answer.

Milliseconds, and in brackets the time divided by that of files: median of the runs' ratios, and their range.

{text}

{circumstances}
* Medians of {options.runs} runs, in which the sources take turns, after one that is not counted.
{note}"""


def main() -> None:
    """Measure, print the table, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="runs (default 5, after 1 to warm up)")
    parser.add_argument("--megabytes", type=int, default=50, help="MB of records (default 50)")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        write_records(folder, options.megabytes)
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("fork").Process(target=serve, args=(folder, theirs), daemon=True)
        server.start()
        found = measure(folder, f"http://127.0.0.1:{ours.recv()}", options.runs)
        server.terminate()
    text = table(found)
    print(text)
    if options.write:
        import report

        report.write(HEADING, section(text, options, report.circumstances("remote.py", "--note")))


if __name__ == "__main__":
    main()
