"""The distributed store, a whole job in threads, over ZeroMQ and over in-process queues."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cluster import DEADLINE_S, Cluster, config, open_store, run_job
from inproc import InprocNetwork
from slowness import scaled

from distrun_runtime.errors import KVError, PeerLost, RuleError, TimedOut
from distrun_runtime.kvstore import KVStore

SHAPE = (2, 3)
BIG = (1200, 1200)


@pytest.fixture(params=["zmq", "inproc"])
def over(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ones(shape=SHAPE, dtype="float32"):
    return np.ones(shape, dtype)


def test_a_pull_gives_the_sum_of_the_rounds_pushes(over: str) -> None:
    def script(kv: KVStore):
        kv.init("w", ones())
        for _ in range(3):
            kv.push("w", np.full(SHAPE, kv.rank + 1, "float32"))
            out = np.zeros(SHAPE, "float32")
            kv.pull("w", out)
            assert (out == 3).all()
        return kv.rank, kv.num_workers, kv.type

    with Cluster(over=over) as job:
        assert job.run(script) == [(0, 2, "dist_sync"), (1, 2, "dist_sync")]
    assert set(job.codes.values()) == {0}


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_default_cpu(workers: int) -> None:
    """Row: tests/nightly/dist_sync_kvstore.py, default_cpu / check_default_keys (fp32, small and sharded)."""
    rate = 2

    def script(kv: KVStore):
        kv.init([3, 5, 99], [ones(), ones(), ones(BIG)])
        kv.set_optimizer("test", rescale_grad=rate)
        for step in range(7):
            for key, shape in ((3, SHAPE), (99, BIG)):
                kv.push(key, np.full(shape, kv.rank + 1, "float32"), priority=-key)
                out = np.zeros(shape, "float32")
                kv.pull(key, out, priority=-key)
                expected = 1 + rate * workers * (workers + 1) / 2 * (step + 1)
                assert (out == expected).all()

    run_job(script, workers, workers)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_default_cpu_in_other_precisions(dtype: str) -> None:
    """Row: tests/nightly/dist_sync_kvstore.py, default_cpu / check_default_keys (fp16, without masters)."""

    def script(kv: KVStore):
        kv.init(["k", "big"], [ones(dtype=dtype), ones((1211, 1211), dtype)])
        kv.set_optimizer("test", rescale_grad=2)
        for step in range(4):
            kv.push(["k", "big"], [ones(dtype=dtype) * (kv.rank + 1), ones((1211, 1211), dtype) * (kv.rank + 1)])
            outs = [np.zeros(SHAPE, dtype), np.zeros((1211, 1211), dtype)]
            kv.pull(["k", "big"], outs)
            assert all((out == 1 + 6 * (step + 1)).all() for out in outs)

    run_job(script)


def test_init_returns_the_init_value_of_a_hundred_keys() -> None:
    """Row: tests/nightly/dist_sync_kvstore.py, test_sync_init (cpu, half fp32, half fp16)."""

    def script(kv: KVStore):
        kinds = ["float32" if number % 2 else "float16" for number in range(100)]
        kv.init(list(range(100)), [np.full(SHAPE, number, kind) for number, kind in enumerate(kinds)])
        outs = [np.zeros(SHAPE, kind) for kind in kinds]
        kv.pull(list(range(100)), outs)
        for number, out in enumerate(outs):
            assert (out == number).all()

    run_job(script)


def test_only_the_value_of_rank_zero_is_stored_by_init(over: str) -> None:
    def script(kv: KVStore):
        kv.init("w", np.full(SHAPE, 10 + kv.rank, "float32"))
        out = np.zeros(SHAPE, "float32")
        kv.pull("w", out)
        assert (out == 10).all()

    run_job(script, over=over)


def test_broadcast_gives_rank_zeros_value_to_all() -> None:
    """Row: tests/nightly/dist_device_sync_kvstore_custom.py, broadcast of 400 keys (dense, cpu; small and big)."""
    keys = ["b%d" % number for number in range(400)]
    shapes = [BIG if number % 100 == 99 else SHAPE for number in range(400)]

    def script(kv: KVStore):
        outs = [[np.zeros(shape, "float32"), np.zeros(shape, "float32")] for shape in shapes]
        mine = [np.full(shape, number + 1000 * kv.rank, "float32") for number, shape in enumerate(shapes)]
        kv.broadcast(keys, mine, outs)
        for number, pair in enumerate(outs):
            assert all((out == number).all() for out in pair)

    run_job(script)


def test_ten_thousand_keys_are_pushed_and_pulled_exactly() -> None:
    """Row: ps-lite tests/test_kv_app (pushes of 10,000 keys, pull of the sums, then pushpull)."""
    keys = list(range(10000))
    random = np.random.default_rng(0)
    values = [random.random(4, "float32") for _ in keys]

    def script(kv: KVStore):
        kv.init(keys, [np.zeros(4, "float32") for _ in keys])
        kv.set_optimizer("test", rescale_grad=1.0)
        outs = [np.zeros(4, "float32") for _ in keys]
        kv.push(keys, values)
        kv.pull(keys, outs)
        assert np.allclose(outs, 2 * np.array(values), rtol=1e-5)
        some = keys[:500]
        kv.pushpull(some, values[:500], outs[:500])
        assert np.allclose(outs[:500], 4 * np.array(values[:500]), rtol=1e-5)

    run_job(script, op_timeout_s=90.0, over="zmq")


def test_pushpull_out_of_place_and_in_place_of_one_key_and_of_lists() -> None:
    """Row: tests/python/unittest/test_kvstore_custom.py, pushpull single and list, 4 devices."""

    def script(kv: KVStore):
        keys = [5, 7, 11]
        kv.init([3, *keys], [np.zeros(SHAPE, "float32") for _ in range(4)])
        out = np.zeros(SHAPE, "float32")
        kv.pushpull(3, ones(), out)
        assert (out == 2).all()
        devices = [ones() for _ in range(4)]
        kv.pushpull(3, devices)
        assert all((value == 8).all() for value in devices)
        lists = [[ones() for _ in range(4)] for _ in keys]
        outs = [[np.zeros(SHAPE, "float32") for _ in range(4)] for _ in keys]
        kv.pushpull(keys, lists, outs)
        assert all((value == 8).all() for group in outs for value in group)
        assert all((value == 1).all() for group in lists for value in group)
        kv.pushpull(keys, lists)
        assert all((value == 8).all() for group in lists for value in group)

    run_job(script)


def test_pushpull_in_place_sums_workers_and_devices_each_time() -> None:
    """Row: tests/nightly/dist_device_sync_kvstore_custom.py, in-place pushpull (2 buffers a worker, 3 repeats)."""

    def script(kv: KVStore):
        kv.init("p", np.zeros(BIG, "float32"))
        for _ in range(3):
            values = [np.full(BIG, kv.rank + 1, "float32") for _ in range(2)]
            kv.pushpull("p", values)
            assert all((value == 3 * 2).all() for value in values)

    run_job(script)


def test_a_pull_that_overlaps_the_next_round_never_sees_a_mixed_value() -> None:
    """Every element of a pulled value is of one round, on all servers, while the other worker runs ahead."""
    rounds = 60

    def script(kv: KVStore):
        kv.init("w", np.zeros(BIG, "float32"))
        kv.set_optimizer("test", rescale_grad=1)
        out = np.empty(BIG, "float32")
        for step in range(1, rounds + 1):
            kv.push("w", np.full(BIG, 0.5, "float32"))
            if kv.rank == 1 and step % 7:
                continue
            kv.pull("w", out)
            assert out.min() == out.max() == step
        return None

    run_job(script, 2, 2, over="zmq")


def test_str_keys_declared_in_different_orders_are_not_swapped() -> None:
    """In MXNet such keys were swapped silently. Names go on the wire, so the order of init means nothing."""

    def script(kv: KVStore):
        values = {"a": np.full(SHAPE, 1, "float32"), "b": np.full(SHAPE, 2, "float32")}
        order = ["a", "b"] if kv.rank == 0 else ["b", "a"]
        kv.init(order, [values[name] for name in order])
        out = np.zeros(SHAPE, "float32")
        for name, value in values.items():
            kv.pull(name, out)
            assert (out == value).all()

    run_job(script)


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (lambda rank: ("w", np.zeros((2, 3 + rank), "float32")), ["'w'", "(2, 3)", "(2, 4)", "worker-0", "worker-1"]),
        (lambda rank: ("w", np.zeros(2, ["float32", "float64"][rank])), ["float32", "float64"]),
        (lambda rank: (["w", "v"][rank], np.zeros(2, "float32")), ["does not"]),
    ],
)
def test_an_init_that_differs_between_workers_names_both(mine, words) -> None:
    def script(kv: KVStore):
        with pytest.raises(KVError) as caught:
            kv.init(*mine(kv.rank))
        for word in words:
            assert word in str(caught.value)
        # The store lives on.
        kv.init("good", ones())

    run_job(script)


def test_one_worker_in_barrier_and_another_in_init_is_an_error_for_both() -> None:
    def script(kv: KVStore):
        with pytest.raises(KVError, match="barrier"):
            if kv.rank == 0:
                kv.barrier()
            else:
                kv.init("w", ones())

    run_job(script)


def test_async_applies_on_arrival() -> None:
    """Row: tests/nightly/dist_async_kvstore.py (the store's part): each push is applied by itself."""

    def script(kv: KVStore):
        kv.init("w", np.zeros(BIG, "float32"))
        kv.set_optimizer("test", rescale_grad=1)
        kv.barrier()
        out = np.zeros(BIG, "float32")
        for step in range(1, 6):
            kv.push("w", np.ones(BIG, "float32"))
            kv.pull("w", out)
            assert out.min() >= step, "a pull has at least the caller's last push"
        kv.barrier()
        kv.pull("w", out)
        assert (out == 10).all()

    run_job(script, type_name="dist_async", over="zmq")


def test_an_equal_rule_keeps_its_state_and_a_different_one_is_refused() -> None:
    def script(kv: KVStore):
        kv.init("w", np.zeros(SHAPE, "float32"))
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        out = np.zeros(SHAPE, "float32")
        kv.push("w", ones())
        kv.pull("w", out)
        assert np.allclose(out, -2)
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        kv.push("w", ones())
        kv.pull("w", out)
        assert np.allclose(out, -2 + 0.5 * -2 - 2)
        kv.barrier()
        if kv.rank == 0:
            with pytest.raises(KVError, match="replace=True"):
                kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
            kv.set_optimizer("test", rescale_grad=1.0, replace=True)
        kv.barrier()
        kv.push("w", ones())
        kv.pull("w", out)
        assert np.allclose(out, -5 + 2)

    run_job(script)


def test_a_rule_that_fails_on_a_server_is_raised_with_the_servers_traceback(monkeypatch) -> None:
    from distrun_runtime.ops.optimizers import sgd

    def explode(self, *args):
        raise ZeroDivisionError("in the rule")

    monkeypatch.setattr(sgd.Test, "update", explode)

    def script(kv: KVStore):
        kv.init("w", ones())
        kv.set_optimizer("test", rescale_grad=1.0)
        kv.push("w", ones())
        with pytest.raises(RuleError, match="in the rule") as caught:
            kv.pull("w", np.zeros(SHAPE, "float32"))
        assert "ZeroDivisionError" in caught.value.server_traceback
        assert "server-" in str(caught.value)

    run_job(script)


def test_two_stores_of_one_process_do_not_meet() -> None:
    """In MXNet a second dist store hung for ever."""

    def script(session):
        first, second = open_store("dist_sync", session), open_store("dist_async", session)
        first.init("w", ones())
        second.init("w", np.full(SHAPE, 5, "float32"))
        out = np.zeros(SHAPE, "float32")
        second.pull("w", out)
        assert (out == 5).all()
        first.push("w", ones())
        first.pull("w", out)
        assert (out == 2).all()

    with Cluster(over="inproc") as job:
        job.run_sessions(script)


def test_workers_that_create_different_types_are_told() -> None:
    def script(session):
        with pytest.raises(KVError, match="dist_async"):
            open_store(["dist_sync", "dist_async"][session.rank], session)

    with Cluster(over="inproc") as job:
        job.run_sessions(script)


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (["dist", "dist_sync", "dist_device_sync", "dist_sync_device"], 4),
        (["dist_async", "dist_device_async", "dist_async_device"], 1),
    ],
    ids=["sync", "async"],
)
def test_kinds_that_differ_only_in_where_devices_are_summed_share_a_store(names: list[str], first: int) -> None:
    def script(session):
        kv = open_store(names[session.rank], session)
        kv.init("w", np.zeros(SHAPE, "float32"))
        kv.set_optimizer("test")
        kv.push("w", ones())
        out = np.zeros(SHAPE, "float32")
        kv.pull("w", out)
        assert out[0, 0] >= first  # with rounds, a pull waits for the push of every worker
        kv.barrier()
        kv.pull("w", out)
        assert out[0, 0] == len(names)
        return kv.type

    with Cluster(len(names), over="inproc") as job:
        assert job.run_sessions(script) == names


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TimedOut("init: no answer"), "no answer"),
        (KeyboardInterrupt("no answer"), "interrupted before the servers had the values"),
    ],
    ids=["timed out", "interrupted"],
)
def test_an_init_whose_values_may_not_have_arrived_fails_for_all_and_can_be_made_again(error, told) -> None:
    """The servers answered with rounds of a key that no worker knew, and `join` was a KeyError."""

    def script(kv: KVStore) -> None:
        node = kv._backend._link.node
        ask = node.ask

        def failing(what, messages, **how):
            request = ask(what, messages, **how)
            if messages[0][0].startswith("server-"):
                request.wait(scaled(20))
                raise error
            return request

        if kv.rank == 0:
            node.ask = failing
        with pytest.raises(type(error) if kv.rank == 0 else KVError, match=told if kv.rank else "no answer"):
            kv.init("w", np.zeros(SHAPE, "float32"))
        node.ask = ask
        kv.init("w", np.zeros(SHAPE, "float32"))
        out = np.zeros(SHAPE, "float32")
        for _ in range(1 + kv.rank):
            kv.pushpull("w", ones(), out)
        kv.join()
        kv.pushpull("w", ones(), out)
        assert (out == 2).all()

    run_job(script, 2, 1)


