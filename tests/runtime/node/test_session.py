"""What a worker tells its agent when its script fails."""

from __future__ import annotations

import json
import os

import pytest
from cluster import config

from distrun_runtime.errors import PeerLost, TimedOut
from distrun_runtime.net.inproc import InprocNetwork
from distrun_runtime.node.session import Session


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
        (PeerLost("pull of key 'w': worker-1@d1 (pid 7) failed: ValueError: x"), ["worker-1"]),
        (PeerLost("the scheduler at tcp://10.0.0.1:9 is lost"), ["scheduler"]),
        (chained(PeerLost("push: server-12@d2 is lost")), ["server-12"]),
        (chained(KeyboardInterrupt()), []),
        (TimedOut("pull: no answer"), [{"failed": "TimedOut: pull: no answer"}]),
    ],
)
def test_the_cause_of_a_failure_reaches_the_agent(
    error: BaseException, said: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv("DISTRUN_PUBLISH_FD", str(writer))
    session = Session(config("worker", root_port=9), InprocNetwork().transport())
    session.note_crash(error)
    session.note_crash(ValueError("only the first counts"))
    os.close(writer)
    with os.fdopen(reader) as lines:
        facts = [json.loads(line) for line in lines]
    assert [fact if "failed" in fact else fact["lost_peer"] for fact in facts] == said
