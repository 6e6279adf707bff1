from __future__ import annotations

import pytest

from distrun.errors import UsageError
from distrun.sync import check_folder


@pytest.mark.parametrize(
    ("folder", "words", "hint"),
    [
        ("", "expected a directory on the hosts", ""),
        ("~a b/x", "expected ~/DIR or ~USER/DIR", "./~a b/x is a name"),
        ("$HOME/x", "variables are not expanded on the hosts", "write ~/x"),
        ("${HOME}", "variables are not expanded", "write ~"),
        ("$SCRATCH/x", "variables are not expanded", "./$SCRATCH/x is a name"),
        ("/", "is no directory for copies", "like /tmp/job"),
        ("//.", "is no directory for copies", ""),
        ("..", "is no directory for copies", ""),
    ],
)
def test_a_destination_that_cannot_be_meant_is_refused(folder: str, words: str, hint: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        check_folder(folder)
    assert hint in caught.value.hint


@pytest.mark.parametrize("folder", ["/tmp/job", "job", "./$x", "~/job", "~ann/job", "/a b/ü", "../job", "-x"])
def test_other_destinations_are_taken(folder: str) -> None:
    check_folder(folder)