def test_the_death_of_a_server_ends_every_blocked_call_and_names_it() -> None:
    ready = threading.Barrier(2)

    def script(kv: KVStore):
        kv.init("w", np.zeros(BIG, "float32"))
        ready.wait(scaled(60))
        if kv.rank == 0:
            kv.push("w", ones(BIG))
            threading.Timer(0.2, lambda: job.network.cut(job.transports["server-1"])).start()
        with pytest.raises(PeerLost, match="server-1"):
            if kv.rank == 0:
                kv.pull("w", np.zeros(BIG, "float32"))
            else:
                kv.barrier()
        with pytest.raises(PeerLost, match="server-1"):
            kv.push("w", ones(BIG))
            kv.barrier()

    with Cluster(over="inproc") as job:
        job.run(script)
    assert job.codes["scheduler"] == 1


def test_a_slow_round_reaches_the_deadline_of_the_call_and_says_for_whom(monkeypatch) -> None:
    from distrun_runtime.ps import role

    monkeypatch.setattr(role, "FIRST_NOTE_S", 0.3)
    late = threading.Event()

    def script(kv: KVStore):
        kv.init("w", np.zeros(SHAPE, "float32"))
        if kv.rank == 0:
            kv.push("w", ones())
            with pytest.raises(TimedOut, match=r"waiting for worker-1, key w, round 1.*--op-timeout"):
                kv.pull("w", np.zeros(SHAPE, "float32"))
            late.set()
        else:
            assert late.wait(scaled(60))
            kv.push("w", ones())

    run_job(script, op_timeout_s=4.0)


