"""Servers on a GPU: their work gives the bytes that it gives in host memory, and states go from one to the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cluster
import numpy as np
import pytest
from gpukit import Machine, gpus_of_process, values
from history_server import History, Piece, data, raw, reason, said
from history_server import values as values_of

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.cuda import CudaError, CudaOutOfMemory, ProgramError
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.arrays.shared_memory import Pool, address_of
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression, fuse
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.partition import Shard
from distrun_runtime.ops.reduce import PLAIN, How
from distrun_runtime.protocol.message import DTYPES, Kind
from distrun_runtime.ps import replies, role
from distrun_runtime.ps import values as ps_values
from distrun_runtime.ps.device_choice import Placement
from distrun_runtime.ps.engine import WorkEngine
from distrun_runtime.ps.shards import Store
from distrun_runtime.ps.values import Values

FUSABLE = [name for name, kind in sorted(rules.RULES.items()) if not fuse.why_not(kind({}))]
SIZES = (5, 3, 20)
"""Elements of the keys; the last one is of half precision."""
CODES = (0, 0, DTYPES.index(dtypes.parse("bfloat16")))
ON = ("cpu", "gpu:0")


@pytest.fixture
def machine() -> Iterator[Machine]:
    with gpus_of_process(Machine(1)) as made:
        yield made
        made.finish()


class Side:
    """An engine whose values are on one kind of device, with a store of three keys."""

    def __init__(
        self, asked: str, *, deterministic: bool = False, memory: Pool | None = None, much_bytes: int = 1 << 40
    ) -> None:
        host = devices.get("cpu:0", memory=memory)
        placement = Placement(host, asked)
        placement.open()
        self.engine = WorkEngine(host, placement=placement, much_bytes=much_bytes)
        self.store = Store(1, workers=2)
        self.store.is_deterministic = deterministic
        self.shards = self.store.add(
            [Shard(0, 0, size, key, code) for key, (size, code) in enumerate(zip(SIZES, CODES, strict=True))]
        )
        self.tickets = 0
        self.do(role.Fill(self.batch(0)))

    def do(self, what: role.EngineWork) -> Any:
        done = self.engine.do(what) or self.engine.result(waits=True)
        assert done is not None
        if done.error is not None:
            raise done.error
        return done.value

    def batch(self, seed: int, number: int = 1, how: How = PLAIN, body: Mapping[str, Any] | None = None) -> role.Batch:
        """Return what a message brings to all keys, plain or encoded."""
        pieces = []
        for key, (size, code) in enumerate(zip(SIZES, CODES, strict=True)):
            given = values((size,), DTYPES[code], 10 * seed + key)
            payload = raw(given)
            if how.codec:
                payload = compression.numbered(how.codec).encode(dtypes.widen(given), None, dict(how.params))
            pieces.append(Piece(key, 0, size, number, code, how.codec, payload))
        message = data(Kind.PUSH, pieces, body=dict(body or {}))
        return role.Batch(self.store, self.shards, message, message.entries, how)

    def set_rule(self, name: str, **params: Any) -> None:
        spec = rules.RuleSpec.of(name, params).to_json()
        self.do(role.SetRule(1, spec, data(Kind.RULE)))

    def pulled(self, codec: int = 0, **params: float) -> list[bytes]:
        """Return what a pull of all keys carries."""
        return self.delivered(self.lend(codec, **params))

    def lend(self, codec: int = 0, **params: float) -> int:
        self.tickets += 1
        self.do(role.Lend(self.tickets, self.store, self.shards, np.arange(len(SIZES)), codec, params))
        return self.tickets

    def entries(self) -> Array:
        pieces = [Piece(k, 0, n, 0, c) for k, (n, c) in enumerate(zip(SIZES, CODES, strict=True))]
        return data(Kind.PULL, pieces).entries

    def delivered(self, ticket: int) -> list[bytes]:
        reply = self.do(role.Deliver(ticket, "w0", data(Kind.PULL), self.entries()))
        assert not reply.message.is_error
        self.frames = reply.message.payloads
        self.engine.sent(reply.lent, None)
        return [bytes(frame) for frame in self.frames]

    def lend_floats(self) -> int:
        """Lend the keys of float32: what a message has in one frame."""
        self.tickets += 1
        self.do(role.Lend(self.tickets, self.store, self.shards[:2], np.arange(2)))
        return self.tickets

    def refused(self, ticket: int) -> str:
        """Return why an answer is a refusal."""
        reply = self.do(role.Deliver(ticket, "w0", data(Kind.PULL), self.entries()))
        assert reply.message.is_error
        return str(reply.message.body)

    @property
    def values(self) -> Values:
        return self.engine._values[1]

    def save(self, folder: Path) -> dict[str, Any]:
        body = {"folder": str(folder), "part": "data-1", "file": "server-0.npz", "host": "d1"}
        body["names"] = [[key, "k%d" % key] for key in range(len(SIZES))]  # type: ignore[assignment]
        found: dict[str, Any] = self.do(role.Save(1, data(Kind.SAVE, body=body)))
        return found

    def load(self, folder: Path, saved: Mapping[str, Any], spec: rules.RuleSpec | None) -> None:
        body: dict[str, Any] = {"folder": str(folder), "host": "d1", "action": "stage"}
        body["manifest"] = {"data": "data-1", "files": {saved["file"]: saved["holds"]}}
        body["numbers"] = [[key, key, "k%d" % key] for key in range(len(SIZES))]
        body["spec"] = None if spec is None else spec.to_json()
        self.do(role.Load(1, data(Kind.LOAD, body=body)))
        self.do(role.Load(1, data(Kind.LOAD, body={**body, "action": "commit"})))

    def state(self) -> list[dict[str, Any]]:
        """Return the rule's state of each key, as it is saved."""
        found = [each.on_host() for each in self.values.saved()]
        states = [each.state or {} for each in found]
        rests = [{} if each.residual is None else {"residual": each.residual} for each in found]
        return [
            {name: x.tobytes() if isinstance(x, np.ndarray) else x for name, x in {**state, **rest}.items()}
            for state, rest in zip(states, rests, strict=True)
        ]


