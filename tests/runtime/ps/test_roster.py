"""Who may join, in which order ranks are given, and the words about who is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distrun_runtime.protocol.handshake import NodeIdentity, nodes_of
from distrun_runtime.ps.agreement import LEFT, LOST, folded
from distrun_runtime.ps.relay import relays_of, relays_of_hosts
from distrun_runtime.ps.scheduler import Roster

WORKER = NodeIdentity("j", "worker", 0, 0, "d1", 10, "tcp://10.0.0.1:1", 2, 1)


def worker(rank: int, host: str = "d1", **changes: int) -> NodeIdentity:
    return replace(WORKER, rank=rank, host=host, **changes)


def server(rank: int) -> NodeIdentity:
    return replace(WORKER, role="server", rank=rank)


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (replace(WORKER, role="scheduler"), "scheduler@d1 (pid 10): this job has its scheduler already"),
        (
            replace(WORKER, workers=3),
            "worker-0@d1 (pid 10) expects 3 workers and 1 server; the scheduler was started for 2 and 1",
        ),
        (
            replace(WORKER, servers=4),
            "worker-0@d1 (pid 10) expects 2 workers and 4 servers; the scheduler was started for 2 and 1",
        ),
        (worker(2), "worker-2@d1 (pid 10): ranks of workers go from 0 to 1"),
        (server(1), "server-1@d1 (pid 10): ranks of servers go from 0 to 0"),
        (worker(1, "d9"), "rank 1 is taken: worker-1@d2 (pid 10) registered as worker-1"),
        (worker(0), ""),
        (worker(-1), ""),
        (server(0), ""),
    ],
)
def test_every_reason_against_a_node(peer: NodeIdentity, reason: str) -> None:
    roster = Roster(2, 1)
    roster.add("a", worker(1, "d2"))
    assert roster.against(peer) == reason


def test_nobody_joins_a_role_that_is_full() -> None:
    roster = Roster(2, 1)
    roster.add("a", worker(-1, "d1"))
    roster.add("b", worker(1, "d2"))
    assert roster.against(worker(-1)) == "all 2 workers have registered: worker-1@d2, worker@d1"


def test_the_words_about_who_is_missing() -> None:
    roster = Roster(2, 1)
    assert roster.waiting_text() == "waiting for 2 of 2 workers: have none; 1 of 1 servers: have none"
    roster.add("s", server(0))
    roster.add("a", worker(0, "d1"))
    assert roster.waiting_text() == "waiting for 1 of 2 workers: have worker-0@d1"
    assert not roster.is_complete
    roster.add("b", worker(-1))
    assert roster.is_complete


def test_it_counts_the_living_and_finds_who_has_a_rank() -> None:
    roster = Roster(3, 1)
    for rank in range(3):
        roster.add("w%d" % rank, worker(rank))
    roster.end(roster.members["w0"], LEFT)
    roster.end(roster.members["w2"], LOST)
    assert (roster.count("worker"), roster.count_alive("worker"), roster.count("server")) == (3, 1, 0)
    assert roster.of_rank("worker", 1) is roster.members["w1"]
    for link in ("w0", "w2"):
        roster.remove(link)
    assert (roster.count("worker"), roster.count_alive("worker")) == (1, 1)
    assert roster.of_rank("worker", 0) is roster.of_rank("worker", -1) is None


def test_of_many_nodes_a_message_names_a_few() -> None:
    roster = Roster(1000, 0)
    for rank in range(990):
        roster.add("w%d" % rank, worker(rank, "d1"))
    text = roster.waiting_text()
    assert text.startswith("waiting for 10 of 1000 workers: have worker-0@d1, worker-1@d1, ")
    assert text.endswith(", worker-15@d1 and 974 more")


def test_the_relays_of_all_hosts_are_those_of_each() -> None:
    nodes = [replace(server(rank), host="d%d" % (rank % 5), servers=10) for rank in range(12)]
    nodes += [worker(rank, "d%d" % (rank % 4 if rank % 3 else 6)) for rank in range(16)]
    hosts = sorted({node.host for node in nodes})
    found = relays_of_hosts(nodes)
    assert found["d1"] == {0: 1, 2: 11, 3: 1, 4: 6, 5: 11, 7: 6, 8: 11, 9: 1}
    assert found == {host: relays for host in hosts if (relays := relays_of(nodes, host))}


def test_a_roster_travels_as_json() -> None:
    roster = Roster(2, 1)
    roster.add("s", server(0))
    roster.add("a", worker(1))
    nodes = [{**node, "from": "a later version"} for node in roster.to_json()]
    assert nodes_of(nodes) == [server(0), worker(1)]


# Queries to all servers


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        (["server-1: no: not so", "server-0: no: not so"], "server-0, server-1: no: not so"),
        (["server-2: no", "server-0: no", "server-1: full"], "server-0, server-2: no; server-1: full"),
        (["a text of nobody"], "a text of nobody"),
        (["RULE is malformed: KeyError: 'spec'"], "RULE is malformed: KeyError: 'spec'"),
    ],
)
def test_a_reason_that_several_servers_give_is_told_once(errors: list[str], text: str) -> None:
    assert folded(errors) == text
