"""One worker of rounds of one key whose costs are looked at: BYTES ROUNDS threads|system|calls. Linux.

    threads   processor time of each thread of the job, how long it waited for a processor, and how often it slept
    system    system calls by name, by the program strace
    calls     Python and C calls by function (`calls`); servers are launched with `--server-import calls`

Rank 0 prints JSON lines; all of them are of all rounds together.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, List

import calls
import numpy as np
from growth_round import servers_of, tasks
from threads_round import role, threads

from distrun_runtime import kvstore

WARM_UP = 50
ATTACH_S = 20.0


@contextmanager
def threads_seen(processes: List[Path]) -> Iterator[None]:
    """Print a line for each thread that did something meanwhile: microseconds and counts of all rounds."""
    before = threads(processes)
    yield
    for folder, after in threads(processes).items():
        process = folder.parent.parent
        used = [new - old for new, old in zip(after, before.get(folder, (0, 0, 0, 0)), strict=True)]
        name = "main" if folder.name == process.name else (folder / "comm").read_text().strip()
        if used[0] > 0:
            print(json.dumps({"who": role(process), "process": process.name, "thread": name, "used": used}), flush=True)


@contextmanager
def system_calls_seen(who: str, process: str) -> Iterator[None]:
    """Print a line with the names and counts of a process's system calls meanwhile, or why it cannot be followed."""
    command = ["strace", "-f", "-c", "-p", process]
    tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    line = tracer.stderr.readline()
    if "attached" not in line:
        print(json.dumps({"who": who, "why": line.strip()}), flush=True)
    yield
    if "attached" not in line:
        return
    tracer.send_signal(signal.SIGINT)
    _, text = tracer.communicate(timeout=ATTACH_S)
    found = re.findall(r"^ *[0-9.]+ +[0-9.]+ +[0-9]+ +([0-9]+) +(?:[0-9]+ )? *([a-z_0-9]+)$", text, re.MULTILINE)
    rows = [[name, int(count)] for count, name in found if name != "total"]
    print(json.dumps({"who": who, "calls": rows}), flush=True)


@contextmanager
def calls_seen(recorder: calls.Recorder, servers: List[Path]) -> Iterator[None]:
    """Have this process and the servers print what they call meanwhile."""
    for server in servers:
        os.kill(int(server.name), signal.SIGUSR2)
    recorder.is_on = True
    yield
    recorder.print_report("worker")
    for server in servers:
        os.kill(int(server.name), signal.SIGUSR2)


def main() -> None:
    """Run the rounds; rank 0 looks."""
    size, rounds, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    looks = os.environ["DMLC_WORKER_ID"] == "0"
    recorder = calls.Recorder() if looks and what == "calls" else None
    with kvstore.create("dist_sync") as kv:
        gradient, result = np.ones(size // 4, np.float32), np.zeros(size // 4, np.float32)
        kv.init(0, gradient)
        times: List[float] = []

        def run(count: int) -> None:
            for _ in range(count):
                begin = time.perf_counter()
                kv.pushpull(0, gradient, out=result)
                times.append(time.perf_counter() - begin)

        run(WARM_UP)
        kv.barrier()
        if not looks:
            run(rounds)
        elif recorder is not None:
            with calls_seen(recorder, servers_of(tasks())):
                run(rounds)
        elif what == "threads":
            with threads_seen(tasks()):
                run(rounds)
            print(json.dumps({"times_s": times[WARM_UP:]}), flush=True)
        else:
            server = servers_of(tasks())[0].name
            # In this order: what a followed process starts is followed too, and cannot follow others.
            with system_calls_seen("server", server), system_calls_seen("worker", str(os.getpid())):
                run(rounds)
        kv.barrier()


if __name__ == "__main__":
    main()