def alike(history: Callable[[Side], Any], **options: Any) -> Any:
    """Return what a history gives; on the GPU it gives the same bytes, and the same values and states are left."""
    host, gpu = (Side(asked, **options) for asked in ON)
    expected, found = history(host), history(gpu)
    assert host.values.device.name == "cpu:0"
    assert gpu.values.device.name == "gpu:0"
    assert found == expected
    assert gpu.pulled() == host.pulled()
    assert gpu.state() == host.state()
    return found


@pytest.mark.parametrize(
    ("codec", "scale", "deterministic", "rule"),
    [
        *((0, 1.0, False, None), (0, 1.0, True, "adam"), (0, 0.25, False, "adam"), (0, 0.25, True, None)),
        *((2, 1.0, False, "adam"), (2, 0.25, False, None), (2, 0.25, True, None), (3, 0.25, False, "adam")),
    ],
)
def test_rounds_give_the_bytes_of_host_memory(
    machine: Machine, codec: int, scale: float, deterministic: bool, rule: str | None
) -> None:
    """Contributions that are held, added to sums, the last of a round, plain beside encoded ones; and a skip."""
    params = compression.numbered(codec).check({}) if codec else {}
    how = How(codec, params, scale) if codec or scale != 1 else PLAIN

    def history(side: Side) -> Any:
        if rule is not None:
            side.set_rule(rule, multi_precision=True)
        for number in (1, 2, 3):
            side.do(role.Add(1, number, side.batch(number, number)))
            if number > 1:
                body = {"codec": params} if codec else {}
                side.do(role.Add(0, number, side.batch(20 + number, number, how, body)))
        side.do(role.Apply(side.store, 1, side.shards, rank=0, last=side.batch(11, 1, how)))
        found = side.pulled()
        side.do(role.Apply(side.store, 2, side.shards))
        side.do(role.Apply(side.store, 3, side.shards, skip=True))
        return found, side.pulled()

    first, second = alike(history, deterministic=deterministic)
    assert first != second


