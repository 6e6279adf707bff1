"""Programs that the agent runs for itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distrun_runtime.agent.commands import is_missing

DENIED = PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("error", "program", "expected"),
    [
        (FileNotFoundError(2, "No such file or directory"), b"here", True),
        (DENIED, b"nowhere", True),  # a folder of PATH may not be entered
        (DENIED, b"here", False),
        (DENIED, b"./here", False),
        (ValueError("embedded null byte"), b"here", False),
    ],
)
def test_a_program_that_is_in_no_folder_of_path_is_missing_whatever_the_system_says(
    tmp_path: Path, error: Exception, program: bytes, expected: bool
) -> None:
    (tmp_path / "here").touch()
    assert is_missing(error, program, {b"PATH": b"/not/to/be/entered:" + os.fsencode(tmp_path)}) is expected
