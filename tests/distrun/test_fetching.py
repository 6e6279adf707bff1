"""Fetched files: where they come to, and what a host that lies cannot do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sample_plan import sample_plan

from distrun import fetching
from distrun.errors import SyncError, UsageError
from distrun.fleet.questions import HostAnswer
from distrun_runtime.contract.agent_messages import AnswerPiece
from distrun_runtime.coordinator.failures import Problem

NOW_NS = 1_700_000_000_000_000_000
DOWN = Problem("h1", "other", "no route to host", "ssh h1 true")
END = HostAnswer({})


def listed(*names: str, **more: Any) -> Mapping[str, Any]:
    """Return what a host says of its folder."""
    return {"folder": "/job", "files": [[name, 5, NOW_NS, False] for name in names], "left_out": [], **more}


def piece(name: str, data: bytes = b"12345", left: int = 0) -> AnswerPiece:
    return AnswerPiece("h", 1, "job", name, data, left)


class FakeFleet(contextlib.AbstractContextManager["FakeFleet"]):
    """Takes the place of `Fleet`. `lists`: what each host says of its folder; `sends`: all that each sends, if said."""

    def __init__(self, lists: Mapping[str, Any], sends: Mapping[str, Any], _backend: object, hosts: Any) -> None:
        self.lists = lists
        self.sends = sends.get(hosts[0].name)

    def __exit__(self, *_: object) -> None:
        pass

    cut = close = __exit__

    def ask(self, _what: str, _args: object, _limit_s: float) -> Mapping[str, Any]:
        return {
            host: each if isinstance(each, Problem) else HostAnswer({"holder": host, **each})
            for host, each in self.lists.items()
        }

    def begin(self, _what: str, args: Mapping[str, Any]) -> None:
        self.left = iter(self.sends or [*(piece(name) for name, _ in args["files"]), END])

    def next(self, _limit_s: float) -> Any:
        return next(self.left, None)


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "to"


class Fetching:
    """Fetches `out/*` of hosts that say and send what a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, to: Path) -> None:
        self.monkeypatch = monkeypatch
        self.to = to
        self.said: list[str] = []

    def __call__(self, lists: Mapping[str, Any], sends: Mapping[str, Sequence[Any]] | None = None) -> set[str]:
        """Return the files that are below the folder then."""
        self.monkeypatch.setattr(fetching, "Fleet", partial(FakeFleet, lists, sends or {}))
        plan = sample_plan(workers=len(lists), servers=0, hosts=tuple(lists))
        job: Any = SimpleNamespace(id="job", is_unplanned=False, plan=lambda: plan)
        fetching.fetch(job, ["out/*"], str(self.to), "", lambda text, level: self.said.append(text))
        return self.files()

    def files(self) -> set[str]:
        return {str(path.relative_to(self.to.parent)) for path in self.to.parent.rglob("*") if not path.is_dir()}


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch, to: Path) -> Fetching:
    return Fetching(monkeypatch, to)


def test_files_come_below_the_hosts_names_unless_there_is_one_folder(fetch: Fetching, to: Path) -> None:
    assert fetch({"h1": listed("out/a")}) == {"to/out/a"}
    assert fetch({"h1": listed("out/b"), "h2": listed(holder="h1")}) == {"to/out/a", "to/out/b"}
    more = {"to/h1/out/c", "to/h3/out/c"}
    assert more < fetch({"h1": listed("out/c"), "h2": listed(holder="h1"), "h3": listed("out/c")})
    assert (to / "out/a").stat().st_mtime_ns == NOW_NS


def test_a_file_that_is_here_with_its_size_and_time_does_not_come_again(fetch: Fetching, to: Path) -> None:
    fetch({"h1": listed("out/a")})
    fetch({"h1": listed("out/a")}, {"h1": [piece("out/a", b"other"), END]})
    assert (to / "out/a").read_bytes() == b"12345"
    assert "1 were here already" in fetch.said[-1]


def test_a_host_that_is_down_is_named_and_the_others_files_come(fetch: Fetching) -> None:
    with pytest.raises(
        SyncError, match=r"files of 1 of 2 hosts did not come\nh1: no route to host\n    fix: ssh h1 true"
    ):
        fetch({"h1": DOWN, "h2": listed("out/a")})
    assert fetch.files() == {"to/h2/out/a"}


@pytest.mark.parametrize(
    "name", ["../x", "out/../../x", "/etc/x", "out//x", "out/.", "", "out/a\0", "outer/x", ".bashrc", "out/\ud800", 7]
)
def test_a_host_cannot_list_what_was_not_asked_for(fetch: Fetching, name: str) -> None:
    with pytest.raises(SyncError, match="what it says of its files is not understood"):
        fetch({"h1": listed(name, "out/a")})
    assert fetch.files() == set()


@pytest.mark.parametrize(
    ("sends", "says"),
    [
        ([piece(""), END], "'', which was not asked for"),
        ([piece("out/b"), END], "'out/b', which was not asked for"),
        ([piece("out/a"), piece("out/a"), END], "'out/a', which was not asked for"),
        ([piece("out/c", left=3), END], "did not come whole"),
        ([piece("out/c", left=3), Problem("h1", "other", "connection lost")], "connection lost"),
        ([piece("out/c", left=3)], "nothing has come for 1 min"),
    ],
)
def test_a_file_gets_its_name_when_it_is_whole_and_once(fetch: Fetching, sends: list[Any], says: str) -> None:
    with pytest.raises(SyncError, match=says):
        fetch({"h1": listed("out/a", "out/c")}, {"h1": sends})
    assert fetch.files() <= {"to/out/a"}


def test_a_link_here_does_not_lead_a_file_out_of_the_folder(fetch: Fetching, to: Path) -> None:
    to.mkdir()
    (to.parent / "mine").mkdir()
    (to / "out").symlink_to(to.parent / "mine")
    with pytest.raises(SyncError, match="out/a cannot be written: Not a directory"):
        fetch({"h1": listed("out/a")})
    (to / "out").unlink()
    (to / "out").mkdir()
    (to / "out/a").symlink_to(to.parent / "mine/a")
    fetch({"h1": listed("out/a")})
    assert not (to / "out/a").is_symlink()
    assert not list((to.parent / "mine").iterdir())


def test_a_job_of_an_engine_is_fetched_from_a_folder_of_this_machine_or_not_at_all(fetch: Fetching) -> None:
    plan = sample_plan(servers=0)._replace(backend="slurm")
    job: Any = SimpleNamespace(id="job", is_unplanned=False, plan=lambda: plan)
    with pytest.raises(UsageError, match="a slurm job cannot be asked for files, and there is no /nowhere"):
        fetching.fetch(job, ["out/*"], str(fetch.to), "/nowhere", lambda text, level: None)