def test_wrong_counts_and_strangers_are_refused_with_the_reason() -> None:
    def script(kv: KVStore):
        for changes, words in (
            ({"workers": 3}, "expects 3 workers"),
            ({"token": b"another"}, "token"),
            ({"token": b""}, "token"),
            ({"job": "other-job"}, "other-job"),
            ({"rank": 1}, "rank 1 is taken"),
            ({"rank": -1}, "all 2 workers have registered"),
        ):
            if kv.rank == 0:
                stranger = job.session(**changes)
                with pytest.raises(ConnectionError, match=words):
                    stranger.open()
                stranger.end()
        kv.barrier()

    with Cluster(over="zmq") as job:
        job.run(script)
    assert set(job.codes.values()) == {0}


def test_registration_ends_at_its_deadline_and_names_who_is_missing() -> None:
    with Cluster(2, 1, over="inproc", start_timeout_s=3.0) as job:
        alone = job.session(0)
        with pytest.raises(PeerLost, match="waiting for 1 of 2 workers: have worker-0@here"):
            alone.open()
        alone.end()
    assert job.codes["scheduler"] == 1


def test_a_missing_scheduler_is_named_with_its_address() -> None:
    from distrun_runtime.ps.session import NodeSession

    session = NodeSession(config("worker", root_port=9, start_timeout_s=0.5), InprocNetwork().transport())
    with pytest.raises(TimedOut, match=r"no scheduler answered at tcp://127\.0\.0\.1:9"):
        session.open()
    session.end()


