"""The end of a node: what nobody needs does not linger."""

from __future__ import annotations

import subprocess
import sys

PEER = """
import sys, zmq
peer = zmq.Context().socket(zmq.DEALER)
peer.setsockopt(zmq.RCVHWM, 1)
peer.setsockopt(zmq.SNDHWM, 0)
peer.plain_username = peer.plain_password = b"open"
peer.connect(sys.argv[1])
while True:
    peer.send(b"x" * 1000)
    zmq.select([], [], [], 0.001)
"""
"""A peer that sends and does not read, as one that is at its own end."""

NODE = """
import subprocess, sys, threading
from distrun_runtime.transport.zeromq import Arrived, Heartbeat, ZmqTransport
node = ZmqTransport(Heartbeat(0.2, 5.0))
port = node.bind("127.0.0.1")
peer = subprocess.Popen([sys.executable, "-c", sys.argv[1], "tcp://127.0.0.1:%d" % port])
arrived = []
while not arrived:
    arrived = [event for event in node.poll(1.0) if isinstance(event, Arrived)]
node.proven(arrived[0].link)
for _ in range(20):
    node.send(arrived[0].link, [bytes(6_000_000)])
threading.Timer(0.3, peer.kill).start()
node.close()
peer.wait()
"""


def test_a_node_outlives_a_peer_that_dies_on_it_while_it_closes() -> None:
    """libzmq aborted it: a heartbeat was due on a connection that had failed and was still to be written to."""
    ended = subprocess.run([sys.executable, "-c", NODE, PEER], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