def test_asynchronous_steps_and_assigned_values_give_the_bytes_of_host_memory(machine: Machine) -> None:
    def history(side: Side) -> Any:
        side.set_rule("sgd", momentum=0.9, multi_precision=True)
        found = []
        for number, how in enumerate((PLAIN, How(0, {}, 0.5), How(2, compression.numbered(2).check({}), 1.0)), 1):
            side.do(role.Step("w0", 0, side.batch(number, number, how)))
            found.append(side.pulled())
        side.do(role.Assign(side.batch(30)))
        side.do(role.Step("w0", 0, side.batch(9, 4)))
        return found

    alike(history)


def test_encoded_answers_and_what_they_leave_out_have_the_bytes_of_host_memory(machine: Machine) -> None:
    def history(side: Side) -> Any:
        found = []
        for codec in (2, 3):
            params = compression.numbered(codec).check({})
            for number in (1, 2):
                side.do(role.Apply(side.store, number, side.shards, rank=0, last=side.batch(number, number)))
                found += [side.pulled(codec, **params), side.pulled(codec, **params)]
        return found

    alike(history)


def test_a_reply_carries_the_values_that_were_lent_to_it(machine: Machine) -> None:
    def history(side: Side) -> Any:
        before = side.pulled()
        tickets = [side.lend(), side.lend()]
        for number in (1, 2):
            side.do(role.Apply(side.store, number, side.shards, rank=0, last=side.batch(number, number)))
        now = side.lend()
        assert side.delivered(tickets[0]) == side.delivered(tickets[1]) == before
        return before, side.delivered(now)

    before, after = alike(history)
    assert before != after


@pytest.mark.parametrize("name", FUSABLE)
def test_states_that_were_saved_on_one_device_go_on_on_the_other(machine: Machine, tmp_path: Path, name: str) -> None:
    spec = rules.RuleSpec.of(name, {"multi_precision": True} if name != "test" else {})

    def step(side: Side, number: int) -> None:
        side.do(role.Apply(side.store, number, side.shards, rank=0, last=side.batch(number, number)))

    sides = [Side(asked) for asked in ON]
    saved = []
    for side, folder in zip(sides, ("cpu", "gpu"), strict=True):
        side.set_rule(name, **spec.params)
        for number in (1, 2):
            step(side, number)
        side.pulled(2, **compression.numbered(2).check({}))  # leaves a residual
        saved.append(side.save(tmp_path / folder))
        step(side, 3)
    files = [(tmp_path / folder / "data-1" / "server-0.npz").read_bytes() for folder in ("cpu", "gpu")]
    assert len(files[0]) == len(files[1])
    assert saved[0] == saved[1]
    for asked, folder, there in (("gpu:0", "cpu", saved[0]), ("cpu", "gpu", saved[1])):
        other = Side(asked)
        other.set_rule(name, **spec.params)
        other.load(tmp_path / folder, there, spec)
        assert other.values.device.name == ("cpu:0" if asked == "cpu" else asked)
        step(other, 3)
        assert other.pulled() == sides[0].pulled() == sides[1].pulled()
        assert other.state() == sides[0].state() == sides[1].state()


