"""Whom a server calls to tell the other servers something."""

from __future__ import annotations

from rig import node

from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps import role
from distrun_runtime.ps.neighbours import Neighbours

NORMS = Message(Kind.NORMS)


def test_others_are_called_when_there_is_something_to_say_and_once() -> None:
    neighbours = Neighbours()
    assert neighbours.tell(NORMS) == []
    neighbours.learn([node("server", 0), node("server", 1), node("server", 2), node("worker", 0)], 1)
    assert len(neighbours) == 2
    assert neighbours.tell(NORMS) == [
        role.Connect("server-0", "tcp://10.0.0.1:1"),
        role.Send("server-0", NORMS),
        role.Connect("server-2", "tcp://10.0.0.3:1"),
        role.Send("server-2", NORMS),
    ]
    assert neighbours.tell(NORMS) == [role.Send("server-0", NORMS), role.Send("server-2", NORMS)]


def test_a_connection_that_ended_is_opened_again_the_next_time() -> None:
    neighbours = Neighbours()
    neighbours.learn([node("server", 0), node("server", 1)], 0)
    neighbours.tell(NORMS)
    assert neighbours.lost("server-1")
    assert not neighbours.lost("server-1")
    assert not neighbours.lost("in:ff")
    assert neighbours.tell(NORMS)[0] == role.Connect("server-1", "tcp://10.0.0.2:1")
