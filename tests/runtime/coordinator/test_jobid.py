from __future__ import annotations

import random
import re

import pytest

from distrun_runtime.coordinator.jobstore import new_id
from distrun_runtime.errors import JobStoreError


def test_an_id_can_be_pronounced() -> None:
    assert re.fullmatch(r"[a-z]+-[a-z]+-[0-9a-f]{3}", new_id(lambda wanted: False))


def test_a_named_job_has_its_name_in_the_id() -> None:
    assert re.fullmatch(r"digits-[0-9a-f]{3}", new_id(lambda wanted: False, "digits"))


@pytest.mark.parametrize(
    ("name", "stem"), [("my job/1", "my-job-1"), ("../x", "x"), ("--rm", "rm"), ("übung", "bung"), ("a" * 99, "a" * 40)]
)
def test_a_name_becomes_a_file_name(name: str, stem: str) -> None:
    assert re.fullmatch(re.escape(stem) + "-[0-9a-f]{3}", new_id(lambda wanted: False, name))


def test_a_name_without_a_plain_letter_gets_words() -> None:
    assert re.fullmatch(r"[a-z]+-[a-z]+-[0-9a-f]{3}", new_id(lambda wanted: False, "///"))


def test_an_id_that_is_taken_is_not_given() -> None:
    first = new_id(lambda wanted: False, "", random.Random(1))
    assert new_id(lambda wanted: wanted == first, "", random.Random(1)) != first


def test_a_store_full_of_a_name_is_an_error_that_says_so() -> None:
    with pytest.raises(JobStoreError, match="another --name"):
        new_id(lambda wanted: True, "digits")
