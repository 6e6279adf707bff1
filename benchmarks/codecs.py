"""Measure compression: the codecs on one core, many small keys, and rounds with and without it.

    scripts/install peers                        # once, for MXNet beside ours
    python benchmarks/codecs.py --write          # docs/benchmarks.md

The codecs run with numpy alone and with the compiled loops of numba (`pip install 'distrun[fast]'`), beside a plain
copy of the same elements and beside MXNet's own kernels. Ours take turns, so that a disturbance meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from distrun_runtime.arrays import compiled
from distrun_runtime.ops.compression import CODECS
from distrun_runtime.ops.partition import Shard
from distrun_runtime.ops.reduce import How
from distrun_runtime.ps.routing import portions_of
from distrun_runtime.store.compress import Compression, Compressor
from distrun_runtime.store.keys import KeyRecord

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
SHARDS = {"1 MiB": 1 << 20, "64 KiB": 1 << 16}
TOTAL = 1 << 25
"""Bytes of all shards together: more than the caches near a core hold."""
MAGNITUDE = 0.3
"""Standard deviation of the gradients."""
KEYS, KEY_ELEMENTS = 1000, 256
MODELS = ("resnet50", "small")
COMPRESSIONS = ("none", "fp16", "2bit")
RUN_TIMEOUT_S = 600

Way = Callable[[], object]


def timed(way: Way) -> float:
    """Return the CPU seconds that a call takes: other processes of the machine are not in them."""
    begin = time.thread_time()
    way()
    return time.thread_time() - begin


@contextmanager
def without_loops() -> Iterator[None]:
    """Let numpy do all the work."""
    before = dict(compiled._compiled)
    compiled._compiled.clear()
    try:
        yield
    finally:
        compiled._compiled.update(before)


def by_numpy(way: Way) -> Way:
    def run() -> None:
        with without_loops():
            way()

    return run


def by_turns(ways: dict[Any, Way], repeats: int) -> dict[Any, float]:
    """Return the median seconds of each way; the first turn is not counted."""
    times: dict[Any, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, way in ways.items():
            seconds = timed(way)
            if number:
                times[name].append(seconds)
    return {name: statistics.median(each) for name, each in times.items()}


# The codecs


def codec_ways(size: int) -> dict[tuple[str, str, str], Way]:
    """Return what is measured for shards of so many bytes, by codec, what it does, and by what."""
    n, count = size // 4, TOTAL // size
    rng = np.random.default_rng(0)
    values = [rng.normal(0, MAGNITUDE, n).astype(np.float32) for _ in range(count)]
    outs = [np.ones(n, np.float32) for _ in range(count)]

    def copy() -> None:
        for one, out in zip(values, outs, strict=True):
            np.copyto(out, one)

    ways: dict[tuple[str, str, str], Way] = {("copy", "", ""): copy}
    for name, codec in CODECS.items():
        params = codec.check({})
        residuals = [np.zeros(n, np.float32) if codec.has_residual else None for _ in range(count)]
        payloads = [np.zeros(codec.size(n, params), np.uint8) for _ in range(count)]

        def encode(
            codec: Any = codec, params: Any = params, residuals: Any = residuals, payloads: Any = payloads
        ) -> None:
            for one, residual, payload in zip(values, residuals, payloads, strict=True):
                codec.check_finite(one, residual)
                codec.write(one, residual, params, payload)

        def decode(adds: bool, codec: Any = codec, params: Any = params, payloads: Any = payloads) -> None:
            for payload, out in zip(payloads, outs, strict=True):
                codec.read(payload.data, out, params, adds=adds)

        encode()  # payloads to decode
        for what, way in {
            "encode": encode,
            "decode": lambda decode=decode: decode(False),
            "decode and add": lambda decode=decode: decode(True),
        }.items():
            ways[name, what, "numpy"] = by_numpy(way)
            if compiled.is_installed():
                ways[name, what, "compiled"] = way
    return ways


def mxnet_times(python: Path, size: int, repeats: int) -> dict[str, float]:
    """Return MXNet's seconds for the same bytes by name of the operator; empty: it is not there."""
    if not os.access(python, os.X_OK):
        say("MXNet is left out: no %s. To have it:  scripts/install peers" % python)
        return {}
    command = [str(python), str(PEERS / "mxnet_quantize.py"), str(size), str(TOTAL), str(repeats)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name: statistics.median(times) for name, times in json.loads(result.stdout).items()}


