"""Output that cannot be written is an error with a code of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from distrun_cli import Distrun
from slowness import scaled

from distrun_runtime.contract import facts

FULL = Path("/dev/full")
SAID = b"distrun: error: stdout cannot be written: No space left on device\n"

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("--version",),
        ("launch", "--help"),
        ("launch", "-n", "1", "-s", "0", "--launcher", "local", "--dry-run", "true"),
        ("launch", "-n", "1", "-s", "0", "--launcher", "local", "--dry-run", "--json", "true"),
        ("status",),
        ("status", "--json"),
        ("top", "--plain"),
        ("hosts", "--hosts", "a,b"),
        ("hosts", "--hosts", "a,b", "--json"),
        ("gc", "--dry-run"),
    ],
    ids=" ".join,
)
def test_output_that_cannot_be_written_is_an_error_of_its_own(words: tuple[str, ...], distrun: Distrun) -> None:
    done = distrun.answer(*words, stdout=FULL)
    assert (done.returncode, done.stderr.startswith(SAID)) == (facts.EXIT_OUTPUT, True), done.stderr
    assert b"internal error" not in done.stderr
    assert distrun.answer(*words).returncode in (0, 2), "the next command knows nothing of it"


def test_a_job_whose_output_cannot_be_printed_goes_on_and_its_end_says_so(distrun: Distrun) -> None:
    with FULL.open("wb") as full:
        child = distrun.begin("-n", "1", "-s", "0", "echo one; echo two; touch over", stdout=full)
        code = child.wait(scaled(60))
    said = (distrun.home / "err").read_bytes()
    assert (code, (distrun.work / "over").exists()) == (facts.EXIT_OUTPUT, True), said
    assert said.count(b"stdout cannot be written: No space left on device") == 1, said
    assert b"distrun logs " + distrun.job.name.encode() in said
    assert json.loads((distrun.job / "outcome.json").read_text())["exit_code"] == 0
    for words in (("logs", distrun.job.name), ("logs", "--json", distrun.job.name), ("status", distrun.job.name)):
        done = distrun.answer(*words, stdout=FULL)
        assert (done.returncode, done.stderr.startswith(SAID)) == (facts.EXIT_OUTPUT, True), done.stderr


def test_the_code_of_a_job_that_failed_stands_though_nothing_could_be_printed(distrun: Distrun) -> None:
    with FULL.open("wb") as full:
        assert distrun.begin("-n", "1", "-s", "0", "echo one; exit 3", stdout=full).wait(scaled(60)) == 3


def test_a_reader_that_has_gone_is_no_error(distrun: Distrun) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        children = [
            distrun.start(*words, stdout=pipe) for words in (("status",), ("hosts", "--hosts", "a"), ("--help",))
        ]
    assert [child.wait(scaled(60)) for child in children] == [0, 0, 0]
    assert (distrun.home / "err").read_bytes() == b""
