"""A task's environment. (Starting is tested with a real agent, in tests/integration.)"""

from __future__ import annotations

import os

from distrun_runtime.agent.tasks import environment, exact


def test_stale_names_go_first_and_the_later_addition_wins() -> None:
    base = {b"RANK": b"9", b"SLURM_X": b"1", b"SLURM": b"2", b"PATH": b"/bin", b"\xff": b"\xfe"}
    env = environment(base, ["RANK", "SLURM_*"], {"RANK": "0", "A": "1"}, {"A": "2"})
    assert env == {b"SLURM": b"2", b"PATH": b"/bin", b"\xff": b"\xfe", b"RANK": b"0", b"A": b"2"}
    assert base[b"RANK"] == b"9"


def test_star_alone_removes_everything() -> None:
    assert environment({b"A": b"1"}, ["*"], {"B": "2"}) == {b"B": b"2"}


def test_text_stands_for_the_bytes_that_were_typed() -> None:
    assert exact(os.fsdecode(b"a\xff\xc3\xa9")) == b"a\xff\xc3\xa9"
    assert exact("é") == b"\xc3\xa9"
