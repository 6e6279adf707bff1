"""Copies over agents' channels: who is sent the files when, what fails, what is said."""

from __future__ import annotations

import contextlib
import queue
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from slowness import scaled

from distrun.sync.channels import ChannelCopier, CopyError, Deliveries
from distrun.sync.copier import CopyRequest
from distrun.sync.rules import CopyRules
from distrun_runtime.contract import session
from distrun_runtime.contract.agent_messages import Copied, CopyFailed, Copying, FolderFound
from distrun_runtime.contract.control import CopyProgress
from distrun_runtime.contract.plan import Host, Place, Plan
from distrun_runtime.contract.session import Session
from distrun_runtime.coordinator.channel import SessionChannel
from distrun_runtime.coordinator.messages import AllPrepared, Event, PrepareFailed

WAIT_S = scaled(60.0)


def deliveries(*places: str, window: int = 2) -> Deliveries:
    return Deliveries(places, 0.0, window, answer_s=60.0, stall_s=30.0)


def found(made: Deliveries, *states: str) -> None:
    for number, state in enumerate(states):
        made.handle(FolderFound(str(number), state), 1.0)


def test_nobody_is_sent_anything_before_all_have_looked_at_their_folders() -> None:
    made = deliveries("0", "1")
    made.handle(FolderFound("0", "mine"), 1.0)
    assert made.next(1.0) == []
    made.handle(FolderFound("1", "mine"), 2.0)
    assert made.next(2.0) == ["0", "1"]
    assert made.next(2.0) == []


def test_a_few_are_sent_the_files_at_a_time() -> None:
    made = deliveries("0", "1", "2")
    found(made, "mine", "mine", "mine")
    assert made.next(1.0) == ["0", "1"]
    made.handle(Copied("1", 1, 1), 2.0)
    assert made.next(2.0) == ["2"]
    assert (made.ready, made.is_over) == (1, False)
    for place in ("0", "2"):
        made.handle(Copied(place, 1, 1), 3.0)
    assert (made.ready, made.is_over) == (3, True)


def test_places_that_share_a_folder_have_the_files_when_all_have() -> None:
    made = deliveries("0", "1", "2")
    found(made, "shared", "mine", "source")
    assert made.next(1.0) == ["1"]
    assert (made.ready, made.wanting) == (0, 1)
    made.handle(Copied("1", 1, 1), 2.0)
    assert (made.ready, made.is_over) == (3, True)


def test_a_place_that_cannot_take_the_files_ends_the_copy() -> None:
    made = deliveries("0")
    with pytest.raises(CopyError, match="its disk is full") as caught:
        made.handle(CopyFailed("0", "its disk is full", "disk", "make room"), 1.0)
    assert (caught.value.place, caught.value.fix) == ("0", "make room")


def test_who_does_not_answer_is_named() -> None:
    made = deliveries("0", "1", "2")
    made.handle(FolderFound("1", "mine"), 1.0)
    made.check(59.9, {})
    with pytest.raises(CopyError, match=r"it has not said within 1 min .* \(nor have 2\)") as caught:
        made.check(60.0, {})
    assert caught.value.place == "0"


def test_a_place_where_nothing_moves_has_failed() -> None:
    made = deliveries("0", "1")
    found(made, "mine", "mine")
    made.next(10.0)
    made.handle(Copying("1", 5), 39.0)
    made.check(39.9, {})
    made.check(45.0, {"0": 30.0})
    with pytest.raises(CopyError, match="nothing has moved for 30 s") as caught:
        made.check(60.0, {"0": 30.0})
    assert caught.value.place == "0"


class OneAgent:
    """A connection whose other end is an agent of few words."""

    def __init__(self, state: str, fails: str = "") -> None:
        self.is_slow = False
        """It does not say that it has the files."""
        self.got: list[session.Frame] = []
        self._state = state
        self._fails = fails
        self._session = Session()
        self._session.connect()
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read(self) -> bytes | None:
        return self._said.get()

    def write(self, data: bytes) -> int:
        for frame in self._session.feed(data):
            self.got.append(frame)
            if frame.type == "copy":
                self._say("folder", state=self._state, notes=["a note"])
            elif frame.type == "files" and self._fails:
                self._say("copy_failed", reason=self._fails, kind="disk", fix="make room")
            elif frame.type == "files" and frame.header.get("last") and not self.is_slow:
                self._say("copied", files=1, bytes=6)
        while self._session.is_ready:
            self._said.put(self._session.next())
        return len(data)

    def _say(self, kind: str, /, **members: object) -> None:
        self._session.say({**members, "type": kind})

    def end_input(self) -> None:
        pass

    def kill(self) -> None:
        self._said.put(b"")

    def finish(self) -> str:
        return ""


