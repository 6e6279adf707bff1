"""Fixtures that every test may ask for."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from distrun_cli import distrun
from engines import engine
from hypothesis import HealthCheck, settings
from lab import lab, lab_of_session, pytest_pyfunc_call
from placement import placement
from realgpus import kind_of_gpu
from serverdevices import server_device
from sizes import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_itemcollected,
    pytest_runtest_setup,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from slowness import pytest_report_header, pytest_runtest_makereport
from sshd import ssh_config
from terminal import terminal

# Started in the background of a script, or by nohup, these are ignored, and distrun would rightly ignore them too.
_USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGQUIT: signal.SIG_DFL}
for number, usual in _USUAL.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# How wide and how colourful a screen is, is what a test says, not who runs it.
for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):
    os.environ.pop(name, None)

# As soon as numpy is imported, the threads of its OpenBLAS wait for work in a loop: 0.1 s of processor time for each of
# the thousands of processes that the tests start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The same examples in every run, so that none fails by luck, and no example is too slow on a busy machine. To look for
# new ones: --hypothesis-profile=default
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")

__all__ = [
    "cache_of_session",
    "distrun",
    "engine",
    "kind_of_gpu",
    "lab",
    "lab_of_session",
    "placement",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_itemcollected",
    "pytest_pyfunc_call",
    "pytest_report_header",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_testnodedown",
    "server_device",
    "ssh_config",
    "terminal",
]


def pytest_collection_finish() -> None:
    """Let no search for garbage look through the tests themselves: ten thousand objects, and all that they hold."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What agents keep between jobs is kept for one run of the tests, and not in the home of who runs them."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
