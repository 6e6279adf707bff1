"""A worker's session: what it tells its agent when its script fails, and what its end leaves."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest
from cluster import DEADLINE_S, Cluster, config, open_store
from gpukit import Machine, gpus_of_process
from inproc import InprocNetwork
from ports import free_port

from distrun_runtime.arrays.shared_memory import BLOCKS
from distrun_runtime.errors import KVError, PeerLost, StoreClosed, TimedOut, because_of
from distrun_runtime.protocol.message import Kind, Membership, Message
from distrun_runtime.ps import session as sessions
from distrun_runtime.ps.role import NodeRequest
from distrun_runtime.ps.session import NodeSession


def chained(cause: BaseException) -> BaseException:
    try:
        try:
            raise cause
        except BaseException as err:
            raise RuntimeError("while saving") from err
    except RuntimeError as err:
        return err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("my bug"), [{"failed": "ValueError: my bug"}]),
        (because_of(PeerLost("pull: worker-1@d1 failed"), "worker-1"), ["worker-1"]),
        (because_of(PeerLost("have worker-0@d1, worker-2@d2; waiting for 1 of 3"), "worker-1"), ["worker-1"]),
        (chained(because_of(PeerLost("push: server-12@d2 is lost"), "server-12")), ["server-12"]),
        (because_of(TimedOut("no scheduler answered for 120 s"), "scheduler"), ["scheduler"]),
        (PeerLost("somebody is gone"), ["a peer"]),
        (chained(KeyboardInterrupt()), []),
        (TimedOut("pull: no answer"), [{"failed": "TimedOut: pull: no answer"}]),
    ],
)
def test_the_cause_of_a_failure_reaches_the_agent(
    error: BaseException, said: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv("DISTRUN_PUBLISH_FD", str(writer))
    session = NodeSession(config("worker", root_port=9), InprocNetwork().transport())
    session.note_crash(error)
    session.note_crash(ValueError("only the first counts"))
    os.close(writer)
    with os.fdopen(reader) as lines:
        facts = [json.loads(line) for line in lines]
    assert [fact if "failed" in fact else fact["lost_peer"] for fact in facts] == said


def test_at_the_end_every_store_is_flushed_and_every_error_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The first store's error left the second one's pushes where they were."""
    with Cluster(1, 1, over="inproc") as cluster:
        session = cluster.session(0)
        session.open()
        first = KVError("push of key 'a': no room")
        vars(first)["__notes__"] = ["and also: push of key 'b': no room"]

        def fail() -> None:
            raise first

        def crash() -> None:
            raise ZeroDivisionError("in a thread of ours")

        flushed: list[str] = []
        for flush in (fail, crash, lambda: flushed.append("yes")):
            session.before_end(flush)
        assert session.end() is first
        assert flushed == ["yes"]
    assert [line for line in capsys.readouterr().err.splitlines() if "at exit" in line] == [
        "distrun: error: at exit: push of key 'a': no room",
        "distrun: error: at exit: and also: push of key 'b': no room",
        "distrun: error: at exit: in a thread of ours",
    ]


def test_errors_of_pushes_of_all_stores_are_said_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    def script(session: NodeSession) -> Any:
        for key in ("a", "b"):
            kv = open_store("dist_async", session)
            kv.init(key, np.zeros(4, np.float32))
            kv.push(key, np.ones(4, np.float32), wait=False)
        return session.end()

    with Cluster(1, 1, over="inproc") as cluster:
        [error] = cluster.run_sessions(script)
    assert isinstance(error, KVError)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distrun: error: at exit: ")]
    assert ["push of key 'a'" in line for line in said] == [True, False]
    assert "push of key 'b'" in said[1]


def test_lost_nodes_are_counted_by_role_and_workers_by_membership_without_asking_anybody() -> None:
    session = NodeSession(config("worker", root_port=9), InprocNetwork().transport())
    session.worker.dead |= {"worker-1", "server-0", "server-1"}
    roles = (["worker"], ["server"], ["scheduler"], ["server", "worker"])
    assert [session.num_dead(each, Membership(range(2))) for each in roles] == [1, 2, 0, 3]
    assert [session.num_dead(each, Membership((0,))) for each in roles] == [0, 2, 0, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_to_a_node_whose_thread_has_failed_ends_with_what_failed_there() -> None:
    with Cluster(1, 1, over="inproc", stays=True) as cluster:
        session = cluster.session(0)
        session.open()

        def fail(timeout_s: float) -> list[Any]:
            raise ZeroDivisionError("in the node's thread")

        session._transport.poll = fail  # type: ignore[method-assign]
        session._thread.join(DEADLINE_S)
        request = session.ask("statistics", [("server-0", Message(Kind.STATS, store=1))])
        with pytest.raises(StoreClosed, match="the node's thread has ended: ZeroDivisionError"):
            request.wait(0)
        session.end()


def test_a_call_that_is_interrupted_as_it_begins_is_made_all_the_same() -> None:
    with Cluster(1, 1, over="inproc") as cluster:
        session, told = cluster.session(0), list[NodeRequest]()
        session.open()

        def begun(request: NodeRequest) -> None:
            told.append(request)
            if len(told) == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            session.ask("statistics", [("server-0", Message(Kind.STATS, store=1))], begun=begun)
        assert told[0] is told[1]
        told[0].wait(DEADLINE_S)
        session.end()


def test_a_registration_that_failed_is_made_anew_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_current", own := sessions._CurrentSession())
    own.is_watched = True  # The end of this process is not the session's.
    with Cluster(1, 1) as cluster:
        alone = config("worker", root_port=free_port(), start_timeout_s=0.1)
        with pytest.raises(TimedOut):
            sessions.current(lambda: alone)
        failed = own.session
        session = sessions.current(lambda: cluster.session(0).config)
        assert session is not failed
        assert failed is not None
        with pytest.raises(StoreClosed, match="has left the job"):
            failed.check()
        assert sessions.current(lambda: alone) is session
        session.end()


@pytest.mark.parametrize(("group", "last"), [("", 32767), ("g", 65535)])
def test_a_store_whose_number_no_message_could_hold_is_refused_with_a_next_step(group: str, last: int) -> None:
    session = NodeSession(config("worker", root_port=9), InprocNetwork().transport())
    assert [session.next_store(group) for _ in range(last)] == list(range(1, last + 1))
    whose = "group 'g'" if group else "all workers"
    for _ in range(2):
        with pytest.raises(KVError, match=f"{last} stores of {whose} were created.*fix: .*group"):
            session.next_store(group)
    assert session.next_store("other") == 1


def test_memory_of_a_session_is_page_locked_until_it_ends_and_its_arrays_stay_valid() -> None:
    kept: list[Any] = []

    def script(session: NodeSession) -> None:
        kept.append(session.empty((1000,), np.dtype(np.float32)))
        kept[0][...] = 7
        assert machine.gpus.locked.covers(kept[0])

    with gpus_of_process(Machine(blocks=BLOCKS)) as machine, Cluster(1, 1, over="segments") as job:
        machine.gpus.get(0)
        job.run_sessions(script)
        assert not machine.gpus.locked.covers(kept[0])
        assert (kept[0] == 7).all()
        machine.finish()