class Told:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str, level: str, progress: object = None) -> None:
        self.said.append(f"{level}: {text}")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    if shutil.which("rsync") is None:
        pytest.skip("needs rsync")
    found = tmp_path / "source"
    found.mkdir()
    (found / "hello").write_text("hello\n")
    yield found
    assert [path.name for path in found.iterdir()] == ["hello"], "nothing of the copy stays in the source"


def copied(source: Path, agents: dict[str, OneAgent], delete: bool = False) -> tuple[Event, Told]:
    """Copy to agents, one a place, all on host h1; return what comes of it and what was said."""
    sink = Told()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with copying(CopyRequest(str(source), "~/job", CopyRules(), delete), agents, sink) as copier:
        copier.start(events.put)
        return events.get(timeout=WAIT_S), sink


@contextlib.contextmanager
def copying(request: CopyRequest, agents: dict[str, OneAgent], sink: Told) -> Iterator[ChannelCopier]:
    places = tuple(Place(name, "h1") for name in agents)
    plan = Plan("j", "", "fake", ("x",), "~/job", (Host("h1"),), (), places=places)
    channels = [SessionChannel(name, holds=True, greets=False) for name in agents]
    for channel, agent in zip(channels, agents.values(), strict=True):
        channel.start(lambda event: None)
        channel.attach(agent)
    copier = ChannelCopier(plan, request, sink, channels)
    try:
        yield copier
    finally:
        copier.cancel()
        for channel in channels:
            channel.kill()


def test_it_says_how_far_it_is(source: Path) -> None:
    agent = OneAgent("mine")
    agent.is_slow = True
    lines: queue.SimpleQueue[CopyProgress] = queue.SimpleQueue()
    request = CopyRequest(str(source), "~/job", CopyRules(), on_progress=lines.put, report_s=0.0)
    with copying(request, {"h1": agent}, Told()) as copier:
        copier.start(lambda event: None)
        while not (line := lines.get(timeout=WAIT_S)).detail.endswith("waiting for the hosts to finish"):
            pass
    assert str(line) == "sync 0/1: 99%, 1 file, 10.0 KiB sent, waiting for the hosts to finish"


def test_the_files_go_to_those_who_want_them_and_all_is_said(source: Path) -> None:
    agents = {"7": OneAgent("mine"), "8": OneAgent("shared"), "9": OneAgent("source")}
    event, sink = copied(source, agents)
    assert isinstance(event, AllPrepared)
    assert {name: [frame.type for frame in agent.got] for name, agent in agents.items()} == {
        "7": ["copy", "files"],
        "8": ["copy"],
        "9": ["copy"],
    }
    note, begun, last = sink.said
    assert note.startswith("warning: h1 (place ")
    assert note.endswith("): a note")
    assert begun == f"info: copy {source}/ -> h1 (place 7):~/job"
    assert last.startswith("info: sync 3/3 (1 file, 6 B) in ")


def test_what_patterns_keep_goes_along_only_if_files_are_deleted(source: Path) -> None:
    kept, deleted = OneAgent("source"), OneAgent("source")
    copied(source, {"7": kept})
    copied(source, {"7": deleted}, delete=True)
    assert kept.got[0].header["rules"] == []
    assert [r"/\.distrun\-sync", False, True] in deleted.got[0].header["rules"]


def test_the_first_place_that_fails_is_named_with_what_to_do(source: Path) -> None:
    event, sink = copied(source, {"7": OneAgent("mine"), "8": OneAgent("mine", fails="its disk is full")})
    assert isinstance(event, PrepareFailed)
    assert (event.host, event.reason, event.text) == ("8", "its disk is full", "fix: make room")
    assert not [text for text in sink.said if "info: sync" in text]


def test_a_source_that_cannot_be_read_fails_before_agents_are_asked(source: Path) -> None:
    agent = OneAgent("mine")
    plan = Plan("j", "", "fake", ("x",), "~/job", (Host("h1"),), ())
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    request = CopyRequest(str(source / "missing"), "~/job", CopyRules())
    copier = ChannelCopier(plan, request, Told(), [SessionChannel("h1")])
    copier.start(events.put)
    event = events.get(timeout=WAIT_S)
    copier.cancel()
    assert isinstance(event, PrepareFailed)
    assert (event.host, agent.got) == ("", [])
