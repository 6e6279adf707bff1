"""The user's configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from distrun.errors import UsageError
from distrun.options import configured


def write(folder: Path, text: str) -> dict[str, str]:
    path = folder / "distrun" / "config.ini"
    path.parent.mkdir()
    path.write_text(text)
    return {"XDG_CONFIG_HOME": str(folder)}


def test_an_engine_gets_its_section_and_percent_signs_are_plain(tmp_path: Path) -> None:
    env = write(tmp_path, "[slurm]\nsubmit = /opt/bin/sbatch\nargs = --comment=50%\n[sge]\npe = mpi\n")
    assert configured("slurm", env) == {"submit": "/opt/bin/sbatch", "args": "--comment=50%"}
    assert configured("yarn", env) == {}


def test_no_file_is_an_empty_one(tmp_path: Path) -> None:
    assert configured("slurm", {"XDG_CONFIG_HOME": str(tmp_path)}) == {}


def test_a_file_that_is_wrong_is_told_with_its_path_and_line(tmp_path: Path) -> None:
    env = write(tmp_path, "[slurm]\nsubmit\n")
    with pytest.raises(UsageError, match=r"config\.ini.*line *2") as caught:
        configured("slurm", env)
    assert caught.value.hint == f"correct {tmp_path}/distrun/config.ini"
