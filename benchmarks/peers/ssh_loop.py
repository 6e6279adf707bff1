"""What people write who have no launcher: HOSTS WINDOW MARK WORD...: the words on every host, by the ssh client.

WINDOW: so many connect at a time (a host whose command has printed a line is connected); 0: all at once, a shell and
an ssh each, as launch.py does it. Output is merged. Ctrl-C ends the clients, which ends nothing on the hosts: then
`pkill -f MARK` is run there, with a window in as many at a time, without one host after host, as launch.py's users are
told to.
"""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import sys
from typing import Dict, List

SSH = ["ssh", "-n", "-o", "StrictHostKeyChecking=no"]


def start(host: str, command: str, is_plain: bool) -> subprocess.Popen[bytes]:
    argv = [*SSH, host, command]
    if is_plain:
        return subprocess.Popen(shlex.join(argv), shell=True, stdout=subprocess.PIPE)
    return subprocess.Popen(argv, stdout=subprocess.PIPE)


def loop(hosts: List[str], window: int, command: str) -> None:
    waiting, connecting = list(hosts), set()
    with selectors.DefaultSelector() as selector:
        children: Dict[int, subprocess.Popen[bytes]] = {}
        while waiting or children:
            while waiting and (not window or len(connecting) < window):
                child = start(waiting.pop(0), command, not window)
                assert child.stdout is not None
                fd = child.stdout.fileno()
                children[fd] = child
                connecting.add(fd)
                selector.register(fd, selectors.EVENT_READ)
            for key, _ in selector.select():
                data = os.read(key.fd, 65536)
                os.write(1, data)
                connecting.discard(key.fd)
                if not data:
                    selector.unregister(key.fd)
                    children.pop(key.fd).wait()


def main() -> None:
    path, window, mark = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with open(path, encoding="utf-8") as file:
        hosts = file.read().split()
    try:
        loop(hosts, window, shlex.join(sys.argv[4:]))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for at in range(0, len(hosts), max(window, 1)):
            some = hosts[at : at + max(window, 1)]
            for child in [subprocess.Popen([*SSH, host, "pkill -f " + mark]) for host in some]:
                child.wait()


if __name__ == "__main__":
    main()
