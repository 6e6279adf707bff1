"""The table of options agrees with the request that is made from it."""

from __future__ import annotations

import pytest

from distrun.cli.launch import launch
from distrun.options import BY_KEY, ROWS, SIZE, Option, members
from distrun.request import EngineOptions, JobRequest

BARE = JobRequest(command=("true",), workers=2, servers=1, cwd="/w", engine=EngineOptions(own={}))
NOT_THE_SAME = {"workers", "servers", "launcher", "log_limit"}
"""Options without which `launch` decides for the request."""


@pytest.mark.parametrize("row", [row for row in ROWS if row.member], ids=lambda row: row.key)
def test_an_option_is_a_member_of_the_request_with_the_same_default(row: Option) -> None:
    empty = "" if row.member.startswith("engine.own.") else row.default
    assert row.of(BARE) == empty or row.key in NOT_THE_SAME


def test_names_and_keys_of_options_are_each_of_one_option() -> None:
    names = [name for row in ROWS for name in row.name.split("/")]
    assert len(set(names)) == len(names)
    assert len(BY_KEY) == len(ROWS)
    assert [param.name for param in launch.params] == [*BY_KEY, "command"]


def test_what_is_asked_for_stands_in_request_json() -> None:
    given = {row.key: row.default for row in ROWS}
    assert {"gpus_per_worker", "reconnect", "metrics_port", "detach"} <= set(members(given))
    assert set(members(given)) <= {"engine", *BARE.to_json()}
    assert members(given)["engine"]["worker"] == {"cores": 0, "memory": 0, "gpus": 0}


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind == SIZE], ids=lambda row: row.key)
def test_all_is_no_limit_of_a_size(row: Option) -> None:
    assert row.read("all") == 0
