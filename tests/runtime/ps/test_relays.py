"""Workers of one host add before anything leaves it: what travels, what does not, and what others are told meanwhile.

The scenarios (`test_scenarios_*`) show that values are the same over relays. In these jobs workers 0 and 1 and every
other server are on one host, the rest on another (`cluster.host_of`).
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, open_store, shards_of
from delays import delay_after
from slowness import scaled

from distrun_runtime.errors import KVError, PeerLost, RuleError, TimedOut
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps.relay import relays_of, workers_of
from distrun_runtime.ps.role import Config
from distrun_runtime.transport.faults import Faults

NODE = NodeIdentity("j", "worker", 0, 0, "a", 10, "tcp://10.0.0.1:1", 4, 4)
KEYS = ["k%d" % number for number in range(8)]
SHAPE = (16, 8)
BYTES = 16 * 8 * 4


def node(role: str, rank: int, host: str) -> NodeIdentity:
    return replace(NODE, role=role, rank=rank, host=host)


def full(value: float, dtype: str = "float32") -> Any:
    return np.full(SHAPE, value, dtype)


def relayed(workers: int = 4, servers: int = 2, **more: Any) -> Cluster:
    return Cluster(workers, servers, over="relays", **more)


def bytes_of_rounds(job: Cluster, dtype: str = "float32", rounds: int = 3, **how: Any) -> tuple[int, int]:
    """Return how many payload bytes all servers received and sent in some rounds of `KEYS`."""
    setting = how.pop("compression", None)

    def script(session: Any) -> Any:
        members = how.get("members")
        if members is not None and session.rank not in members:
            return None
        shared_by = {} if members is None else {"group": "some", "members": members}
        is_ordered = how.get("deterministic", False)
        kv = open_store(how.get("type_name", "dist_sync"), session, deterministic=is_ordered, **shared_by)
        kv.init(KEYS, [full(0, dtype)] * len(KEYS))
        if setting:
            kv.set_gradient_compression(setting)
        kv.barrier()
        before = kv.stats()
        kv.barrier()
        for step in range(1, rounds + 1):
            outs = [full(-1, dtype) for _ in KEYS]
            kv.push(KEYS, [full(step + kv.rank, dtype)] * len(KEYS))
            kv.pull(KEYS, outs)
            if not setting:
                total = sum(step + rank for rank in range(kv.num_workers))
                assert all((out == total).all() for out in outs)
        kv.barrier()
        return before, kv.stats()

    with job:
        before, after = job.run_sessions(script)[0]

    def grown(name: str) -> int:
        return sum(facts[name] for facts in after) - sum(facts[name] for facts in before)

    return grown("bytes_in"), grown("bytes_out")


# Who stands in for whom


def test_servers_of_a_host_share_those_of_other_hosts_among_them() -> None:
    nodes = [
        *(replace(node("server", rank, "a" if rank < 2 else "b"), servers=5) for rank in range(5)),
        *(node("worker", rank, "a") for rank in range(2)),
        node("worker", 2, "b"),
    ]
    assert relays_of(nodes, "a") == {2: 0, 3: 1, 4: 0}
    assert relays_of(nodes, "b") == {}, "one worker has nobody to add to"
    assert relays_of(nodes, "c") == {}
    assert workers_of(nodes, "a") == (0, 1)


def test_a_server_beyond_those_that_nodes_are_told_of_stands_in_for_others_and_nobody_for_it() -> None:
    told = replace(NODE, servers=1)
    nodes = [
        *(replace(told, role="server", rank=rank, host=host) for rank, host in enumerate("ab")),
        *(replace(told, rank=rank, host=host) for rank, host in enumerate("aabb")),
    ]
    assert relays_of(nodes, "b") == {0: 1}
    assert relays_of(nodes, "a") == {}


def test_workers_of_a_host_without_a_server_have_no_relay() -> None:
    nodes = [node("server", 0, "a"), *(node("worker", rank, "b") for rank in range(4))]
    assert relays_of(nodes, "b") == {}


# What travels


def test_between_hosts_a_round_goes_once_a_host_and_not_once_a_worker() -> None:
    """Half of the bytes is on each server: there is one sum each way, where two workers would push and pull."""
    received, sent = bytes_of_rounds(relayed())
    near, between = 4 * len(KEYS) * BYTES, 2 * (len(KEYS) // 2) * BYTES
    assert received == sent == 3 * (near + between + between)


def test_a_host_without_a_server_adds_on_one_that_keeps_no_values() -> None:
    """Server 1 is on the other host, where workers 2 and 3 are, and has no shard."""
    received, sent = bytes_of_rounds(relayed(4, 1, relays=1))
    near, between = 4 * len(KEYS) * BYTES, 2 * len(KEYS) * BYTES
    assert received == sent == 3 * (near + between)


@pytest.mark.parametrize(("members", "halves"), [([0, 1, 2], 8), ([0, 2], 4), ([0, 1], 6), ([0, 1, 4, 5], 12)])
def test_a_store_of_some_workers_is_added_where_a_host_has_several_of_them(members: list[int], halves: int) -> None:
    """Half of the bytes is on each server. Workers 0 and 1 are on one host, the other four on the other.

    Over a relay a half goes once more to the owner, and its answer comes back to the relay.
    """
    received, sent = bytes_of_rounds(relayed(6), members=members)
    assert received == sent == 3 * halves * (len(KEYS) // 2) * BYTES


def test_without_host_sums_workers_push_to_the_servers_of_other_hosts() -> None:
    received, sent = bytes_of_rounds(relayed(host_sums=False))
    assert received == sent == 3 * 4 * len(KEYS) * BYTES


@pytest.mark.parametrize("how", [{"deterministic": True}, {"dtype": "float16"}])
def test_values_whose_sums_may_not_be_made_in_parts_go_as_they_are(how: dict[str, Any]) -> None:
    received, _ = bytes_of_rounds(relayed(), **how)
    assert received == 3 * 4 * len(KEYS) * full(0, how.get("dtype", "float32")).nbytes


def test_compressed_values_go_as_they_are() -> None:
    received, sent = bytes_of_rounds(relayed(), compression={"type": "fp16", "min_size": 0})
    assert (received, sent) == (3 * 4 * len(KEYS) * BYTES // 2, 3 * 4 * len(KEYS) * BYTES)


def test_a_store_that_compresses_from_some_round_on_loses_nothing_of_the_rounds_before() -> None:
    """Worker 1 pushes late: what worker 0 has pushed before is at the relay when it begins to compress."""
    is_on = threading.Event()

    def script(kv: Any) -> Any:
        kv.init(KEYS, [full(0)] * len(KEYS))
        if kv.rank == 1:
            assert is_on.wait(scaled(60))
        pending, outs = [], [[full(-1) for _ in KEYS] for _ in range(2)]
        for step in range(2):
            if step == 1:
                kv.set_gradient_compression({"type": "fp16", "min_size": 0})
            pending.append(kv.push(KEYS, [full(10**step)] * len(KEYS), wait=False))
            pending.append(kv.pull(KEYS, outs[step], wait=False))
        is_on.set()
        for each in pending:
            each.wait()
        return [{float(out.min()) for out in some} | {float(out.max()) for out in some} for some in outs]

    with relayed() as job:
        assert job.run(script) == [[{4.0}, {40.0}]] * 4


# What others are told


def test_who_waits_is_told_by_the_shards_server_which_worker_of_its_own_host_is_missing() -> None:
    """What worker 0 has pushed has left its relay by then, though worker 1 has pushed nothing."""
    are_told = threading.Barrier(4)

    def script(kv: Any) -> None:
        kv.init(KEYS, [full(0)] * len(KEYS))
        outs = [full(-1) for _ in KEYS]
        if kv.rank != 1:
            kv.push(KEYS, [full(1)] * len(KEYS))
            with pytest.raises(TimedOut, match=r"waiting for worker-1, key k\d, round 1"):
                kv.pull(KEYS, outs)
        are_told.wait(scaled(60))
        if kv.rank == 1:
            kv.push(KEYS, [full(1)] * len(KEYS))
        kv.pull(KEYS, outs)
        assert all((out == 4).all() for out in outs)

    with relayed(op_timeout_s=4.0) as job:
        job.run(script)


def test_a_pull_that_waits_for_a_worker_that_has_ended_is_refused() -> None:
    def script(kv: Any) -> None:
        kv.init(KEYS, [full(0)] * len(KEYS))
        if kv.rank == 1:
            return
        kv.push(KEYS, [full(1)] * len(KEYS))
        with pytest.raises(PeerLost, match=r"worker-1.* has ended .*without pushing round 1 of key 'k"):
            kv.pull(KEYS, [full(-1) for _ in KEYS])

    with relayed() as job:
        job.run(script)


def test_each_worker_of_a_host_is_told_once_that_an_update_failed() -> None:
    """Worker 1 has not pulled when the others are told; its next pull, of a round that is well, says it."""

    def script(kv: Any) -> Any:
        kv.init(KEYS, [full(0)] * len(KEYS))
        kv.set_optimizer("rules_of_users:Fussy")
        errors = []
        for value in (13 / kv.num_workers, 1, 1, 1):
            kv.push(KEYS, [full(value)] * len(KEYS))
            kv.barrier()
            try:
                if kv.rank != 1 or value == 1:
                    kv.pull(KEYS, [full(-1) for _ in KEYS])
                errors.append("")
            except RuleError as err:
                errors.append("told" if "the rule failed on server-" in str(err) else str(err))
            kv.barrier()
        return errors

    with relayed(imports=("rules_of_users",)) as job:
        results = job.run(script)
    assert results[0] == results[2] == results[3] == ["told", "", "", ""]
    assert results[1] == ["", "told", "", ""]


# Calls that all workers make


def test_states_are_not_saved_while_a_sum_waits_for_a_worker_of_its_host(tmp_path: Any) -> None:
    is_refused = threading.Barrier(2)

    def script(kv: Any) -> None:
        kv.init(KEYS, [full(0)] * len(KEYS))
        if kv.rank == 0:
            kv.push(KEYS, [full(1)] * len(KEYS))
        with pytest.raises(KVError, match=r"round 1 of key 'k.' is open: worker-0 pushed it, worker-1 did not"):
            kv.save_states(tmp_path / "early")
        is_refused.wait(scaled(60))
        if kv.rank == 1:
            kv.push(KEYS, [full(1)] * len(KEYS))
        kv.save_states(tmp_path / "late")

    with relayed(2, 2) as job:
        job.run(script)
    assert [each.name for each in tmp_path.iterdir() if any(each.iterdir())] == ["late"]


def test_after_a_barrier_states_are_saved_although_nobody_has_pulled(tmp_path: Any) -> None:
    def script(kv: Any) -> Any:
        kv.init(KEYS, [full(0)] * len(KEYS))
        for step in range(3):
            kv.push(KEYS, [full(step + kv.rank)] * len(KEYS), wait=False)
        kv.barrier()
        kv.save_states(tmp_path)
        kv.push(KEYS, [full(100)] * len(KEYS))
        kv.barrier()
        kv.load_states(tmp_path)
        outs = [full(-1) for _ in KEYS]
        kv.pull(KEYS, outs)
        loaded = {float(out.min()) for out in outs} | {float(out.max()) for out in outs}
        kv.pushpull(KEYS, [full(7)] * len(KEYS), outs)
        return loaded, {float(out.min()) for out in outs} | {float(out.max()) for out in outs}

    with relayed() as job:
        assert job.run(script) == [({14.0}, {28.0})] * 4


def test_states_of_a_job_with_a_server_that_keeps_no_values_are_saved_and_loaded(tmp_path: Any) -> None:
    def script(kv: Any) -> Any:
        kv.init(KEYS, [full(0)] * len(KEYS))
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        kv.push(KEYS, [full(1)] * len(KEYS))
        kv.save_states(tmp_path)
        kv.push(KEYS, [full(5)] * len(KEYS))
        kv.load_states(tmp_path)
        outs = [full(-1) for _ in KEYS]
        kv.pushpull(KEYS, [full(1)] * len(KEYS), outs)
        return {float(out.min()) for out in outs} | {float(out.max()) for out in outs}

    with relayed(4, 1, relays=1) as job:
        assert job.run(script) == [{-4.0 - (2.0 + 4.0)}] * 4


def test_a_worker_that_joins_leaves_nothing_behind_at_its_relay() -> None:
    """Worker 0 has data for three rounds, worker 1 for two, the other host for five."""

    def script(kv: Any) -> Any:
        kv.init(KEYS, [full(0)] * len(KEYS))
        outs = [full(-1) for _ in KEYS]
        steps = {0: 3, 1: 2}.get(kv.rank, 5)
        seen = []
        for _ in range(steps):
            kv.push(KEYS, [full(10**kv.rank)] * len(KEYS))
            if kv.rank > 1:
                kv.pull(KEYS, outs)
                seen.append(float(outs[0].max()))
        kv.join()
        for _ in range(2):
            kv.push(KEYS, [full(1)] * len(KEYS))
            kv.pull(KEYS, outs)
            seen.append(float(outs[0].max()))
            assert all((out == 4).all() for out in outs)
        return seen

    with relayed() as job:
        results = job.run(script)
    assert results[2] == results[3] == [1111.0, 1111.0, 1101.0, 1100.0, 1100.0, 4.0, 4.0]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("meanwhile", ["nothing", "init", "assign", "pull"])
def test_a_pull_gets_its_own_round_of_a_key_though_a_later_one_of_it_is_at_the_relay_before(
    first: int, meanwhile: str
) -> None:
    """Worker 0 pulls round 1 of two keys of the other host: one goes a round on while the other is waited for.

    Other keys of the store may be new, or given other values, meanwhile. Or worker 1 has asked for one of the two
    before, so that they come one after the other.
    """
    pushed, asked = threading.Event(), threading.Event()

    def script(kv: Any) -> None:
        kv.init(KEYS, [full(0)] * len(KEYS))
        one, two, other, *_ = (key for key in KEYS if shards_of(kv, key)[0].server == 1)
        goes_on, late = (one, two) if first == 0 else (two, one)
        kv.barrier()
        if kv.rank == 1:
            kv.push(goes_on, full(10))
            if meanwhile == "pull":
                kv.pull(goes_on, full(-1), wait=False)
            kv.stats()  # all of it has arrived
            pushed.set()
        if kv.rank == 0:
            assert pushed.wait(scaled(60))
            kv.push([goes_on, late], [full(1), full(2)])
            outs = {key: full(-1) for key in (goes_on, late)}
            pending = kv.pull([*outs], [*outs.values()], wait=False)
            kv.push(goes_on, full(1000))
            asked.set()
        else:
            assert asked.wait(scaled(60))
            if kv.rank == 2:
                kv.push(goes_on, full(100))
            kv.push(goes_on, full(1000 * 10**kv.rank))
        out = full(-1)
        kv.pull(goes_on, out)
        assert (out == 111000).all(), "round 2 of it waits for nothing else"
        kv.barrier()
        if meanwhile == "init":
            kv.init(["new-%d" % number for number in range(4)], [full(0)] * 4)
        elif meanwhile == "assign":
            kv.assign(other, full(7))
        if kv.rank:
            kv.push(late, full(2 * 10**kv.rank))
        else:
            pending.wait()
            assert (outs[goes_on] == 111).all()
            assert (outs[late] == 222).all()

    with relayed(3, 2) as job:
        job.run(script)


def test_assigned_values_are_what_the_workers_of_all_hosts_pull_next() -> None:
    def script(kv: Any) -> Any:
        kv.init(KEYS, [full(0)] * len(KEYS))
        outs = [full(-1) for _ in KEYS]
        kv.pushpull(KEYS, [full(1)] * len(KEYS), outs)
        kv.assign(KEYS, [full(50)] * len(KEYS))
        kv.pull(KEYS, outs)
        assigned = {float(out.min()) for out in outs} | {float(out.max()) for out in outs}
        kv.pushpull(KEYS, [full(2)] * len(KEYS), outs)
        return assigned, float(outs[0].max())

    with relayed() as job:
        assert job.run(script) == [({50.0}, 8.0)] * 4


def test_a_round_that_one_worker_of_a_host_skips_is_skipped_for_all_with_its_note() -> None:
    def script(kv: Any) -> Any:
        kv.init(KEYS, [full(3)] * len(KEYS))
        outs = [full(-1) for _ in KEYS]
        if kv.rank == 1:
            call = kv.skip_round(KEYS, {"why": "overflow"})
        else:
            call = kv.pushpull(KEYS, [full(1)] * len(KEYS), outs)
        notes = call.skipped
        kv.pull(KEYS, outs)
        assert all((out == 3).all() for out in outs)
        kv.pushpull(KEYS, [full(2)] * len(KEYS), outs)
        return notes, float(outs[0].max())

    with relayed() as job:
        found = job.run(script)
    assert [number for _, number in found] == [8.0] * 4
    assert [notes for notes, _ in found] == [{0: None, 1: {"why": "overflow"}, 2: None, 3: None}] * 4


@pytest.mark.parametrize("call", ["pull", "barrier"])
def test_a_cut_connection_between_two_servers_ends_the_job_and_both_are_named(call: str) -> None:
    """Also where no worker waits for what went that way."""
    job = relayed()

    def script(kv: Any) -> str:
        kv.init(KEYS, [full(0)] * len(KEYS))
        kv.push(KEYS, [full(1)] * len(KEYS))
        kv.pull(KEYS, [full(0) for _ in KEYS])
        kv.barrier()
        if kv.rank == 0:
            job.network.cut_link(job.transports["server-1"], "server-0", "the cable is out")
        with pytest.raises(PeerLost) as lost:
            while True:
                kv.pull(KEYS, [full(0) for _ in KEYS]) if call == "pull" else kv.barrier()
        return str(lost.value)

    told = "server-1@there (pid "
    with job:
        for text in job.run(script):
            assert told in text
            assert text.endswith(
                "lost its connection to server-0 (%s): the cable is out" % job.transports["server-0"].endpoint
            )


class LateRosters(Cluster):
    """Servers hear of the job's nodes later than anything that others are told."""

    def _config(self, role: str, **changes: Any) -> Config:
        node = super()._config(role, **changes)
        late = Faults.parse("delay=100:1000ms,kinds=ROSTER")
        return replace(node, faults=late) if role == "server" else node


def test_workers_go_on_when_all_servers_know_them_however_late_one_is_told() -> None:
    """Each is told on a connection of its own, and a lost packet on one of them delays it."""

    def script(kv: Any) -> float:
        kv.init(KEYS, [full(0)] * len(KEYS))
        outs = [full(-1) for _ in KEYS]
        kv.pushpull(KEYS, [full(1)] * len(KEYS), outs)
        return float(outs[0].max())

    with LateRosters(4, 2, over="relays") as job:
        assert job.run(script) == [4.0] * 4


def test_a_sum_that_comes_at_once_after_welcome_arrives_however_slow_its_receiver_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The receiver's thread may be interrupted as soon as WELCOME has left; the sum is larger than what a connection
    may send before it is proven."""
    delay_after(monkeypatch, Kind.WELCOME, 0.2)

    def script(kv: Any) -> float:
        value = np.ones(1 << 18, np.float32)
        kv.init("wide", np.zeros_like(value))
        kv.push("wide", value)
        kv.pull("wide", value)
        return float(value.max())

    with Cluster(4, 2, over="relays over tcp", op_timeout_s=10.0) as job:
        assert job.run(script) == [4.0] * 4
