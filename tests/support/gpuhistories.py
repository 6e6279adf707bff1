"""Histories on GPUs: what a program does with devices, and what it has to find. With a stand-in or on real ones."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from cudastandin import Mistake
from gpukit import Machine, values
from sums import add as add_to
from sums import total as total_of

from distrun_runtime.arrays.cuda import Cuda, HostMemory, Pointer, Read, Stream, Write
from distrun_runtime.arrays.device import CpuDevice
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.arrays.gpu import GpuArray, GpuDevice, TensorColumn
from distrun_runtime.arrays.shared_memory import address_of
from distrun_runtime.ops import compression, optimizers, update

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


def check(found: Array, expected: Array) -> None:
    assert found.tobytes() == expected.tobytes()


def total(parts: Sequence[Array]) -> Array:
    return total_of(CpuDevice(), parts)


def arrays_come_and_go(machine: Machine) -> None:
    device = machine.gpus.get(0)
    given = [values((300,), F32, seed) for seed in range(2)]
    mine = [device.put(each) for each in given]
    device.scale(mine[0], 2.0)
    check(device.host(total_of(device, mine)), total([given[0] * np.float32(2), given[1]]))
    add_to(device, mine[1], given[0])
    check(device.host(mine[1]), total([given[1], given[0]]))
    none = device.zeros((300,), F32)
    check(device.host(none), np.zeros(300, F32))
    device.write(none, given[0])
    device.scale(none, 2.0)
    check(device.host(none), given[0] * np.float32(2))


def memory_is_used_again(machine: Machine) -> None:
    device = machine.gpus.get(0)
    for turn in range(2):
        given = [values((200,), F32, 10 * turn + seed) for seed in range(3)]
        sums = total_of(device, [device.put(each) for each in given])
        copied = device.put(sums)
        del sums
        later = device.put(given[0])  # where the sums were
        check(device.host(copied), total(given))
        check(device.host(later), given[0])
        del copied, later


def values_come_from_other_devices(machine: Machine) -> None:
    here, there = machine.gpus.get(0), machine.gpus.get(1)
    given = [values((300,), F32, seed) for seed in range(3)]
    theirs = there.put(given[1])
    into = total_of(here, [here.put(given[0]), theirs, given[2]])
    there.scale(theirs, 2.0)  # not before it was copied
    back = total_of(there, [theirs, into])
    here.scale(into, 0.0)
    check(there.host(back), total([given[1] * np.float32(2), total(given)]))
    moved = here.put(theirs)
    del theirs
    check(there.host(there.put(given[0])), given[0])
    check(here.host(moved), given[1] * np.float32(2))


def many_and_mixed_parts_are_summed(machine: Machine) -> None:
    device = machine.gpus.get(0)
    for turn in range(2):
        given = [values((40,), F32 if seed == 1 else F16, 20 * turn + seed) for seed in range(3)]
        expected, first, out = np.empty(40, F16), device.empty((40,), F16), device.empty((40,), F16)
        CpuDevice().sum(given, expected)
        device.sum([device.put(each) for each in given], first)
        check(device.host(first), expected)
        device.sum([device.put(each) for each in given], out)
        many = [values((40,), F32, 20 * turn + seed) for seed in range(10)]
        sums = total_of(device, [device.put(each) for each in many])
        # What comes next is put where the tables were.
        fresh = [device.put(values((4,), F32, seed)) for seed in range(4)]
        check(device.host(out), expected)
        check(device.host(sums), total(many))
        for seed, each in enumerate(fresh):
            check(device.host(each), values((4,), F32, seed))


def page_locked_memory_is_copied_directly(machine: Machine) -> None:
    device = machine.gpus.get(0)
    memory = np.zeros(600, F32)
    assert machine.gpus.locked.lock(memory)
    for turn in range(2):
        memory[:300] = given = values((300,), F32, turn)
        array = device.put(memory[:300])
        memory[:300] = 0
        device.scale(array, 2.0)
        device.read(array, memory[300:])
        check(memory[300:], given * np.float32(2))
        memory[:300] = given
        device.scale(array, 0.0)
        del array  # what comes next has its memory
        array = device.put(memory[:300])
        device.read(array, memory[300:])
        check(memory[300:], given)


def memory_is_given_back(machine: Machine) -> None:
    device = machine.gpus.get(0)
    given = values((500,), F32)
    array = device.put(given)
    other = device.put(array)
    del array
    device.pool.trim()
    check(device.host(other), given)
    device.scale(other, 2.0)
    del other
    device.pool.trim()
    device.synchronize()


def the_same_memory_is_written_by_every_stream(machine: Machine) -> None:
    device, other = machine.gpus.get(0, 0), machine.gpus.get(0, 1)
    given = values((100,), F32)
    array, target = device.put(given), other.put(given)
    for _ in range(2):
        add_to(device, array, target)  # read by device's stream
        other.scale(target, 2.0)  # written by other's
        add_to(other, target, array)
        device.scale(array, 0.5)
    expected, far = given.copy(), given.copy()
    for _ in range(2):
        expected += far
        far *= np.float32(2)
        far += expected
        expected *= np.float32(0.5)
    check(device.host(array), expected)
    check(other.host(target), far)


class CudaArray:
    """A flat float32 array of another library, in some memory, which works on a stream."""

    def __init__(self, pointer: Pointer, stream: Stream) -> None:
        place = (pointer.address, False)
        self.__cuda_array_interface__ = {
            **{"shape": (pointer.nbytes // 4,), "typestr": F32.str, "data": place, "version": 3},
            **{"stream": stream.handle, "strides": None},
        }


def arrays_are_borrowed(machine: Machine) -> None:
    device, borrowing = machine.gpus.get(0), machine.gpus.borrowing
    cuda, number = borrowing.order.cuda, device.physical
    whole, out = cuda.alloc(number, 1200), values((300,), F32)
    halves = [(whole.at(0, 600), cuda.stream(number)), (whole.at(600, 600), cuda.stream(number))]
    mine = device.zeros((150,), F32)
    for half, stream in halves:
        cuda.fill(half, 7, 600, stream)
    given = borrowing.value(CudaArray(*halves[1]))
    loan = borrowing.borrow([given])
    device.write(mine, given)
    # Into the memory of the value, and more of it, which another stream has filled.
    target = borrowing.output(CudaArray(whole, halves[0][1]))
    loan.add([target])
    device.write(target, out)
    loan.end()
    copies = [cuda.alloc(number, 600) for _ in halves]
    for copied, (half, stream) in zip(copies, halves, strict=True):
        cuda.copy(copied, half, 600, stream)
    check(device.host(mine), np.full(600, 7, np.uint8).view(F32))
    found = np.empty(300, F32)
    for copied, (_, stream), part in zip(copies, halves, (found[:150], found[150:]), strict=True):
        cuda.copy(HostMemory(address_of(part), 600), copied, 600, stream)
    check(found, out)


def a_borrowed_output_is_read_until_it_is_written(machine: Machine) -> None:
    device, borrowing = machine.gpus.get(0), machine.gpus.borrowing
    cuda, number, out = borrowing.order.cuda, device.physical, values((150,), F32)
    stream, (whole, before, after) = cuda.stream(number), [cuda.alloc(number, 600) for _ in range(3)]
    cuda.fill(whole, 7, 600, stream)
    target = borrowing.output(CudaArray(whole, stream))
    loan = borrowing.borrow([target])
    mine = device.put(target)
    cuda.copy(before, whole, 600, stream)
    loan.note_reads()
    device.write(target, out)
    loan.end()
    cuda.copy(after, whole, 600, stream)
    sevens = np.full(600, 7, np.uint8).view(F32)
    check(device.host(mine), sevens)
    for copied, expected in ((before, sevens), (after, out)):
        found = np.empty(150, F32)
        cuda.copy(HostMemory(address_of(found), 600), copied, 600, stream)
        check(found, expected)


def lists_are_gathered_and_scattered(machine: Machine) -> None:
    """Rounds of a training loop."""
    device = machine.gpus.get(0)
    sizes = (100, 0, 7, 300)
    given = [[values((size,), F32, 2 * size + part) for part in range(2)] for size in sizes]
    lists = [[device.put(part) for part in parts] for parts in given]
    bucket, outs = device.empty((407,), F32), [device.empty((size,), F32) for size in sizes]
    for turn in range(4):
        if turn == 2:
            device.synchronize()
            device.pool.trim()  # the tables go, and are made again
        expected = [total(parts) for parts in given]
        device.gather(lists, bucket)
        # What was read is written by another stream: the first and the last of each list is the first once.
        tensors = list(range(len(sizes)))[:: (1, -1)[turn % 2]]
        for part in (0, 1)[:: (1, -1)[turn % 2]]:
            for tensor in tensors:
                given[tensor][part] = -given[tensor][part]
                device.write(lists[tensor][part], given[tensor][part])
        device.scatter(bucket, outs)
        for tensor in tensors:
            check(device.host(outs[tensor]), expected[tensor])
        device.scatter(bucket, outs)
        device.write(bucket, values((407,), F32, turn))
        for tensor in tensors:
            check(device.host(outs[tensor]), expected[tensor])
    device.gather(lists, bucket)
    device.pool.trim()
    check(device.host(bucket), np.concatenate([total(parts) for parts in given]))


def lists_from_everywhere_are_gathered(machine: Machine) -> None:
    here, there = machine.gpus.get(0), machine.gpus.get(1)
    given = [[values((size,), F32, 2 * size + part) for part in range(3)] for size in (300, 40, 50)]
    theirs = [there.put(parts[0]) for parts in given]
    lists = [[far, here.put(parts[1]), parts[2]] for far, parts in zip(theirs, given, strict=True)]
    bucket = here.empty((390,), F32)
    for _ in range(2):
        expected = np.concatenate([total(parts) for parts in given])
        here.gather(lists, bucket)
        for far, parts in zip(theirs, given, strict=True):
            there.scale(far, 2.0)  # not before it was copied
            parts[0] *= np.float32(2)
            parts[2][...] = -parts[2]
        check(here.host(bucket), expected)


def many_arrays_are_copied_with_one_wait(machine: Machine) -> None:
    device = machine.gpus.get(0)
    memory, outs = np.zeros(1000, F32), np.zeros(1000, F32)
    assert machine.gpus.locked.lock(memory)
    assert machine.gpus.locked.lock(outs)
    for turn in range(2):
        given = [values((size,), F32, 10 * turn + size) for size in (400, 3, 200, 300)]
        places = [memory[:400], np.empty(3, F32), np.empty(200, F32), memory[400:700]]
        found = [outs[:400], np.empty(3, F32), np.empty((200, 2), F32)[:, 1], outs[400:700]]
        arrays = [device.empty((each.size,), F32) for each in given]
        for place, each in zip(places, given, strict=True):
            place[...] = each
        device.write_all(list(zip(arrays, places, strict=True)))
        for place in places:
            place[...] = 0
        for array in arrays:
            device.scale(array, 2.0)
        device.read_all(list(zip(arrays, found, strict=True)))
        for each, out in zip(given, found, strict=True):
            check(np.ascontiguousarray(out), each * np.float32(2))
        outs[...] = 0


def values_are_compressed(machine: Machine) -> None:
    """What a codec reads was written just before: values by a copy and residuals by a kernel, then the other way round.
    The copies that show what it wrote come in every order."""
    device = machine.gpus.get(0)
    cases = [("topk", F32, 0), ("1bit_scaled", F32, 0), ("fp16", F16, 0), ("1bit_scaled", F32, 1), ("2bit", F16, 1)]
    for name, dtype, turn in cases:
        codec = compression.named(name)
        params = codec.check({"ratio": 0.5} if name == "topk" else {})
        given = (np.arange(90) % 13 - 6).astype(dtype)
        left = (np.arange(90) % 7).astype(F32) if codec.has_residual else None
        payload, rest = codec.encode(given, None, params), left
        out = device.empty((len(payload),), np.dtype(np.uint8))
        if left is None:
            there, remains = device.put(given), None
        else:
            rest = left.copy()
            payload = codec.encode(given, rest, params)
            codec.check_finite(*written(device, given, left, turn))
            there, remains = written(device, given, left, turn)
        codec.write(there, remains, params, out)
        device.write(there, np.zeros(90, dtype))  # it was read
        if remains is not None and rest is not None:
            check(device.host(remains), rest)
        check(device.host(out), np.frombuffer(payload, np.uint8))
        sums, decoded, expected = device.put(given.astype(F32)), device.empty((90,), F32), given.astype(F32)
        codec.read(out, sums, params, adds=True)
        codec.read(payload, decoded, params)
        device.write(out, np.zeros(len(payload), np.uint8))  # so was that
        codec.read(payload, expected, params, adds=True)
        check(device.host(decoded), codec.decode(payload, 90, params))
        check(device.host(sums), expected)
        if name == "topk":
            more = np.tile(given, 4)  # larger than all else, so what comes later is where its copy of the values was
            fresh, out = device.put(more), device.empty((codec.size(360, params),), np.dtype(np.uint8))
            codec.write(fresh, None, params, out)
            later = device.put(more)
            check(device.host(out), np.frombuffer(codec.encode(more, None, params), np.uint8))
            check(device.host(later), more)
        check(device.host(compression.floats(device.put(given))), given.astype(F32))


def written(device: GpuDevice, given: Array, left: Array, turn: int) -> tuple[GpuArray, GpuArray]:
    """Return both on the device, one of them by a copy that is under way, and the other by a kernel."""
    if turn:
        there = device.put(given / 2)
        device.scale(there, 2.0)
        return there, device.put(left)
    remains = device.put(left / 2)
    device.scale(remains, 2.0)
    return device.put(given), remains


def a_rule_steps_over_a_weight(machine: Machine) -> None:
    device, rule = machine.gpus.get(0), optimizers.make("sgd", {"momentum": 0.9})
    weight = values((300,), F32)
    mine, state = device.put(weight), rule.new_state(weight)
    there = update.new_state(rule, mine)
    for turn in range(5):
        given = [values((300,), F32, 10 * turn + seed) for seed in range(2)]
        parts = [device.put(each) for each in given]
        update.step(rule, mine, parts, there, optimizers.PLAIN)
        update.step(rule, weight, given, state, optimizers.PLAIN, device=CpuDevice())
        if turn < 2:  # who waits for one has waited for the other
            check(device.host(there["momentum"]), np.asarray(state["momentum"]))
        elif turn == 2:
            check(device.host(mine), weight)
        while parts:
            parts.pop(-(turn % 2))
        later = [device.put(each) for each in reversed(given)]  # where the parts were
        for each, expected in zip(later, reversed(given), strict=True):
            check(device.host(each), expected)


def a_rule_steps_over_a_list(machine: Machine) -> None:
    """Weights that take the same step, of memory of their own each."""
    device, rule = machine.gpus.get(0), optimizers.make("sgd", {"momentum": 0.9})
    weights = [values((size,), F32, size) for size in (100, 7, 300)]
    states = [rule.new_state(weight) for weight in weights]
    mine = [device.put(weight) for weight in weights]
    there = [update.new_state(rule, weight) for weight in mine]
    ends, orders = (0, -1), (1, -1)
    for turn in range(6):
        order = orders[turn % 2]
        given = [values(weight.shape, F32, 10 * turn + number) for number, weight in enumerate(weights)]
        parts = [device.put(each) for each in given]
        for on, *lists in ((device, mine, parts, there), (CpuDevice(), weights, given, states)):
            items = [update.WeightStep(w, [p], s, optimizers.PLAIN) for w, p, s in zip(*lists, strict=True)]
            update.step_all(rule, items, device=on)
        del items
        if turn == 5:
            device.pool.trim()  # the table goes
        last = ends[turn % 2]
        if turn < 2:  # who waits for one has waited for the others
            check(device.host(there[last]["momentum"]), np.asarray(states[last]["momentum"]))
        elif turn < 4:
            check(device.host(mine[last]), weights[last])
        while parts:
            parts.pop(-(turn % 2))
        later = [device.put(each) for each in given[::order]]  # where the parts were
        for each, expected in zip(later, given[::order], strict=True):
            check(device.host(each), expected)


class Dropped:
    """Memory of a program that is freed with the last reference."""

    def __init__(self, cuda: Cuda, pointer: Pointer) -> None:
        weakref.finalize(self, freed, cuda, pointer).atexit = False


def freed(cuda: Cuda, pointer: Pointer) -> None:
    with contextlib.suppress(Mistake):  # in a destructor it would only be printed: `finish` raises it
        cuda.free(pointer)


def calls_are_planned(machine: Machine) -> None:
    """Kernels over memory of the program, between what it does before and after, as `arrays.plans` has them."""
    device, order, borrowing = machine.gpus.get(0), machine.gpus.order, machine.gpus.borrowing
    cuda, stream = order.cuda, order.cuda.stream(0)
    sizes, keeper, out = [100, 7], borrowing.keeper, cuda.alloc(0, 428)
    stored = [device.put(values((size,), F32, size)) for size in sizes]
    write = device.sum_lists([TensorColumn.of(Read, stored)], [column(Write, out)], sizes, F32)
    for turn in range(4):
        given, numbers = cuda.alloc(0, 428), values((107,), F32, turn)
        dropped = Dropped(cuda, given)
        cuda.copy(given, HostMemory(address_of(numbers), 428), 428, stream)
        cuda.fill(out, turn, 428, stream)
        read = device.sum_lists([column(Read, given)], [TensorColumn.of(Write, stored)], sizes, F32)
        caller = borrowing.caller(0, stream.handle)
        keeper.collect()
        order.begin_after([(device.work, caller)])
        read()
        write()
        keeper.keep_until(order.end_before([(device.work, caller)]), dropped)
        del dropped
    found = np.empty(107, F32)
    cuda.copy(HostMemory(address_of(found), 428), out, 428, stream)
    check(found, numbers)


def column(use: Any, pointer: Pointer) -> TensorColumn:
    """Return memory of a program as two tensors, of 100 and 7 elements."""
    return TensorColumn(use, [pointer.address, pointer.address + 400], [400, 28])


HISTORIES: dict[str, Callable[[Machine], None]] = {
    each.__name__: each
    for each in (
        arrays_come_and_go,
        memory_is_used_again,
        values_come_from_other_devices,
        many_and_mixed_parts_are_summed,
        page_locked_memory_is_copied_directly,
        memory_is_given_back,
        the_same_memory_is_written_by_every_stream,
        arrays_are_borrowed,
        a_borrowed_output_is_read_until_it_is_written,
        lists_are_gathered_and_scattered,
        lists_from_everywhere_are_gathered,
        many_arrays_are_copied_with_one_wait,
        values_are_compressed,
        a_rule_steps_over_a_weight,
        a_rule_steps_over_a_list,
        calls_are_planned,
    )
}
EACH_HISTORY = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
