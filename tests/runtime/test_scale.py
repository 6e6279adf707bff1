"""A thousand hosts, simulated: the coordinator, the scheduler and a server have to keep up with them.

Loops and decisions are those that are shipped, and processor time is what is limited: what grows with the square of the
hosts exceeds the limits by far. `benchmarks/scale.py` has the figures.
"""

from __future__ import annotations

from pathlib import Path

from simulated_store import SimulatedServer, SimulatedStore
from simulation import Clock, SimulatedJob, job_plan

HOSTS = 1000
LIMIT_S = 8.0
"""Processor time of the process that has all the hosts. Each takes 0.5 to 2 s where these tests were written."""


def test_a_thousand_hosts_are_started_beat_and_end_within_seconds(tmp_path: Path) -> None:
    job = SimulatedJob(job_plan(HOSTS, servers=10), tmp_path, Clock(), beats=2)
    outcome = job.run()
    assert (outcome.exit_code, outcome.message) == (0, "all workers succeeded")
    assert {task.state for task in outcome.tasks if task.role == "worker"} == {"exited"}
    heard = [agent.heard for agent in job.agents.values()]
    assert {(each["begin"], each["end"]) for each in heard} == {(1, 1)}
    assert min(each["ping"] for each in heard) >= 2
    assert sum(each["spawn"] for each in heard) == len(job.plan.tasks)
    assert job.clock.cpu_s < LIMIT_S, job.phases


def test_a_failing_worker_of_many_ends_them_all_and_is_named(tmp_path: Path) -> None:
    job = SimulatedJob(job_plan(300, servers=10), tmp_path, Clock(), beats=1, fails=True)
    outcome = job.run()
    assert (outcome.exit_code, outcome.message) == (1, "worker-0 on n00000 failed with exit code 1")
    assert [task.name for task in outcome.tasks if task.state != "stopped"] == ["worker-0"]
    assert not outcome.survivors
    assert job.clock.cpu_s < LIMIT_S / 2, job.phases


def test_a_thousand_nodes_register_and_pass_barriers_within_seconds() -> None:
    store = SimulatedStore(HOSTS - 50, 50, Clock(), leaves=False)
    store.run()
    sent = store.network.sent
    assert (sent["WELCOME"], sent["ROSTER"], sent["BARRIER"]) == (HOSTS, HOSTS, 3 * (HOSTS - 50))
    assert store.phases["barrier"].virtual_s < 0.1
    assert store.clock.cpu_s < LIMIT_S, store.phases


def test_the_end_of_all_by_the_loss_of_one_takes_no_message_of_each_to_each() -> None:
    store = SimulatedStore(300, 10, Clock(), fails=True)
    assert store.run().reason == "worker-0@n00000 (pid 1000) is lost: its connection closed"
    assert store.network.sent["LOST"] <= 16 * 310 + 300 * 10, "later ones to the servers only"


def test_a_server_takes_the_rounds_of_many_workers() -> None:
    server = SimulatedServer(150, 10, 4, 64, Clock(), rounds=2)
    assert server.run().reason == "enough"
    assert server.network.sent["data"] == 3 * 150
    assert server.clock.cpu_s < LIMIT_S, server.phases
