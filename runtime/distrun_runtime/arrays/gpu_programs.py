"""Programs for GPUs: C source that is the same for NVRTC and for a C++ compiler, and what its kernels take.

Each program is the prelude (`prelude.c`: types, loops, arithmetic as numpy's) and functions. On a GPU threads share a
kernel's elements; compiled for a CPU the same function goes over them one by one, so that tests compare it with numpy
where there is no GPU. Nothing here needs a GPU, a driver or a compiler.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from importlib import resources

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import DType

KINDS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f16", "bf16", "f32", "f64")
"""The prelude's types, by which parameters are declared."""

OPTIONS = ("--std=c++14", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""How NVRTC is to compile: arithmetic as IEEE 754 has it."""

THREADS = 256
"""Threads of a block. Any number is right; the more of them share a block's work, the shorter it takes."""


class Access(enum.Enum):
    """What a kernel does with a parameter."""

    READ = "read"
    """An address of elements that are only read."""
    WRITE = "write"
    """An address of elements all of which are written; what was there is not looked at."""
    UPDATE = "update"
    """An address of elements that are read and written, or of which only some are written."""
    TABLE = "table"
    """An address of a table of addresses (u64 in the device's memory); what is done with these, the launch says."""
    SCALAR = "scalar"
    """A number."""


@dataclass(frozen=True)
class KernelParameter:
    """One parameter of a kernel."""

    name: str
    kind: str
    """One of `KINDS`: the type of the number or of the elements at the address; of a table: at the addresses in it."""
    access: Access

    def declaration(self) -> str:
        """Return how C declares it."""
        if self.access is Access.SCALAR:
            return f"{self.kind} {self.name}"
        if self.access is Access.TABLE:
            return f"const u64 *{self.name}"
        return f"{'const ' if self.access is Access.READ else ''}{self.kind} *{self.name}"


_reads = partial(KernelParameter, access=Access.READ)
_writes = partial(KernelParameter, access=Access.WRITE)
_updates = partial(KernelParameter, access=Access.UPDATE)
_table = partial(KernelParameter, access=Access.TABLE)
_scalar = partial(KernelParameter, access=Access.SCALAR)


@dataclass(frozen=True)
class Kernel:
    """A function that is launched. After `parameters` it takes one more, `i64 n`: for how many elements."""

    name: str
    parameters: tuple[KernelParameter, ...]

    def head(self) -> str:
        """Return how C declares it."""
        return f"KERNEL {self.name}({', '.join([*(each.declaration() for each in self.parameters), 'i64 n'])})"


@dataclass(frozen=True)
class Program:
    """Source that is compiled at once, and its kernels."""

    name: str
    source: str = field(repr=False)
    """All of it; there is nothing to include."""
    kernels: tuple[Kernel, ...]

    @property
    def key(self) -> str:
        """Return 64 hex digits: programs of one key are alike when compiled by one compiler for one architecture."""
        return hashlib.sha256("\0".join([*OPTIONS, self.source]).encode()).hexdigest()

    def kernel(self, name: str) -> Kernel:
        """Return the kernel of this name; KeyError: there is none."""
        for each in self.kernels:
            if each.name == name:
                return each
        raise KeyError(name)


@lru_cache(maxsize=1)
def prelude() -> str:
    """Return the source that every program begins with."""
    return _text("prelude.c")


def program(name: str, functions: Sequence[tuple[Kernel, str]], *, helpers: str = "") -> Program:
    """Return a program of kernels.

    Arguments:
        functions: each kernel with its body in C, which sees the parameters and `n`.
        helpers: what the bodies call beside the prelude.
    """
    texts = ["\n".join([kernel.head(), "{", body.strip("\n"), "}", ""]) for kernel, body in functions]
    source = "\n".join([prelude(), *([helpers] if helpers else []), *texts])
    return Program(name, source, tuple(kernel for kernel, _ in functions))


def _add(functions: list[tuple[Kernel, str]], name: str, parameters: Sequence[KernelParameter], body: str) -> None:
    functions.append((Kernel(name, tuple(parameters)), "    " + body))


# Sums

FEW = 8
"""Up to so many parts of each tensor of a list the number is compiled in: the addresses are read once."""
ALONE = 2
"""Up to so many parts of one array are parameters. More go as a list of one tensor: every kernel has to be compiled."""

SUMS: tuple[tuple[str, str], ...] = (
    *((kind, kind) for kind in ("u8", "u16", "u32", "u64", "f16", "bf16", "f32", "f64")),
    *(("f16", "f32"), ("bf16", "f32"), ("f32", "f16"), ("f32", "bf16")),
)
"""The kinds of parts and of their sum for which there is a program."""


def kind_of(dtype: DType) -> str:
    """Return the kind by which the elements of a dtype that a store takes are summed; integers are unsigned."""
    if dtypes.is_float(dtype):
        return "bf16" if dtype == dtypes.BFLOAT16 else f"f{8 * dtype.itemsize}"
    return f"u{8 * dtype.itemsize}"


def sum_of(number: int) -> str:
    """Return the name of the kernel that sums so many parts of one array, at most `ALONE`."""
    return f"sum{number}"


def sum_lists_of(number: int) -> str:
    """Return the name of the kernel that sums so many parts of each tensor of a list."""
    return f"sum_lists{number}" if number <= FEW else "sum_lists_many"


@cache
def sums(parts: str, out: str) -> Program:
    """Return the program that adds up arrays of one kind to one of another kind; a pair of `SUMS`.

    Elements are at multiples of their size. Parts are added from first to last, 16-bit floats in float32.

        sum1(part0, out), sum2(part0, part1, out)           `out` may be one of the parts; sum1 copies, or converts
        sum_mixed(parts, wide, out, number)                 16-bit floats, but part p of the table is float32 where
                                                            wide[p] is not 0
        sum_lists1(table, offsets, outs, tensors) ...       each of `tensors` tensors' sum, to each of `outs` arrays
        sum_lists_many(table, offsets, number, outs, tensors)

    and, where both kinds are one:

        scale(array, factor, out)                           `out` may be the array

    A list's tensor t has as many elements as there are from offsets[t] to before offsets[t + 1], for `tensors` + 1
    offsets. Its table has the addresses of all first parts, then of all second ones, and so on, and then those of the
    first arrays that take the sums, of the second ones, and so on.
    """
    if (parts, out) not in SUMS:
        raise ValueError(f"no sum of {parts} in {out}")
    table, number = _table("table", parts), _scalar("number", "i64")
    offsets, tensors = _reads("offsets", "i64"), _scalar("tensors", "i64")
    into, flags, outs = _writes("out", out), _reads("wide", "u8"), _scalar("outs", "i64")
    rest = "outs, tensors, n);"
    functions: list[tuple[Kernel, str]] = []
    add = partial(_add, functions)
    for k in range(1, FEW + 1):
        few, given = f"Few<{parts}, {k}>", [_reads(f"part{p}", parts) for p in range(k)]
        if k <= ALONE:
            listed = ", ".join(each.name for each in given)
            add(f"sum{k}", [*given, into], f"const {few} parts = {{{{{listed}}}}};\n    sum_all(parts, out, n);")
        add(f"sum_lists{k}", [table, offsets, outs, tensors], f"sum_lists<{out}, {few}>(table, offsets, {k}, {rest}")
    many = f"Many<{parts}>"
    many_lists = f"sum_lists<{out}, {many}>(table, offsets, number, {rest}"
    add("sum_lists_many", [table, offsets, number, outs, tensors], many_lists)
    if parts in ("f16", "bf16"):
        mixed_summed = f"const Mixed<{parts}> parts = {{table, wide, number}};\n    sum_all(parts, out, n);"
        add("sum_mixed", [table, flags, into, number], mixed_summed)
    if parts == out:
        work = "i64" if parts.startswith("u") else "f64" if parts == "f64" else "f32"
        given_factor = f"({parts})factor" if work == "i64" else "factor"
        scaled = f"scale_all(array, {given_factor}, out, n);"
        add("scale", [_reads("array", parts), _scalar("factor", work), into], scaled)
    return program(f"sums_{parts}_{out}", functions, helpers=_kernels())


# Codecs

BINS = 2048
"""How many counts `count_sizes` adds to."""
TOP_PIECE = 4096
"""Elements in a piece of `find_top` and `take_top`: at most 65535, and a multiple of 16."""


@lru_cache(maxsize=1)
def codecs() -> Program:
    """Return the program of the codecs: `ops.quantize` byte by byte, for `n` elements of float32.

    Elements are at multiples of 4 bytes, payloads anywhere. A kernel with `_keeping` in its name has a residual, one
    with `_adding` adds to the elements that are there.

        two_bit_encode(values, quantum, payload)                                 two_bit_decode(payload, quantum, out)
        two_bit_encode_keeping(values, residual, quantum, payload)               two_bit_decode_adding
        one_bit_encode(values, threshold, step, is_inclusive, payload)           one_bit_decode(payload, step, out)
        one_bit_encode_keeping(values, residual, threshold, step, ...)           one_bit_decode_adding
        half_encode(values, payload)                                             half_decode(payload, out)
                                                                                 half_decode_adding
        top_decode(places, values, out), top_decode_adding(...)                  `n`: how many places
        count_sizes(values, prefix, shift, width, counts)
        find_top(values, bound, found)
        take_top(values, bound, shares, places, taken)
        double_narrow(doubles, out), double_widen(values, doubles)
        check_finite(values, wrong), check_finite_keeping(values, residual, wrong)
        magnitudes(values, sums, number), magnitudes_keeping(values, residual, sums, number)

    `check_finite` writes 1 to `wrong` if a value, or its sum with the residual, is not finite. `magnitudes` writes
    `number` float64 sums of absolute values; their sum, whatever its order, is within float64's rounding of numpy's.

    The elements of largest magnitude are found by their size: their bits without the sign. `count_sizes` looks at
    `width` bits of each size, those above the lowest `shift`, if all bits above them are `prefix`; it adds to `counts`,
    `BINS` of them, how many sizes have each value there. `find_top` writes for each piece of `TOP_PIECE` elements how
    many sizes are above the bound, times 65536, plus how many equal it. `take_top` writes places and values of those
    above, and of some that equal it, in their order: of piece p from place shares[2 p] on, and of those that equal the
    bound the first shares[2 p + 1]. It leaves 0 there. The values are those that `find_top` has counted.
    """
    values, number = _reads("values", "f32"), _scalar("number", "i64")
    kept, kept_only_read = _updates("residual", "f32"), _reads("residual", "f32")
    written, added_to = _writes("out", "f32"), _updates("out", "f32")
    encoded, payload = _writes("payload", "u8"), _reads("payload", "u8")
    quantum, threshold, step = (_scalar(name, "f32") for name in ("quantum", "threshold", "step"))
    one_bit = (threshold, step, _scalar("is_inclusive", "u32"))
    places, taken = _writes("places", "u32"), _writes("taken", "f32")
    numbers = ("bound", "prefix", "shift", "width")
    bound, prefix, shift, width = (_scalar(name, "u32") for name in numbers)
    shares = _reads("shares", "i64")
    wrong, sums_out = _updates("wrong", "u32"), _writes("sums", "f64")
    functions: list[tuple[Kernel, str]] = []
    add = partial(_add, functions)
    for keeps, suffix, rest in (("false", "", "(f32 *)0"), ("true", "_keeping", "residual")):
        changed, looked_at = ([kept], [kept_only_read]) if suffix else ([], [])
        add(
            "two_bit_encode" + suffix,
            [values, *changed, quantum, encoded],
            f"encode<{keeps}>(TwoBit<{keeps}>{{quantum}}, values, {rest}, payload, n);",
        )
        add(
            "one_bit_encode" + suffix,
            [values, *changed, *one_bit, encoded],
            f"encode<{keeps}>(OneBit<{keeps}>{{threshold, step, is_inclusive != 0}}, values, {rest}, payload, n);",
        )
        add(
            "check_finite" + suffix, [values, *looked_at, wrong], f"find_not_finite<{keeps}>(values, {rest}, wrong, n);"
        )
        add(
            "magnitudes" + suffix,
            [values, *looked_at, sums_out, number],
            f"add_magnitudes<{keeps}>(values, {rest}, sums, number, n);",
        )
    halves, halves_out = _reads("payload", "f16"), _writes("payload", "f16")
    add("half_encode", [values, halves_out], "const Few<f32, 1> parts = {{values}};\n    sum_all(parts, payload, n);")
    for adds, suffix, out in (("false", "", written), ("true", "_adding", added_to)):
        add("two_bit_decode" + suffix, [payload, quantum, out], f"decode<{adds}, 2>(payload, quantum, out, n);")
        add("one_bit_decode" + suffix, [payload, step, out], f"decode<{adds}, 1>(payload, step, out, n);")
    add("half_decode", [halves, written], "const Few<f16, 1> parts = {{payload}};\n    sum_all(parts, out, n);")
    add("half_decode_adding", [halves, added_to], "half_add(payload, out, n);")
    for suffix, element in (("", "values[i]"), ("_adding", "out[places[i]] + values[i]")):
        add(
            "top_decode" + suffix,
            [_reads("places", "u32"), values, added_to],
            f"EACH (i, n)\n        out[places[i]] = {element};",
        )
    add(
        "count_sizes",
        [values, prefix, shift, width, _updates("counts", "u64")],
        "count_all_sizes(values, prefix, shift, width, counts, n);",
    )
    add("find_top", [values, bound, _writes("found", "u32")], "find_all_top(values, bound, found, n);")
    add(
        "take_top",
        [_updates("values", "f32"), bound, shares, places, taken],
        "take_all_top(values, bound, shares, places, taken, n);",
    )
    doubles, doubles_out = _reads("doubles", "f64"), _writes("doubles", "f64")
    add("double_narrow", [doubles, written], "EACH (i, n)\n        out[i] = (f32)doubles[i];")
    add("double_widen", [values, doubles_out], "EACH (i, n)\n        doubles[i] = values[i];")
    return program("codecs", functions, helpers=_kernels())


@lru_cache(maxsize=1)
def _kernels() -> str:
    """Return what the kernels of sums and codecs call."""
    return f"enum {{ BINS = {BINS}, TOP_PIECE = {TOP_PIECE} }};\n{_text('kernels.c')}"


def _text(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
