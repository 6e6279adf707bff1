"""What is printed, and told, of the exception that ends a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from distrun_runtime import kvstore, reporting
from distrun_runtime.errors import KVError, PeerLost, because_of

LOST = "pull of key 'w': worker-3@d1 (pid 7) failed: ValueError: my bug"


def lost() -> PeerLost:
    error = PeerLost(LOST)
    because_of(error, "worker-3")
    return error


def raised(act: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any will do
        act()
    return caught.value


def fail() -> None:
    raise lost()


def test_the_loss_of_a_peer_is_one_line_with_the_frames_of_the_script() -> None:
    text = reporting.printed(raised(fail))
    (line,) = text.splitlines()
    assert line.startswith("distrun: ended by the loss of worker-3: PeerLost: " + LOST)
    here = os.path.relpath(__file__)
    assert "%s:%d in fail" % (here, fail.__code__.co_firstlineno + 1) in line
    assert "in raised" in line
    assert "site-packages" not in line


def test_what_the_script_made_of_the_loss_is_in_the_line() -> None:
    def save() -> None:
        try:
            fail()
        except PeerLost as err:
            raise RuntimeError("cannot save\nthe model") from err

    (line,) = reporting.printed(raised(save)).splitlines()
    assert LOST + "; the script made of it RuntimeError: cannot save the model" in line
    assert "in save" in line
    assert "in fail" in line


def test_frames_of_the_runtime_are_folded_and_those_of_the_script_kept() -> None:
    def step() -> None:
        kvstore.create("local").push("w", np.ones(2))

    lines = reporting.printed(raised(step)).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert any(line.endswith("in step") for line in lines)
    assert '    kvstore.create("local").push("w", np.ones(2))' in lines
    (folded,) = [line for line in lines if "distrun_runtime;" in line]
    assert folded.endswith("frames of distrun_runtime; DISTRUN_TRACEBACK=full shows all]")
    assert [line for line in lines if line.startswith('  File "') and "distrun_runtime/" in line] == []
    assert lines[-1].startswith("distrun_runtime.errors.KVError: ")


def test_frames_of_the_script_below_those_of_the_runtime_are_kept() -> None:
    def updater(key: object, value: object, weight: object) -> None:
        raise ValueError("my bug")

    def train() -> None:
        kv = kvstore.create("local")
        kv.init("w", np.ones(2))
        kv.set_updater(updater)
        kv.push("w", np.ones(2))

    lines = reporting.printed(raised(train)).splitlines()
    assert any(line.endswith("in train") for line in lines)
    assert any(line.endswith("in updater") for line in lines)
    assert lines[-1] == "ValueError: my bug"


def test_an_error_that_may_be_ours_keeps_our_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kind: str) -> bool:
        raise ZeroDivisionError("our bug")

    broken.__code__ = broken.__code__.replace(co_filename=reporting.__file__)
    monkeypatch.setattr(kvstore, "is_dist", broken)
    lines = reporting.printed(raised(lambda: kvstore.create("local"))).splitlines()
    assert '  File "%s"' % reporting.__file__ in "\n".join(lines)
    assert any("kvstore.py" in line for line in lines)


def test_exceptions_that_came_from_one_another_are_all_shown_and_folded() -> None:
    def both() -> None:
        try:
            kvstore.create("local").push("w", np.ones(2))
        except KVError as err:
            raise OwnError("outer") from err

    text = reporting.printed(raised(both))
    assert "The above exception was the direct cause of the following exception:" in text
    assert "KVError" in text
    assert text.count("frames of distrun_runtime") == 1


class OwnError(ValueError):
    """An exception of the script's own."""


def test_the_folder_of_the_runtime_on_a_host_is_left_out_of_paths() -> None:
    folder = "/root/.cache/distrun/runtime/%s/" % ("2b" * 32)
    error = KVError("it failed")
    vars(error)["__notes__"] = [
        'On the server: File "%sdistrun_runtime/ops/optimizers/rule.py", line 3, in update' % folder
    ]
    text = reporting.printed(error)
    assert folder not in text
    if sys.version_info >= (3, 11):
        assert 'File "distrun_runtime/ops/optimizers/rule.py", line 3' in text


# Scripts.

