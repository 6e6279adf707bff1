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
from functools import lru_cache
from importlib import resources

__all__ = ["KINDS", "OPTIONS", "THREADS", "Access", "Kernel", "Parameter", "Program", "prelude", "program"]

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
class Parameter:
    """One parameter of a kernel."""

    name: str
    kind: str
    """One of `KINDS`: the type of the number or of the elements at the address; of a table: at the addresses in it."""
    access: Access

    def declaration(self) -> str:
        """Return how C declares it."""
        if self.access is Access.SCALAR:
            return "%s %s" % (self.kind, self.name)
        if self.access is Access.TABLE:
            return "const u64 *%s" % self.name
        return "%s%s *%s" % ("const " if self.access is Access.READ else "", self.kind, self.name)


@dataclass(frozen=True)
class Kernel:
    """A function that is launched. After `parameters` it takes one more, `i64 n`: for how many elements."""

    name: str
    parameters: tuple[Parameter, ...]

    def head(self) -> str:
        """Return how C declares it."""
        return "KERNEL %s(%s)" % (self.name, ", ".join([*(each.declaration() for each in self.parameters), "i64 n"]))


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
    texts = ["%s\n{\n%s\n}\n" % (kernel.head(), body.strip("\n")) for kernel, body in functions]
    source = "\n".join([prelude(), *([helpers] if helpers else []), *texts])
    return Program(name, source, tuple(kernel for kernel, _ in functions))


def _text(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
