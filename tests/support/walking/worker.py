"""A worker whose steady steps are watched, and the server's with them: `worker.py FOLDER PID_OF_THE_SERVER WINDOWS`.

The first window is the warm-up: it has the start of the store, too. The two workers meet by files in the folder, as a
barrier of the store would be entered, too.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
from sitecustomize import NEXT

from distrun_runtime import kvstore

HEARTBEATS_S = 3 * float(os.environ["PS_HEARTBEAT_INTERVAL"])
"""How long the nodes are watched beside the steps, so that heartbeats are among what they enter."""
DEADLINE_S = 60

folder, server, windows = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
kv = kvstore.create("dist_sync")
values = np.ones(2_000_000, "float32")
out = np.empty_like(values)


def wait(done):
    end = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def meet(name):
    """Go on when both workers are here."""
    (folder / f"{name}.{kv.rank}").touch()
    wait(lambda: all((folder / f"{name}.{rank}").exists() for rank in range(2)))


def end_window(number):
    """Have this worker, and the server if this is the first one, write what they entered in a window."""
    meet(f"window {number} is over")
    pids = [os.getpid(), server] if kv.rank == 0 else [os.getpid()]
    for pid in pids:
        os.kill(pid, NEXT)
    wait(lambda: all(Path(f"{os.environ['WALK_OUT']}.{pid}.{number}.json").exists() for pid in pids))
    meet(f"window {number} is written")


kv.init("w", values)
kv.set_optimizer("sgd", learning_rate=0.1)
for number in range(windows):
    for _ in range(3):
        kv.push("w", values)
        kv.pull("w", out=out)
    time.sleep(HEARTBEATS_S)
    end_window(number)
kv.close()
