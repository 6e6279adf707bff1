from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from distrun_runtime.coordinator.jobstore import JobStore
from distrun_runtime.errors import JobStoreError


def test_an_id_can_be_pronounced(tmp_path: Path) -> None:
    assert re.fullmatch(r"[a-z]+-[a-z]+-[0-9a-f]{3}", JobStore(tmp_path).new_id())


def test_a_named_job_has_its_name_in_the_id(tmp_path: Path) -> None:
    assert re.fullmatch(r"digits-[0-9a-f]{3}", JobStore(tmp_path).new_id("digits"))


@pytest.mark.parametrize(
    ("name", "stem"), [("my job/1", "my-job-1"), ("../x", "x"), ("--rm", "rm"), ("übung", "bung"), ("a" * 99, "a" * 40)]
)
def test_a_name_becomes_a_file_name(name: str, stem: str, tmp_path: Path) -> None:
    assert re.fullmatch(re.escape(stem) + "-[0-9a-f]{3}", JobStore(tmp_path).new_id(name))


def test_a_name_without_a_plain_letter_gets_words(tmp_path: Path) -> None:
    assert re.fullmatch(r"[a-z]+-[a-z]+-[0-9a-f]{3}", JobStore(tmp_path).new_id("///"))


def test_an_id_that_is_taken_is_not_given(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    first = store.new_id("", random.Random(1))
    assert store.new_id("", random.Random(1)) == first
    (store.jobs / first).mkdir(parents=True)
    assert store.new_id("", random.Random(1)) != first


def test_a_store_full_of_a_name_is_an_error_that_says_so(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    store.jobs.mkdir()
    for number in range(16**3):
        (store.jobs / f"digits-{number:03x}").touch()
    with pytest.raises(JobStoreError, match="another --name"):
        store.new_id("digits")