def test_under_an_agent_the_job_runs_several_scripts_after_each_other(over: str) -> None:
    """The first worker to end may start its next script while the other still runs the present one."""

    def script(rank: int) -> None:
        for number in range(3):
            session = job.session(rank)
            session.open()
            kv = open_store("dist_sync", session)
            kv.init("w", np.full(SHAPE, number, "float32"))
            out = np.zeros(SHAPE, "float32")
            kv.pull("w", out)
            assert (out == number).all(), "the servers kept a value of the last script"
            kv.push("w", ones())
            kv.pull("w", out)
            assert (out == 2).all()
            if rank == 1:
                time.sleep(0.3)
            session.end()

    with Cluster(over=over, stays=True) as job, ThreadPoolExecutor(2) as threads:
        for ended in [threads.submit(script, rank) for rank in range(2)]:
            ended.result(DEADLINE_S)
        assert not job.codes, "scheduler and servers stay until they are told to stop"


@pytest.mark.parametrize("codec", [None, {"type": "fp16", "two_way": True}])
def test_outputs_of_any_strides_and_number_are_filled(codec: dict[str, object] | None) -> None:
    """Of a value that shares a message with others, and of one that is cut into shards on both servers."""

    def script(kv: KVStore):
        shapes = {"small": (40, 30), "large": (700, 600)}
        values = {key: np.arange(np.prod(shape), dtype="float32").reshape(shape) % 97 for key, shape in shapes.items()}
        if codec:
            kv.set_gradient_compression(codec)
        kv.init(list(values), list(values.values()))
        for key, (rows, columns) in shapes.items():
            plain, fortran = np.zeros((rows, columns), "float32"), np.zeros((rows, columns), "float32", order="F")
            canvas = np.zeros((2 * rows, columns), "float32")
            for outs in ([canvas[::2], fortran], [plain, canvas[::2], fortran]):
                kv.pull(key, outs)
                assert all((out == values[key]).all() for out in outs)
                assert not canvas[1::2].any()
                for out in outs:
                    out[...] = 0

    run_job(script, 1, 2)