SCRIPT = """
import sys
%s
from distrun_runtime import kvstore
from distrun_runtime import reporting
def step():
    kv = kvstore.create("dist_snyc")
%s
step()
"""


def run(folder: Path, before: str = "", after: str = "", **env: str) -> tuple[str, list[dict[str, str]]]:
    """Run a script whose store cannot be created; return its stderr and what it told its agent."""
    (folder / "train.py").write_text(SCRIPT % (before, after))
    reader, writer = os.pipe()
    more = {**os.environ, "DISTRUN_PUBLISH_FD": str(writer), **env}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env=more,
        pass_fds=[writer],
        capture_output=True,
        text=True,
        check=False,
    )
    os.close(writer)
    with os.fdopen(reader) as lines:
        return done.stderr, [json.loads(line) for line in lines]


def test_a_store_that_cannot_be_created_is_told_as_the_cause(tmp_path: Path) -> None:
    text, told = run(tmp_path)
    assert [fact["failed"].partition(" 'dist_snyc'")[0] for fact in told] == ["KVError: unknown store type"]
    assert "[1 frame of distrun_runtime; DISTRUN_TRACEBACK=full shows all]" in text
    assert 'line 7, in step\n    kv = kvstore.create("dist_snyc")' in text


@pytest.mark.parametrize("env", [{"DISTRUN_TRACEBACK": "full"}, {"PS_VERBOSE": "1"}])
def test_the_whole_traceback_is_printed_on_demand(env: dict[str, str], tmp_path: Path) -> None:
    text, told = run(tmp_path, **env)
    assert "distrun_runtime/kvstore.py" in text
    assert "frame of distrun_runtime" not in text
    assert len(told) == 1


HOOK = """
def mine(kind, error, where):
    sys.stderr.write("mine: %s\\n" % kind.__name__)
sys.excepthook = mine
"""


def test_an_excepthook_of_the_script_prints_and_ours_does_not(tmp_path: Path) -> None:
    text, told = run(tmp_path, before=HOOK)
    assert text == "mine: KVError\n"
    assert len(told) == 1


def test_an_excepthook_that_is_set_later_prints_too_and_the_agent_is_told(tmp_path: Path) -> None:
    text, told = run(tmp_path, before='import atexit\nfrom distrun_runtime import reporting\n'
                     'reporting.watch()\natexit.register(reporting.catch_up)' + HOOK)  # fmt: skip
    assert text == "mine: KVError\n"
    assert len(told) == 1


def test_the_end_of_a_forked_child_is_not_the_scripts(tmp_path: Path) -> None:
    before = (
        "import os\nfrom distrun_runtime import reporting\nreporting.watch()\n"
        "if os.fork() == 0:\n    raise ValueError('in the child')\nos.wait()"
    )
    text, told = run(tmp_path, before=before)
    assert "ValueError: in the child" in text
    assert [fact["failed"].partition(":")[0] for fact in told] == ["KVError"]


def test_a_local_store_outside_a_job_leaves_the_excepthook_alone() -> None:
    code = (
        "import sys; from distrun_runtime import kvstore; kvstore.create('local'); "
        "print(sys.excepthook is sys.__excepthook__)"
    )
    env = {name: value for name, value in os.environ.items() if name != "DISTRUN_PUBLISH_FD"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


NO_ZMQ = "import sys\nsys.modules['zmq'] = None\nimport numpy as np\nfrom distrun_runtime import kvstore\n"


def test_a_store_that_cannot_be_created_for_want_of_pyzmq_is_told_as_the_cause(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    env = {**os.environ, "DISTRUN_PUBLISH_FD": str(writer)}
    code = NO_ZMQ + "kvstore.create('dist_sync')"
    subprocess.run([sys.executable, "-c", code], env=env, pass_fds=[writer], capture_output=True, check=False)
    os.close(writer)
    with os.fdopen(reader) as lines:
        assert [json.loads(line)["failed"].partition(":")[0] for line in lines] == ["ModuleNotFoundError"]


def test_a_local_store_needs_no_pyzmq_to_work_and_to_be_saved(tmp_path: Path) -> None:
    code = NO_ZMQ + "kv = kvstore.create('local')\nkv.init('w', np.ones(2))\nkv.save_states(sys.argv[1])"
    env = {**os.environ, "DISTRUN_PUBLISH_FD": "2"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "states")], env=env, check=True)