def codec_table(found: dict[str, dict[tuple[str, str, str], float]], mxnet: dict[str, dict[str, float]]) -> str:
    """Return GB/s of float32 elements."""

    def rate(seconds: float | None) -> str:
        return "" if seconds is None else "%.1f" % (TOTAL / seconds / 1e9)

    heads = ["%s, %s" % (what, by) for what in ("encode", "decode", "decode and add") for by in ("numpy", "compiled")]
    rows = ["| shards | codec | %s |" % " | ".join(heads), "|---" * (len(heads) + 2) + "|"]
    for label, times in found.items():
        for name in CODECS:
            cells = [rate(times.get((name, *head.split(", ")))) for head in heads]
            rows.append("| %s | %s | %s |" % (label, name, " | ".join(cells)))
        theirs = mxnet.get(label, {})
        if theirs:
            cells = [rate(theirs["QuantizeCPU"]), "", rate(theirs["DequantizeCPU"]), "", "", ""]
            rows.append("| %s | MXNet's 2bit | %s |" % (label, " | ".join(cells)))
        rows.append("| %s | a copy | %s |" % (label, " | ".join([rate(times["copy", "", ""])] + [""] * 5)))
    return "\n".join(rows)


# Many small keys


def key_ways() -> dict[tuple[str, str], Way]:
    """Return what a worker does with a message of small keys, by codec and by what."""
    ways: dict[tuple[str, str], Way] = {}
    rng = np.random.default_rng(0)
    given = [rng.normal(0, MAGNITUDE, KEY_ELEMENTS).astype(np.float32) for _ in range(KEYS)]
    records = [KeyRecord.of(number, number, value) for number, value in enumerate(given)]
    for name in CODECS:
        compressor = Compressor()
        compressor.set(Compression.of({"type": name}))
        setting = compressor.setting(0)
        shards = [(number, Shard(0, 0, KEY_ELEMENTS, number)) for number in range(KEYS)]
        shapes = [value.shape for value in given]
        (portion,) = portions_of(shards, shapes, [How(setting.number, setting.params)] * KEYS)

        def encode(compressor: Compressor = compressor, portion: Any = portion) -> None:
            for record, value in zip(records, given, strict=True):
                compressor.check(record, value)
            compressor.encode_all(portion, records, given)

        ways[name, "numpy"] = by_numpy(encode)
        if compiled.is_installed():
            ways[name, "compiled"] = encode
    return ways


def key_table(found: dict[tuple[str, str], float]) -> str:
    """Return microseconds a key."""
    rows = ["| codec | numpy | compiled |", "|---|---|---|"]
    for name in CODECS:
        times = [found.get((name, by)) for by in ("numpy", "compiled")]
        cells = ["" if each is None else "%.2f" % (each / KEYS * 1e6) for each in times]
        rows.append("| %s | %s |" % (name, " | ".join(cells)))
    return "\n".join(rows)


# Rounds


def systems(before: str) -> dict[str, dict[str, str]]:
    """Return the columns of the table of rounds: what each adds to the environment."""
    found: dict[str, dict[str, str]] = {}
    if before:
        found["before"] = {"PYTHONPATH": os.pathsep.join([before, str(Path(before) / "runtime")])}
    found["numpy"] = {"NUMBA_DISABLE_JIT": "1"}
    if compiled.is_installed():
        found["compiled"] = {}
    return found


