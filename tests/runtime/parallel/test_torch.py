"""Placement and pipeline with torch: the cases of tests/support/parallel_program.py, run by one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from peers import python_of
from scriptjobs import outcomes_of

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "support" / "parallel_program.py"
TEXT = PROGRAM.read_text("utf-8").partition("# --- the cases")[2]
CASES = [name for name in re.findall(r"^def (\w+)\(\) -> None:", TEXT, re.MULTILINE) if name != "main"]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of(PROGRAM, python_of("torch"))


@pytest.mark.peers
@pytest.mark.parametrize("case", CASES)
def test_with_torch(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "", outcomes[case]


@pytest.mark.peers
def test_every_case_was_run(outcomes: dict[str, str]) -> None:
    assert set(outcomes) == set(CASES)
    assert len(CASES) > 40
