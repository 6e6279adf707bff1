"""python -m distrun_runtime scheduler|server: one process of a job. The launcher starts these; by hand, set DMLC_*."""

from __future__ import annotations

import gc
import sys

from distrun_runtime.contract import environ, process, streams
from distrun_runtime.errors import ContractError, RuntimeFault

USAGE = "usage: python -m distrun_runtime scheduler|server"


def main(arguments: list[str]) -> int:
    """Run the role named by the only argument; return the exit code."""
    streams.open_streams()
    if arguments in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{__doc__}")
        return 0
    if len(arguments) != 1 or arguments[0] not in ("scheduler", "server"):
        print(f"{USAGE}\ngot: {' '.join(arguments) or 'no role'}", file=sys.stderr)
        return 2
    role = arguments[0]
    process.outlive_tasks_signals()
    try:
        given = environ.read("DMLC_ROLE")
        if given not in (None, role):
            raise ContractError(f"DMLC_ROLE={given}, but the command says {role}: make them agree")
        was_on = gc.isenabled()
        gc.disable()  # nothing that is imported is garbage, and looking for it would take a twentieth of the start
        try:
            from distrun_runtime.ps.node import serve

            gc.freeze()
        finally:
            if was_on:
                gc.enable()
        return serve(role)
    except ContractError as err:
        print(f"distrun: error: {err}", file=sys.stderr)
        return 2
    except (RuntimeFault, OSError) as err:
        print(f"distrun: error: {err}", file=sys.stderr)
        return 1
    except ImportError as err:
        print(f"distrun: error: {role}: {sys.executable} on this host has no {err.name}", file=sys.stderr)
        # Many systems let pip install into virtual environments only.
        install = "-m pip install numpy pyzmq"
        if sys.prefix == sys.base_prefix:
            install = "-m venv ~/venv && ~/venv/bin/pip install numpy pyzmq, then use ~/venv/bin/python"
        print(f"distrun: hint: {sys.executable} {install}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