def rounds(options: argparse.Namespace) -> dict[tuple[str, str, str], list[float]]:
    """Return milliseconds a round of each run, by model, compression and system."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for run in range(options.runs):
        for model in MODELS:
            for compression in COMPRESSIONS:
                for system, env in systems(options.before).items():
                    if compression == "none" and system == "numpy":
                        continue  # no codec: the same as compiled
                    milliseconds = measure_round(model, compression, env, options)
                    found.setdefault((model, compression, system), []).append(milliseconds)
                    say("run %d, %s, %s, %s: %.1f ms" % (run + 1, model, compression, system, milliseconds))
    return found


def measure_round(model: str, compression: str, env: dict[str, str], options: argparse.Namespace) -> float:
    """Run one job and return its median milliseconds a round."""
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "--launcher", "local"]
    command += ["-n", "2", "-s", "2", "--timeout", str(RUN_TIMEOUT_S)]
    command += [sys.executable, str(PEERS / "compressed_round.py"), compression, str(MAGNITUDE)]
    command += [str(options.rounds), model]
    # A job store of its own: a benchmark is nobody's job.
    with tempfile.TemporaryDirectory() as state:
        everything = {**os.environ, "XDG_STATE_HOME": state, **env}
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=everything, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode != 0 or len(lines) != 1:
        sys.exit(
            "codecs.py: exit code %d from:  %s\n%s" % (result.returncode, shlex.join(command), result.stderr[-2000:])
        )
    return statistics.median(json.loads(lines[0])["times_s"]) * 1e3


def round_table(found: dict[tuple[str, str, str], list[float]]) -> str:
    """Return milliseconds, and in brackets the ratio to `before`: the median of the runs' ratios, and their range."""
    names = [name for name in ("before", "numpy", "compiled") if any(name == system for _, _, system in found)]
    rows = ["| model | compression | %s |" % " | ".join(names), "|---" * (len(names) + 2) + "|"]
    for model in MODELS:
        for compression in COMPRESSIONS:
            cells = []
            before = found.get((model, compression, "before"))
            for name in names:
                times = found.get((model, compression, name))
                if times is None:
                    cells.append("")
                    continue
                cells.append("%.1f" % statistics.median(times))
                if before and name != "before":
                    ratios = [one / other for one, other in zip(times, before, strict=True)]
                    cells[-1] += " (%.2f, %.2f-%.2f)" % (statistics.median(ratios), min(ratios), max(ratios))
            rows.append("| %s | %s | %s |" % (model, compression, " | ".join(cells)))
    return "\n".join(rows)


HEADING = "Compression"
SECTION = """\
Measured by `benchmarks/codecs.py`. `numpy`: without numba. `compiled`: with it (`pip install 'distrun[fast]'`); the
bytes are the same.

**The codecs**, on one core: GB/s of float32 elements (those that are encoded, or that come out). 32 MiB of gradients
are in shards of the given size; their standard deviation is 0.3, and all parameters have their defaults. `encode` adds
the residual, checks that all sums are finite, writes the payload and leaves the rest in the residual. `decode and add`
is what a server does. `a copy` is `numpy.copyto` of the same shards. CPU time; medians of %d repetitions, by turns.

MXNet 1.9.1 is measured by its own profiler: the time within its operators `QuantizeCPU` (with the residual) and
`DequantizeCPU`, which a push to a `device` store with `2bit` compression runs on CPU arrays, with one thread. The goal
is 1.5 GB/s for encoding with `2bit`, and more than MXNet.

%s

**Many small keys**: microseconds a key that a worker takes to check and encode %d tensors of 1 KB in one call.

%s

**Rounds**: milliseconds of a push and a pull of all tensors in a `dist_sync` store; 2 workers, 2 servers. `resnet50`:
161 tensors, 102 MB; `small`: %d tensors of 1 KB. Only the push is compressed. In brackets the time divided by that of
the version before (%s): median of the runs' ratios, and their range. All processes share one machine, whose loopback is
faster than any network: this is what compression costs, not what it saves.

%s

%s
* Rounds: medians of %d runs, in which the systems take turns; a run's time is the median of %d rounds after a warm-up.
%s"""


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("codecs.py: " + text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print the tables, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9, help="repetitions (default 9, after 1 to warm up)")
    parser.add_argument("--runs", type=int, default=5, help="runs of the rounds (default 5; 0: no rounds)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds a run (default 8, after 6 to warm up)")
    parser.add_argument("--before", default="", help="a checkout of an earlier version, measured beside this one")
    parser.add_argument("--before-name", default="none", help="what the page calls that version")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="the peers' environments")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()

    for codec in CODECS.values():
        codec.prepare()
    found, mxnet = {}, {}
    for label, size in SHARDS.items():
        found[label] = by_turns(codec_ways(size), options.repeats)
        mxnet[label] = mxnet_times(options.peers / "mxnet" / "bin" / "python", size, options.repeats)
    first = codec_table(found, mxnet)
    print(first)
    second = key_table(by_turns(key_ways(), options.repeats))
    print(second)
    third = round_table(rounds(options))
    print(third)
    if options.write:
        import report

        note = "* %s\n" % options.note if options.note else ""
        circumstances = report.circumstances("codecs.py", "--note", "--before", "--before-name", "--peers")
        numbers = (options.repeats, first, KEYS, second, KEYS, options.before_name, third, circumstances)
        report.write(HEADING, SECTION % (*numbers, options.runs, options.rounds, note))


if __name__ == "__main__":
    main()
