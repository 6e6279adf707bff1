"""Objects as bytes, for `broadcast_object` and `allgather_object`: JSON values, bytes and arrays; nothing is pickled.

    8 bytes     n, the length of the text, unsigned, little-endian
    n bytes     JSON in UTF-8: the object as a node
    the rest    the bytes of all arrays and byte strings, in their order, without gaps

A node is null, a bool, a number or a string as itself; else a list that begins with what it is: `["list", nodes]`,
`["dict", [[key, node], ...]]`, `["bytes", length]`, `["array", dtype, shape, "numpy" or "torch"]`.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from typing import Any

import numpy as np

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays import dtypes, foreign
from distrun_runtime.arrays.dtypes import DType
from distrun_runtime.errors import KVError
from distrun_runtime.store.values import refuse_mask

OBJECT_BYTES = 64 * 1024 * 1024
"""The most that an object may take."""
DEPTH = 100
"""How deep lists and dicts may be in each other."""

_LENGTH = struct.Struct("<Q")
_BOOL: DType = np.dtype(np.bool_)


def encode(value: object, call: str) -> bytes:
    """Return an object as bytes.

    Arguments:
        call: whose it is, for messages.

    Raises:
        KVError: it has something of another type, is too deep or too large; says where.
    """
    frames: list[bytes] = []
    node = _node(value, call, frames, 0)
    try:
        text = json.dumps(node, separators=(",", ":")).encode()
    except ValueError as err:  # an int of more digits than Python writes
        raise KVError(f"{call}: {err}") from err
    size = _LENGTH.size + len(text) + sum(map(len, frames))
    if size > OBJECT_BYTES:
        raise KVError(f"{call}: the object takes {size} bytes, expected at most {OBJECT_BYTES}; fix: give large arrays")
    return b"".join((_LENGTH.pack(len(text)), text, *frames))


def _node(value: Any, where: str, frames: list[bytes], depth: int) -> Any:
    if depth > DEPTH:
        raise KVError(f"{where[:80]}: more than {DEPTH} lists and dicts in each other")
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return ["list", [_node(each, f"{where}[{at}]", frames, depth + 1) for at, each in enumerate(value)]]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise KVError(f"{where}: a key of a dict is a str, not {type(key).__name__}: {key!r:.60}")
        return ["dict", [[key, _node(each, f"{where}[{key!r}]", frames, depth + 1)] for key, each in value.items()]]
    if isinstance(value, (bytes, bytearray)):
        frames.append(bytes(value))
        return ["bytes", len(value)]
    refuse_mask(value, where)
    if not isinstance(value, np.ndarray) and not foreign.is_tensor(value):
        raise KVError(
            f"{where}: found {type(value).__name__}; expected None, bool, int, float, str, bytes, an array of numpy or"
            " torch, or a list, tuple or dict of these"
        )
    array = devices.host_array(value, where)
    if array.dtype != _BOOL and dtypes.name_of(array.dtype) not in dtypes.NAMES:
        raise KVError(f"{where}: found an array of {array.dtype}; expected bool or one of {', '.join(dtypes.NAMES)}")
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<") if array.dtype != dtypes.BFLOAT16 else None)
    frames.append(array.tobytes())
    library = "torch" if foreign.is_tensor(value) else "numpy"
    return ["array", dtypes.name_of(array.dtype), list(np.shape(value)), library]


def decode(data: bytes, call: str) -> Any:
    """Return the object of bytes that `encode` made. Tensors are on the host, and are arrays where torch is not loaded.

    Raises:
        KVError: they are not such bytes.
    """
    wrong = KVError(f"{call}: found bytes that are no object")
    try:
        (length,) = _LENGTH.unpack_from(data)
        end = _LENGTH.size + length
        if end > len(data):
            raise wrong
        reader = _NodeReader(data, end)
        found = reader.value(json.loads(data[_LENGTH.size : end]), 0)
    except (struct.error, ValueError, TypeError, LookupError, RecursionError) as err:
        raise wrong from err
    if reader.at != len(data):
        raise wrong
    return found


class _NodeReader:
    """Makes objects of nodes; raises ValueError, TypeError or LookupError where they are none."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def value(self, node: Any, depth: int) -> Any:
        if depth > DEPTH or isinstance(node, dict):
            raise ValueError("too deep, or no node")
        if not isinstance(node, list):
            return node
        match node:
            case ["list", list(nodes)]:
                return [self.value(each, depth + 1) for each in nodes]
            case ["dict", list(pairs)] if all(isinstance(key, str) for key, _ in pairs):
                return {key: self.value(each, depth + 1) for key, each in pairs}
            case ["bytes", int(length)]:
                return self._take(length)
            case ["array", str(name), list(shape), str(library)] if all(type(side) is int for side in shape):
                dtype = _BOOL if name == "bool" else dtypes.parse(name)
                if any(side < 0 for side in shape):
                    raise ValueError("no shape")
                array = np.frombuffer(self._take(math.prod(shape) * dtype.itemsize), dtype).reshape(shape).copy()
                return foreign.tensor_over(array) if library == "torch" and "torch" in sys.modules else array
        raise ValueError("no node")

    def _take(self, length: int) -> bytes:
        if not 0 <= length <= len(self._data) - self.at:
            raise ValueError("too short")
        self.at += length
        return self._data[self.at - length : self.at]
