"""Users' modules on a server: there before it serves, or the server says what is missing and does not start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distrun_runtime.contract import environ
from distrun_runtime.errors import ContractError
from distrun_runtime.ps.imports import import_all


def test_modules_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_rules.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "imported_rules", raising=False)
    import_all(("imported_rules",), "d1")
    assert sys.modules["imported_rules"].VALUE == 7


def test_a_module_that_is_not_there_is_an_error_that_says_where_to_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ContractError) as caught:
        import_all(("no_such_rules",), "d1")
    text = str(caught.value)
    assert "names module no_such_rules, which cannot be imported on host d1: ModuleNotFoundError" in text
    assert "This server started in %s: " % tmp_path in text
    assert "--env PYTHONPATH=DIR" in text
    assert "--sync-dst-dir" in text


def test_what_a_module_raises_is_shown_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rules.py").write_text("\n1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ContractError, match=r"(?s)on host d1: ZeroDivisionError: .*broken_rules\.py\", line 2"):
        import_all(("broken_rules",), "d1")


def test_a_server_process_without_its_modules_ends_at_once_with_2(tmp_path: Path) -> None:
    given = {"DMLC_ROLE": "server", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_PORT": "1"}
    env = {**environ.snapshot(), **given, "DMLC_PS_ROOT_URI": "127.0.0.1", "DISTRUN_SERVER_IMPORT": "no_such_rules"}
    command = [sys.executable, "-m", "distrun_runtime", "server"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("distrun: error: DISTRUN_SERVER_IMPORT (--server-import) names module no_such_rules")
