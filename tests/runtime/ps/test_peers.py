"""Whom a server calls to tell the other servers something."""

from __future__ import annotations

from schedulerhistory import node

from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps import role
from distrun_runtime.ps.arithmetic import Peers

NORMS = Message(Kind.NORMS)
SERVERS = [node("server", rank, endpoint="tcp://10.0.0.%d:1" % (rank + 1)) for rank in range(3)]


def test_others_are_called_when_there_is_something_to_say_and_once() -> None:
    peers = Peers()
    assert peers.tell(NORMS) == []
    peers.learn([*SERVERS, node("worker", 0)], 1)
    assert len(peers) == 2
    assert peers.tell(NORMS) == [
        role.Connect("server-0", "tcp://10.0.0.1:1"),
        role.Send("server-0", NORMS),
        role.Connect("server-2", "tcp://10.0.0.3:1"),
        role.Send("server-2", NORMS),
    ]
    assert peers.tell(NORMS) == [role.Send("server-0", NORMS), role.Send("server-2", NORMS)]


def test_a_connection_that_ended_is_opened_again_the_next_time() -> None:
    peers = Peers()
    peers.learn(SERVERS[:2], 0)
    peers.tell(NORMS)
    assert peers.lost("server-1") == "tcp://10.0.0.2:1"
    assert peers.lost("server-1") == ""
    assert peers.lost("in:ff") == ""
    assert peers.tell(NORMS)[0] == role.Connect("server-1", "tcp://10.0.0.2:1")
