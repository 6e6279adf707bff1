"""Where a server keeps the arrays of each store: decided from what is known, said, and what comes of failing GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, config, open_store
from gpukit import Machine, gpus_of_process
from history_server import Piece, data

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.cuda import CudaMissing, ProgramError
from distrun_runtime.arrays.gpu import GpuDevice
from distrun_runtime.errors import ContractError, KVError, PeerLost
from distrun_runtime.ops import update
from distrun_runtime.ops.optimizers import RuleSpec, rule_of
from distrun_runtime.ops.partition import Shard
from distrun_runtime.protocol.message import DTYPE_CODES, Kind
from distrun_runtime.ps import arithmetic, role, routing
from distrun_runtime.ps.device_choice import DeviceChoice, Placement, decide, need_of, obstacle_of
from distrun_runtime.ps.engine import WorkEngine
from distrun_runtime.ps.node import placement_of
from distrun_runtime.ps.shards import Store, relayed
from distrun_runtime.ps.values import Values

MIB = 1 << 20
F32 = DTYPE_CODES[np.dtype(np.float32)]


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine(2)
    with gpus_of_process(made):
        yield made
    made.finish()


def rule(name: str, **params: Any) -> Any:
    return rule_of(RuleSpec(name, params), ())


def values_of(
    *lengths: int, on_devices: bool = True, rows: int = 0, number: int = 1, code: int = F32, deterministic: bool = False
) -> Values:
    """Return a store of one key for each length, given their places at once."""
    store = Store(number, 2)
    store.on_devices = on_devices
    store.is_deterministic = deterministic
    made = Values(store, devices.get("cpu:0"))
    add(made, *lengths, code=code, rows=rows)
    return made


def add(values: Values, *lengths: int, code: int = F32, rows: int = 0) -> None:
    """Give further keys their places."""
    first = values.store.count
    shards = values.store.add([Shard(0, 0, length, key, code, rows) for key, length in enumerate(lengths, first)])
    values.store.names.update({key: "w%d" % key for key in range(first, values.store.count)})
    values.place(shards, code)


class Said(list[tuple[str, str]]):
    """What a placement writes to the server's log."""


def placed(asked: str = "auto", **options: Any) -> tuple[Placement, Said]:
    placement, said = Placement(devices.get("cpu:0"), asked, **options), Said()
    placement.say = lambda level, text: said.append((level, text))
    return placement, said


# The decision


@pytest.mark.parametrize(
    ("asked", "on_devices", "need", "obstacle", "room", "on_gpu", "is_unexpected"),
    [
        ("cpu", True, 1, "", 10, False, False),
        ("auto", True, 10, "", 10, True, False),
        ("auto", True, 11, "", 10, False, False),
        ("auto", True, 11, "", None, True, False),
        ("auto", False, 1, "", 10, False, False),
        ("auto", True, 1, "key 'e' is row-sparse", 10, False, False),
        ("gpu", False, 11, "", 10, True, False),
        ("gpu:1", True, 11, "", 10, True, False),
        ("gpu:1", False, 1, "key 'e' is row-sparse", 10, False, True),
    ],
)
def test_a_store_is_where_it_was_asked_for_or_where_it_fits(
    asked: str, on_devices: bool, need: int, obstacle: str, room: int | None, on_gpu: bool, is_unexpected: bool
) -> None:
    found = decide(asked, on_devices, need, room, obstacle)
    assert (found.on_gpu, found.is_unexpected) == (on_gpu, is_unexpected)
    assert bool(found.why) == (on_gpu or obstacle != "" or (asked == "auto" and on_devices))


def test_stores_that_need_no_gpu_are_in_the_hosts_memory_without_a_word() -> None:
    assert decide("auto", False, 1, 10) == decide("cpu", True, 1, 10) == DeviceChoice(False)


def test_weights_states_two_rounds_and_what_a_message_brings_have_to_fit() -> None:
    values = values_of(3 * MIB, MIB)
    assert need_of(values, None) == (5 + 2) * 16 * MIB, (
        "a weight, two sums and what came first for each; and a contribution, plain and scaled"
    )
    assert need_of(values, rule("sgd", learning_rate=1.0)) == need_of(values, None)
    assert need_of(values, rule("adam", learning_rate=1.0)) == (7 + 2) * 16 * MIB
    half = values_of(4 * MIB, code=DTYPE_CODES[np.dtype(np.float16)])
    assert need_of(half, None) == (8 + 4 * 16 + 2 * 16) * MIB, "sums of 16-bit floats are float32"
    many = values_of(*[MIB] * 64)
    assert need_of(many, None) == (5 * 256 + 2 * 16) * MIB, "no message has more than 16 MiB"
    each = values_of(MIB, MIB, deterministic=True)
    assert need_of(each, None) == (8 + 2 * 2 * 8 + 2 * 8) * MIB, "what each of two workers gives is kept"
    values.has_residuals = True
    assert need_of(values, None) == (5 + 2 + 1) * 16 * MIB, "what encoded answers leave out is float32"