def test_a_rule_takes_over_the_state_that_both_know(machine: Machine) -> None:
    def history(side: Side) -> Any:
        side.set_rule("sgd", momentum=0.9)
        side.do(role.Apply(side.store, 1, side.shards, rank=0, last=side.batch(1)))
        side.set_rule("nag", momentum=0.8, multi_precision=True)  # the momentum goes on, the master is new
        side.do(role.Apply(side.store, 2, side.shards, rank=0, last=side.batch(2, 2)))
        found = side.pulled()
        side.do(role.SetRule(1, None, data(Kind.RULE)))
        return found

    alike(history)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_store_moves_between_devices_with_all_it_has(machine: Machine, deterministic: bool) -> None:
    """Its state, an open round with sums and with a contribution that is held, what answers left out, and a reply."""

    def history(side: Side) -> Any:
        side.set_rule("adam", multi_precision=True)
        side.do(role.Apply(side.store, 1, side.shards, rank=0, last=side.batch(1)))
        side.pulled(2, **compression.numbered(2).check({}))
        for rank, number in ((0, 2), (1, 2), (1, 3)):
            side.do(role.Add(rank, number, side.batch(5 * number + rank, number)))
        ticket, here = side.lend(), side.values.device
        for device in (devices.get("cpu:0"), devices.get("gpu:0"), here):
            side.values.move(device)
        first = side.delivered(ticket)
        side.do(role.Apply(side.store, 2, side.shards))
        side.do(role.Apply(side.store, 3, side.shards, rank=0, last=side.batch(8, 3)))
        return first, side.pulled(2, **compression.numbered(2).check({}))

    alike(history, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_move_that_fails_at_any_step_leaves_the_store_where_it_was(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """The GPU's memory ends at each array in turn, then each copy fails: no array is elsewhere, or lost."""
    monkeypatch.setattr(devices, "FIRST_BYTES", 1024)
    gpu, host = devices.get("gpu:0"), devices.get("cpu:0")
    pool = machine.gpus.get(0).pool

    def history(side: Side, *, moves: bool) -> Any:
        def fails(device: Any) -> CudaError | None:
            here = [each.array for each in side.values._places()]
            try:
                side.values.move(device)
            except CudaError as err:
                assert [id(each.array) for each in side.values._places()] == [id(array) for array in here]
                assert side.values.device is not device
                return err
            return None

        side.set_rule("adam", multi_precision=True)
        side.do(role.Apply(side.store, 1, side.shards, rank=0, last=side.batch(1)))
        side.pulled(2, **compression.numbered(2).check({}))
        for rank, number in ((0, 2), (1, 2), (1, 3)):
            side.do(role.Add(rank, number, side.batch(5 * number + rank, number)))
        steps = 0
        if moves:
            pool.trim()
            pool.limit, before = 0, pool.size
            while err := fails(gpu):
                assert isinstance(err, CudaOutOfMemory)
                pool.trim()
                assert pool.size == before == 0
                pool.limit += err.wanted - err.free
                steps += 1
            for device, call in ((host, "copy"), (gpu, "copy")):
                for nth in range(1, 100):
                    machine.standin.fail(call, nth, code=1)
                    if fails(device) is None:
                        break
                    steps += 1
                machine.standin.faults.clear()
            side.values.move(host)
            pool.limit = None
        assert steps == 0 or steps > 20
        side.do(role.Apply(side.store, 2, side.shards))
        side.do(role.Apply(side.store, 3, side.shards, rank=0, last=side.batch(8, 3)))
        return side.pulled(2, **compression.numbered(2).check({})), side.pulled(), side.state()

    expected, found = (history(Side("cpu", deterministic=deterministic), moves=moves) for moves in (False, True))
    assert found == expected


def test_what_a_gpu_does_not_hold_is_refused_by_name(machine: Machine) -> None:
    side = Side("cpu")
    side.set_rule("lamb")
    gpu = devices.get("gpu:0")
    with pytest.raises(KVError, match="store 1: weights on gpu:0 cannot be updated by rule 'lamb'"):
        side.values.move(gpu)
    assert side.values.device.name == "cpu:0"
    other = Side("gpu:0")
    with pytest.raises(KVError, match="store 1: weights on gpu:0 cannot be updated by rule 'sgld'"):
        other.values.set_rule(rules.make("sgld", {}), rules.RuleSpec.of("sgld", {}))
    rows = Side("cpu")
    rows.store.add([Shard(0, 0, 4, 3, row_size=2)])
    with pytest.raises(KVError, match="store 1 has row-sparse keys: its values cannot be on gpu:0"):
        rows.values.move(gpu)


def test_kernels_are_compiled_before_the_first_round_but_codecs_with_the_first_encoded_message(
    machine: Machine,
) -> None:
    side = Side("gpu:0")
    side.set_rule("rmsprop", wd=0.1)
    loaded = machine.standin.calls["load"]
    for number in (1, 2):
        side.do(role.Add(1, number, side.batch(number, number)))
        side.do(role.Apply(side.store, number, side.shards, rank=0, last=side.batch(7, number)))
    assert machine.standin.calls["load"] == loaded
    how = How(2, compression.numbered(2).check({}), 0.5)
    side.do(role.Apply(side.store, 3, side.shards, rank=0, last=side.batch(8, 3, how)))
    assert machine.standin.calls["load"] > loaded
    loaded = machine.standin.calls["load"]
    assert len(side.pulled(2, **how.params)) == len(SIZES)
    scaled = How(0, {}, 0.5)
    for number, (first, last) in enumerate([(scaled, PLAIN), (PLAIN, scaled), (scaled, scaled)], 4):
        side.do(role.Add(1, number, side.batch(number, number, first)))
        side.do(role.Apply(side.store, number, side.shards, rank=0, last=side.batch(7, number, last)))
    assert machine.standin.calls["load"] == loaded


def test_keys_that_are_not_neighbours_are_updated_by_one_kernel_a_dtype(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large values begin with a page of memory each."""
    monkeypatch.setattr(ps_values, "ALIGNED_BYTES", 1)

    def history(side: Side) -> Any:
        side.set_rule("adam")
        for number in (1, 2, 3):
            side.do(role.Add(1, number, side.batch(number, number)))
            before = machine.standin.calls["launch"]
            side.do(role.Apply(side.store, number, side.shards, rank=0, last=side.batch(7, number)))
            launched = machine.standin.calls["launch"] - before
            assert not side.values.device.is_gpu or number == 1 or launched == 2
        return side.pulled()

    alike(history)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd_create")
@pytest.mark.parametrize("asked", ON)
def test_answers_are_in_memory_that_workers_of_the_host_read_where_it_is(machine: Machine, asked: str) -> None:
    pool = Pool()
    side = Side(asked, memory=pool)
    assert b"".join(side.pulled()) == b"".join(Side(asked).pulled())
    frames = [np.frombuffer(frame, np.uint8) for frame in side.frames]
    assert all(pool.find(address_of(frame), frame.nbytes) for frame in frames)


@pytest.mark.parametrize("is_shared", [True, False])
def test_what_several_replies_carry_is_copied_once_from_the_gpu(machine: Machine, is_shared: bool) -> None:
    side = Side("gpu:0", memory=Pool() if is_shared else None)
    calls = machine.standin.calls

    def copies(ticket: int) -> int:
        before = calls["copy"]
        side.delivered(ticket)
        return calls["copy"] - before

    def places() -> list[int]:
        return [address_of(frame) for frame in side.frames]

    first, later, of_before = side.lend(), side.lend(), side.lend()
    before = side.pulled(), side.frames
    assert copies(first) == 0
    assert places() == [address_of(frame) for frame in before[1]]
    side.do(role.Apply(side.store, 1, side.shards, rank=0, last=side.batch(1, 1)))
    assert copies(side.lend())
    changed = [bytes(frame) for frame in side.frames], side.frames
    assert copies(side.lend()) == 0
    assert places() == [address_of(frame) for frame in changed[1]]
    assert side.delivered(later) == before[0] != changed[0]
    assert side.pulled() == changed[0]
    # Nothing carries the copies any more: they are not kept.
    side.frames = []
    del before, changed
    assert copies(of_before)


def test_a_reply_carries_what_is_copied_already_and_the_rest(machine: Machine) -> None:
    side = Side("gpu:0", memory=Pool())
    floats = side.do(role.Forward(side.lend_floats(), side.store, "w0", data(Kind.PULL)))
    before = machine.standin.calls["copy"]
    assert side.pulled() == Side("cpu").pulled()
    assert machine.standin.calls["copy"] == before + 1  # the key of half precision
    places = [address_of(frame) for frame in (*floats.message.payloads, *side.frames)]
    assert places[1:3] == [places[0], places[0] + 4 * SIZES[0]]
    again = side.do(role.Forward(side.lend_floats(), side.store, "w0", data(Kind.PULL)))
    assert [address_of(frame) for frame in again.message.payloads] == places[:1]
    assert machine.standin.calls["copy"] == before + 1


@pytest.mark.parametrize("most_pieces", [0, 1, 16])
@pytest.mark.parametrize("seed", range(5))
def test_answers_have_their_values_whatever_is_pulled_kept_and_written_meanwhile(
    machine: Machine, seed: int, most_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "_JOINED_FRAMES", most_pieces)

    def history(side: Side) -> Any:
        random = np.random.default_rng(seed)
        waiting: list[tuple[int, Array]] = []
        carried: list[Any] = []
        found: list[list[bytes]] = []

        def answer(place: int) -> None:
            ticket, keys = waiting.pop(place)
            reply = side.do(role.Deliver(ticket, "w0", data(Kind.PULL), side.entries()[keys]))
            carried.append((reply.message.payloads, [bytes(each) for each in reply.message.payloads]))
            found.append([b"".join(carried[-1][1])])
            side.engine.sent(reply.lent, None)

        for number in range(60):
            step = random.integers(8)
            if step < 3:
                keys = random.permutation(len(SIZES))[: random.integers(1, len(SIZES) + 1)]
                waiting.append((number, keys))
                side.do(role.Lend(number, side.store, side.shards[keys], np.arange(len(keys))))
            elif step < 5 and waiting:
                answer(random.integers(len(waiting)))
            elif step < 6 and carried:
                frames, sent = carried.pop(random.integers(len(carried)))
                assert side.values.is_on_host or [bytes(each) for each in frames] == sent
            elif step == 7:
                side.do(role.Assign(side.batch(number)))
        while waiting:
            answer(0)
        return found

    alike(history)


@pytest.mark.parametrize("asked", ON)
def test_much_that_is_copied_from_a_gpu_for_an_answer_is_copied_later(machine: Machine, asked: str) -> None:
    side = Side(asked, much_bytes=4 * 8 + 2 * 20)
    expected = Side("cpu").pulled()
    replies = [
        role.Deliver(side.lend(), "w0", data(Kind.PULL), side.entries()),
        role.Forward(side.lend_floats(), side.store, "w0", data(Kind.PULL)),
    ]
    for what, much, frames in zip(replies, (True, False), (expected, [b"".join(expected[:2])]), strict=True):
        done = side.engine.do(what)
        assert (done is None) == (much and asked != "cpu")
        done = done or side.engine.result(waits=True)
        assert done is not None
        assert b"".join(done.value.message.payloads) == b"".join(frames)
    side.engine.close()


def test_a_pull_whose_codec_has_no_kernels_says_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ProgramError("kernels do not compile")

    side = Side("gpu:0")
    monkeypatch.setattr(compression.OneBit, "prepare", fails)
    text = side.refused(side.lend(2, **compression.numbered(2).check({})))
    assert "kernels do not compile" in text


def test_a_pull_to_which_nothing_was_lent_is_refused(machine: Machine) -> None:
    text = Side("gpu:0").refused(77)
    assert "3 of 3 values could not be made ready" in text


# Initialising keys


@pytest.fixture
def server(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[History]:
    """A server on a GPU whose engine's thread does all work."""
    monkeypatch.setattr(cluster, "MUCH_BYTES", 0)
    monkeypatch.setattr(devices, "FIRST_BYTES", 4096)
    with History(settings={"server_device": "gpu:0"}) as made:
        yield made


def keys_of(server: History) -> Any:
    [told] = server.ask(0, Kind.STATS)
    return told.body["keys"], told.body["pieces"]


LARGE = [1.0] * 2048
"""More than the rest of the first block of an arena."""


@pytest.mark.parametrize("has_rule", [False, True])
def test_an_init_that_failed_leaves_nothing_behind(machine: Machine, server: History, has_rule: bool) -> None:
    if has_rule:
        server.rule("adam")
    there = machine.standin.memory_bytes
    machine.standin.memory_bytes = sum(machine.standin.used) + 4096
    for _ in range(2):
        text = reason(server.init({"f": LARGE, "g": [5, 5]}))
        assert text.startswith("server-0 cannot take the values of key 'f', 'g': alloc on gpu:0 failed"), text
        assert keys_of(server) == (2, 2)
        assert "no such piece" in reason(server.pull(0, 0, "g"))
    server.push(0, 1, {"a": [1, 2]})
    machine.standin.memory_bytes = there
    assert said(server.init({"g": [7, 8, 9], "f": LARGE})) == ["w0 INIT"]
    assert keys_of(server) == (4, 4)
    server.push(1, 1, {"a": [1, 2]})
    found = values_of(server.pull(0, 0, "f", "g"))
    assert found == {"f": LARGE, "g": [7, 8, 9]}
    assert has_rule or values_of(server.pull(0, 1)) == {"a": [2, 4]}


def test_inits_that_come_while_one_fails_are_done_in_their_order(machine: Machine, server: History) -> None:
    for nth in (1, 2, 3, 4):  # as often as the pool tries
        machine.standin.fail("alloc", nth, code=2)
    given = [("w0", "f", LARGE), ("w1", "g", [1, 2]), ("w0", "h", [3, 4])]
    told = server.hear_all([(link, server.initial({name: value})) for link, name, value in given])
    assert said(told) == ["w0 INIT!", "w1 INIT", "w0 INIT"]
    assert keys_of(server) == (4, 4)
    assert values_of(server.pull(0, 0, "g", "h")) == {"g": [1, 2], "h": [3, 4]}
    assert said(server.init({"f": [1, 1]})) == ["w0 INIT"]


@pytest.mark.parametrize("has_rule", [False, True])
def test_a_malformed_init_is_refused_alone_and_its_store_takes_keys_as_before(server: History, has_rule: bool) -> None:
    if has_rule:
        server.rule("adam")
    far = server.initial({"f": [1, 2]})
    far.entries["offset"] = 1 << 63
    told = server.hear("w0", far)
    assert said(told) == ["w0 INIT!"]
    assert "INIT is malformed: OverflowError" in reason(told)
    good, bad, last = (server.initial({name: [1, 2]}) for name in "ghk")
    shapes = {str(bad.entries["key"][0]): ["x"]}
    bad = replace(bad, body={**bad.body, "shapes": shapes})
    told = server.hear_all([("w0", good), ("w1", bad), ("w1", last)])
    assert said(told) == ["w0 INIT", "w1 INIT!", "w1 INIT"]
    assert "INIT is malformed: ValueError" in str(told[1].body["reason"])
    assert values_of(server.pull(0, 0, "g", "k")) == {"g": [1, 2], "k": [1, 2]}


def test_a_server_makes_memory_for_its_answers_with_its_first_values_and_keeps_it_for_the_next_script(
    machine: Machine,
) -> None:
    pool, none = Pool(), Pool()
    side = Side("gpu:0", memory=pool)
    Side("cpu", memory=none)
    assert pool.ahead
    assert not none.ahead
    before = pool.size
    kept = []
    for number in range(1, 3):  # as many rounds at once
        side.do(role.Apply(side.store, number, side.shards, rank=0, last=side.batch(number, number)))
        for _ in side.store.members.ranks:
            side.pulled()
            kept.append(side.frames)
    assert pool.size == before
    assert all(pool.find(address_of(frame), memoryview(frame).nbytes) for frames in kept for frame in frames)
    del kept, side.frames
    reserved = dict(pool._reserved)
    side.do(role.Clear(data(Kind.BYE)))
    side.store = Store(1, workers=2)
    side.shards = side.store.add(
        [Shard(0, 0, size, key, code) for key, (size, code) in enumerate(zip(SIZES, CODES, strict=True))]
    )
    side.do(role.Fill(side.batch(0)))
    assert (pool.size, pool._reserved) == (before, reserved)