def test_places_that_were_taken_back_are_given_again() -> None:
    values = values_of(3 * MIB)
    alone, before = need_of(values, None), values.extent()
    add(values, 20 * MIB, 5)
    assert need_of(values, None) > alone
    values.take_back(before, np.array([1, 2]))
    values.store.take_back(np.array([1, 2]))
    assert need_of(values, None) == alone
    other = values_of(3 * MIB)
    for each in (values, other):
        add(each, 9, 20 * MIB)
    assert values.at[:3].tolist() == other.at[:3].tolist()
    assert values.store.by_key == other.store.by_key


@pytest.mark.parametrize("seed", range(6))
def test_no_list_of_sizes_makes_arenas_take_more_than_was_estimated(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Keys of random sizes and dtypes, given their places in random groups, with all that two rounds can keep."""
    monkeypatch.setattr(devices, "FIRST_BYTES", 4096)
    monkeypatch.setattr(devices, "BLOCK_BYTES", 64 * 1024)
    random = np.random.default_rng(seed)
    gpu = machine.gpus.get(0)
    values = values_of()
    adam = rule("adam", learning_rate=1.0, multi_precision=True)
    values.set_rule(adam, RuleSpec("adam", {"multi_precision": True}))
    values.move(gpu)
    for _ in range(int(random.integers(1, 12))):
        code = DTYPE_CODES[np.dtype([np.float32, np.float16, np.float64][random.integers(3)])]
        add(values, *random.integers(1, 2 ** random.integers(1, 16), random.integers(1, 4)).tolist(), code=code)
    held = []
    for shard in range(values.store.count):
        begin, end = values.span(shard)
        values.set_state(shard, update.new_state(adam, values.weight(shard)))
        for number in (1, 2):
            sums = values.sums(values.round_of(number), int(values.store.dtype[shard])).view(begin, end)
            held.append(gpu.empty(sums.shape, sums.dtype))
        values.residual_of(shard)
    values.has_residuals = True
    gpu.pool.trim()
    brought = need_of(values, adam) - gpu.pool.size
    assert 0 <= brought <= 2 * 3 * 16 * MIB, "not more either, but for what a message of each dtype brings"


def test_contributions_to_two_rounds_take_no_more_than_was_estimated(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is two rounds ahead of the last one; another has contributed to every second shard."""
    monkeypatch.setattr(routing, "DEVICE_MESSAGE_BYTES", 1 << 16)
    gpu, values, length = machine.gpus.get(0), values_of(*[1 << 14] * 40), 1 << 14
    values.move(gpu)
    for shard in range(40):
        values.weight(shard)
    for number in (1, 2):
        for rank, step in ((0, 1), (1, 2)):
            for shard in range(0, 40, step):
                payload = np.full(length, rank, np.float32).tobytes()
                message = data(Kind.PUSH, [Piece(shard, 0, length, number, payload=payload)])
                batch = role.Batch(values.store, np.array([shard]), message, message.entries)
                arithmetic.add(values, role.Add(rank, number, batch))
    gpu.synchronize()
    gpu.pool.trim()
    assert gpu.pool.size <= need_of(values, None)


@pytest.mark.parametrize(
    ("name", "says"),
    [("sgd", ""), ("adam", ""), ("lamb", "norms over the whole value"), ("lars", "norms over the whole value")],
)
def test_rules_that_a_gpu_does_not_do_are_named(name: str, says: str) -> None:
    found = obstacle_of(values_of(10).store, rule(name, learning_rate=1.0))
    assert says in found
    assert bool(found) == bool(says)


def test_row_sparse_keys_are_named() -> None:
    assert obstacle_of(values_of(10, 20, rows=5).store, None) == "key 'w0' is row-sparse"


# What comes of it


def test_with_auto_stores_of_device_kinds_come_to_the_gpu_and_it_is_said_once(machine: Machine) -> None:
    placement, said = placed(index=3)
    assert placement.place(values_of(100, on_devices=False), None) is placement.host
    assert machine.standin.calls["alloc"] == 0
    assert said == []
    store = values_of(100)
    assert placement.place(store, None) is placement.place(store, None) is machine.gpus.get(1), "the fourth of two"
    ((level, text),) = said
    assert level == "INFO"
    assert text.startswith("event=device store=1 device=gpu:1 reason=weights, states and 2 rounds need 3.0 MiB")
    assert machine.gpus.get(1).pool.limit == machine.standin.memory_bytes // 2


def test_without_a_gpu_stores_of_device_kinds_stay_and_why_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise CudaMissing("a GPU needs cupy, which is not installed")

    monkeypatch.setattr(devices, "gpus", missing)
    placement, said = placed()
    for number in (1, 2):
        assert placement.place(values_of(100, number=number), None) is placement.host
    text = "event=device store=1 device=cpu:0 reason=a GPU needs cupy, which is not installed"
    assert said == [("INFO", text)]


def test_a_store_that_grows_beyond_the_limit_leaves_and_stays_away(machine: Machine) -> None:
    placement, said = placed(limit=32 * MIB)
    small = values_of(100)
    assert placement.place(small, None).name == "gpu:0"
    add(small, 2 * MIB)
    assert placement.place(small, None) is placement.host
    assert said[-1][1].endswith("need 61.0 MiB, and 32.0 MiB are left of the server's part of the GPU's memory")
    assert placement.place(small, None) is placement.host
    assert [level for level, _ in said] == ["INFO", "WARNING"], "that it has left is seen where INFO is not"


def test_what_other_stores_take_is_not_left(machine: Machine) -> None:
    placement, said = placed(limit=32 * MIB)
    assert placement.place(values_of(MIB, number=1), None).name == "gpu:0"
    assert placement.place(values_of(MIB, number=2), None) is placement.host
    assert "need 28.0 MiB, and 4.0 MiB are left" in said[-1][1]
    placement.forget()
    assert placement.place(values_of(MIB, number=2), None).name == "gpu:0", "the next script has the whole room"


@pytest.mark.parametrize("which", ["sums", "rule"])
def test_with_auto_kernels_that_do_not_compile_leave_the_store_in_host_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ProgramError("no compiler for " + which)

    owner: Any = {"sums": GpuDevice, "rule": update}[which]
    monkeypatch.setattr(owner, "prepare", fails)
    placement, said = placed()
    store = values_of(100)
    if which == "rule":
        assert placement.place(store, None).name == "gpu:0"
    assert placement.place(store, rule("adam", learning_rate=1.0)) is placement.host
    assert said[-1] == ("WARNING", "event=device store=1 device=cpu:0 reason=no compiler for " + which)
    asked, _ = placed("gpu:0")
    asked.open()
    with pytest.raises(KVError, match="no compiler for"):
        asked.place(values_of(100), rule("adam", learning_rate=1.0))


def test_with_auto_a_gpu_that_fails_for_good_while_it_is_looked_for_is_no_missing_gpu(machine: Machine) -> None:
    placement, said = placed()
    machine.standin.fail("memory")
    assert placement.failed is None
    with pytest.raises(KVError, match="cannot use the GPU any more"):
        placement.place(values_of(100), None)
    assert "cannot use the GPU any more" in str(placement.failed)
    assert said == []


def test_a_gpu_that_was_asked_for_by_name_takes_every_store_but_sums_of_relays(machine: Machine) -> None:
    placement, _ = placed("gpu:1", limit=MIB)
    placement.open()
    assert placement.place(values_of(MIB, on_devices=False), None).name == "gpu:1"
    assert placement.place(values_of(MIB, number=relayed(1)), None) is placement.host
    spread = [placed("gpu", index=index)[0] for index in range(3)]
    assert [each.place(values_of(10), None).name for each in spread] == ["gpu:0", "gpu:1", "gpu:0"]


def test_a_gpu_that_is_not_there_is_an_error_with_what_to_type(machine: Machine) -> None:
    placement, _ = placed("gpu:2")
    with pytest.raises(ContractError, match=r"--server-device gpu:2 .*this process sees gpu:0 to gpu:1") as caught:
        placement.open()
    assert str(caught.value).endswith("DISTRUN_SERVER_DEVICE=cpu for every server)")


def test_servers_without_values_look_for_no_gpu() -> None:
    node = config("server", servers=1, relays=1, rank=1, server_device="gpu:99")
    placement_of(node, devices.get("cpu:0")).open()


def test_a_server_without_its_gpu_ends_before_it_binds_anything() -> None:
    # cupy cannot be imported there, whatever this environment has.
    code = (
        "import sys; sys.modules['cupy'] = None; from distrun_runtime.__main__ import main; sys.exit(main(['server']))"
    )
    job = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"}
    env = {**os.environ, **job, "DISTRUN_SERVER_DEVICE": "gpu:0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("distrun: error: --server-device gpu:0 (DISTRUN_SERVER_DEVICE): "), done.stderr
    assert "distrun[cuda12]" in done.stderr
    assert "--server-device cpu" in done.stderr
    assert "event=bound" not in done.stderr


# Jobs


def rounds(kv: Any) -> str:
    """Do two rounds without a rule; return the servers' devices."""
    keys, values = ["w", "b"], [np.ones(5000, np.float32), np.zeros((3, 4), np.float16)]
    kv.init(keys, values)
    for step in (1, 2):
        kv.push(keys, [np.full(each.shape, step + kv.rank, each.dtype) for each in values])
        outs = [np.empty_like(each) for each in values]
        kv.pull(keys, outs)
        assert all((out == 2 * step + 1).all() for out in outs)
    return ",".join(each["device"] for each in kv.stats())


@pytest.mark.parametrize(
    ("asked", "kinds", "found"),
    [
        ("auto", ("dist_device_sync", "dist_device_sync"), "gpu:0,gpu:0"),
        ("auto", ("dist_sync", "dist_sync_device"), "gpu:0,gpu:0"),
        ("auto", ("dist_sync", "dist_sync"), "cpu:0,cpu:0"),
        ("gpu:1", ("dist_sync", "dist_sync"), "gpu:1,gpu:1"),
        ("cpu", ("dist_device_sync", "dist_device_sync"), "cpu:0,cpu:0"),
    ],
)
def test_one_worker_that_asks_for_a_device_store_is_enough(
    machine: Machine, asked: str, kinds: tuple[str, str], found: str
) -> None:
    with Cluster(2, 2, server_device=asked) as made:
        told = made.run_sessions(lambda session: rounds(open_store(kinds[session.rank], session)))
    assert told == [found, found]
    assert ("alloc" in machine.standin.calls) == ("gpu" in found)


@pytest.mark.parametrize("fits", [False, True])
def test_a_store_leaves_the_gpu_if_what_encoded_answers_leave_out_does_not_fit(machine: Machine, fits: bool) -> None:
    """What the answer of the second round leaves out comes with the third one, wherever that is made."""

    def script(kv: Any) -> tuple[list[float], str]:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "two_way": True, "min_size": 0})
        kv.init("w", np.zeros(MIB // 8, np.float32))
        out = np.empty(MIB // 8, np.float32)
        for _ in range(3):
            kv.pushpull("w", np.full(MIB // 8, 0.3, np.float32), out)
        assert (out == out[0]).all()
        return [float(out[0])], kv.stats()[0]["device"]

    need = need_of(values_of(MIB // 8), None)
    with Cluster(2, 1, server_gpu_bytes=need + fits * MIB // 2) as made:
        told = made.run(script, "dist_device_sync")
    assert told == [([0.5], "gpu:0" if fits else "cpu:0")] * 2


@pytest.mark.parametrize("name", ["lars", "rules_of_users:Fussy"])
def test_a_store_whose_rule_a_gpu_does_not_do_leaves_it_with_its_values(machine: Machine, name: str) -> None:
    def script(kv: Any) -> tuple[str, str]:
        kv.init("w", np.ones(1000, np.float32))
        out = np.empty(1000, np.float32)
        kv.pushpull("w", np.full(1000, 3, np.float32), out)
        before = kv.stats()[0]["device"]
        kv.barrier()
        kv.set_optimizer(name, rescale_grad=0.5)
        kv.pull("w", out)
        assert (out == 6).all()
        return before, kv.stats()[0]["device"]

    with Cluster(2, 1, imports=("rules_of_users",)) as made:
        assert made.run(script, "dist_device_sync") == [("gpu:0", "cpu:0")] * 2


def test_with_auto_a_store_whose_values_find_no_place_goes_on_in_host_memory_and_says_so(machine: Machine) -> None:
    """Another process has taken the memory since the server looked."""

    def script(kv: Any) -> list[str]:
        kv.init("w", np.full(1000, 5, np.float32))
        kv.pushpull("w", np.ones(1000, np.float32))
        where = [kv.stats()[0]["device"]]
        kv.barrier()
        machine.standin.memory_bytes = sum(machine.standin.used)
        kv.init("large", np.full(MIB, 7, np.float32))
        out, large = np.empty(1000, np.float32), np.empty(MIB, np.float32)
        kv.pull(["w", "large"], [out, large])
        assert (out == 2).all()
        assert (large == 7).all()
        kv.pushpull(["w", "large"], [out, large])
        assert (large == 14).all()
        return [*where, kv.stats()[0]["device"]]

    with Cluster(2, 1) as made:
        assert made.run(script, "dist_device_sync") == [["gpu:0", "cpu:0"]] * 2
    assert sum(machine.standin.used) < MIB


def test_with_auto_values_for_which_a_gpu_has_no_memory_stay_and_go_on(machine: Machine) -> None:
    """They come from host memory, when the first worker says that it has a device store."""
    placement, said = placed()
    engine = WorkEngine(placement.host, placement=placement)
    values = values_of(MIB, on_devices=False)
    values.device = placement.host
    engine._values[1] = values
    values.weight(0)[:] = 3
    values.store.on_devices = True
    assert placement._found(values.store) is not None
    machine.standin.memory_bytes = 2 * MIB
    engine._settle(values, None)
    assert values.device is placement.host
    assert (values.weight(0) == 3).all()
    level, text = said[-1]
    assert level == "WARNING"
    assert text.startswith("event=device store=1 device=cpu:0 reason=alloc on gpu:0 failed: ")
    engine._settle(values, None)
    assert len(said) == 2, "that it came, and that it stays away"
    named, _ = placed("gpu:0")
    named.open()
    other = WorkEngine(named.host, placement=named)
    values = values_of(MIB)
    values.weight(0)[:] = 3
    with pytest.raises(KVError, match="wanted 4194304 bytes"):
        other._settle(values, None)
    assert (values.weight(0) == 3).all()


def test_values_that_find_no_place_fail_by_server_key_and_bytes(machine: Machine) -> None:
    def script(kv: Any) -> None:
        kv.init("w", np.ones(MIB, np.float32))

    with Cluster(1, 1, server_device="gpu:0", server_gpu_bytes=MIB) as made, pytest.raises(KVError) as caught:
        made.run(script)
    text = str(caught.value)
    assert "server-0 cannot take the values of key 'w'" in text
    assert "wanted 4194304 bytes, free are 1048576 of 1048576" in text
    assert "--server-device cpu" in text


def test_a_key_whose_init_failed_can_be_initialised_once_there_is_memory(machine: Machine) -> None:
    """One of two servers had room for its part."""

    def script(kv: Any) -> int:
        there = machine.standin.memory_bytes
        machine.standin.memory_bytes = sum(machine.standin.used) + 5 * MIB
        with pytest.raises(KVError, match="cannot take the values of key 'w'"):
            kv.init(["w", "v"], [np.ones(MIB // 2, np.float32), np.ones(MIB // 2, np.float32)])
        machine.standin.memory_bytes = there
        kv.init("w", np.ones(MIB // 2, np.float32))
        out = np.empty(MIB // 2, np.float32)
        kv.pushpull("w", np.full(MIB // 2, 3, np.float32), out)
        assert (out == 3).all()
        return sum(each["keys"] for each in kv.stats())

    with Cluster(1, 2, server_device="gpu:0") as made:
        assert made.run(script)[0] > 0


def test_a_sum_that_finds_no_place_fails_the_round_and_is_not_taken_for_one(machine: Machine) -> None:
    """The first push was acknowledged long ago: the pull of the round says it, to both workers."""

    def script(kv: Any) -> str:
        kv.init("w", np.ones(MIB // 4, np.float32))
        with pytest.raises(KVError) as caught:
            kv.pushpull("w", np.full(MIB // 4, 1.0, np.float32))
        return str(caught.value)

    with Cluster(3, 1, server_device="gpu:0", server_gpu_bytes=2 * MIB) as made:
        told = made.run(script)
    assert len(set(told)) == 1
    assert "the update failed on server-0 for key 'w': " in told[0]
    assert "wanted " in told[0]
    assert told[0].count("--server-device cpu") == 1


@pytest.mark.parametrize("call", ["launch", "synchronize"])
def test_a_gpu_that_fails_for_good_ends_the_server_and_everybody_hears_why(machine: Machine, call: str) -> None:
    def script(kv: Any) -> None:
        kv.init("w", np.ones(1000, np.float32))
        kv.barrier()
        if kv.rank == 0:
            machine.standin.fail(call)
        kv.barrier()
        for _ in range(3):
            kv.pushpull("w", np.ones(1000, np.float32))

    with Cluster(2, 1, server_device="gpu:0") as made, pytest.raises(PeerLost) as caught:
        made.run(script)
    assert made.codes["server-0"] == 1
    assert caught.value.lost_peer == "server-0"
    assert "server-0" in str(caught.value)
    assert "cudaErrorIllegalAddress" in str(caught.value)
    assert "cannot use the GPU any more" in str(caught.value)
