"""Compiled loops: they give the same bytes as numpy, and numpy does the work where there are none."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hardfloats import SPECIAL, floats
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.arrays import compiled, dtypes
from distrun_runtime.ops import compression as codec
from distrun_runtime.ops import quantize

Array = npt.NDArray[Any]


def by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_compiled", {})


class Counted:
    """Which loops ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        call = compiled.call

        def counted(name: str, *arguments: Any) -> Any:
            result = call(name, *arguments)
            if result is not None:
                self.ran.append(name)
            return result

        monkeypatch.setattr(compiled, "call", counted)


@pytest.fixture(params=["compiled", "as Python"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The loops: compiled, where numba is installed, and as the plain Python that they are."""
    if request.param == "compiled":
        pytest.importorskip("numba")
        compiled.prepare(compiled.LOOPS)
        yield request.param
    else:
        monkeypatch.setattr(compiled, "_compiled", {name: loop for name, (loop, _) in compiled.LOOPS.items()})
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            yield request.param


def encoded(name: str, rounds: list[Array], params: dict[str, float]) -> list[tuple[bytes, bytes]]:
    """Return each round's payload and residual."""
    found = codec.named(name)
    complete = found.check(params)
    residual = np.zeros_like(rounds[0])
    result = []
    for values in rounds:
        # At an odd address, as in the middle of a message.
        size = found.size(len(values), complete)
        out = np.full(size + 1, 255, np.uint8)[1:]
        found.write(values, residual if found.has_residual else None, complete, out)
        result.append((out.tobytes(), residual.tobytes()))
    return result


CASES = [
    ("2bit", {"threshold": 0.5}),
    ("2bit", {"threshold": 1e-3}),
    ("1bit", {"threshold": 0.5}),
    ("1bit", {"threshold": 0.0}),
    ("1bit", {"threshold": -1e-40}),
    ("fp16", {}),
    ("topk", {"ratio": 0.3}),
    ("1bit_scaled", {}),
]
LENGTHS = [*range(101), 32767, 32768, 32769, 70001]


@pytest.mark.parametrize(("name", "params"), CASES)
def test_loops_encode_to_the_same_bytes_and_residuals_as_numpy(
    name: str, params: dict[str, float], loops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in LENGTHS if loops == "compiled" else LENGTHS[:101:9]:
        finite = codec.named(name).has_residual
        rounds = [floats(n, seed, finite) for seed in range(3)]
        found = encoded(name, rounds, params)
        with monkeypatch.context() as patched:
            by_numpy(patched)
            assert encoded(name, rounds, params) == found, n


@pytest.mark.parametrize(("name", "params"), CASES)
def test_loops_decode_and_add_to_the_same_bytes_as_numpy(
    name: str, params: dict[str, float], loops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = codec.named(name)
    complete = found.check(params)

    def decoded(payload: Array, start: Array, *, adds: bool) -> bytes:
        out = start.copy()
        found.read(payload.data, out, complete, adds=adds)
        return out.tobytes()

    rng = np.random.default_rng(3)
    for n in LENGTHS if loops == "compiled" else LENGTHS[:101:9]:
        size = found.size(n, complete)
        payload = rng.integers(0, 256, size + 1, dtype=np.uint8)[1:]
        if name == "topk":
            payload[...] = np.frombuffer(found.encode(floats(n, 1), None, complete), np.uint8)
        start = floats(n, 4)
        for adds in (False, True):
            ours = decoded(payload, start, adds=adds)
            with monkeypatch.context() as patched:
                by_numpy(patched)
                assert decoded(payload, start, adds=adds) == ours, (n, adds)


@settings(deadline=None)
@given(bits=st.lists(st.sampled_from(SPECIAL) | st.integers(0, 0x7FFFFFFF), max_size=40), signs=st.randoms())
def test_first_value_that_is_not_finite_is_found_alike(bits: list[int], signs: Any) -> None:
    pytest.importorskip("numba")
    compiled.prepare(["are_finite"])
    values = np.array([each | signs.choice((0, 1 << 31)) for each in bits], np.uint32).view(np.float32)
    for residual in (None, np.ones_like(values), np.full_like(values, 3e38)):
        with np.errstate(all="ignore"):
            wrong = np.flatnonzero(~np.isfinite(values if residual is None else values + residual))
        assert quantize.first_not_finite(values, residual) == (wrong[0] if len(wrong) else -1)


def test_every_float16_is_widened_alike(loops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves if loops == "compiled" else halves[::97]
    found = dtypes.widen(halves).tobytes()
    by_numpy(monkeypatch)
    assert dtypes.widen(halves).tobytes() == found


def test_numbers_of_any_bits_become_the_same_float16(loops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (1, 3, 100, 300) if loops == "as Python" else (*range(140), 100003):
        values = floats(n, n, finite=False)
        found = dtypes.narrow(values, np.dtype(np.float16)).tobytes()
        with monkeypatch.context() as patched:
            by_numpy(patched)
            assert dtypes.narrow(values, np.dtype(np.float16)).tobytes() == found, n


@pytest.mark.parametrize("name", ["2bit", "1bit", "fp16"])
def test_prepared_codec_uses_its_loops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    found = codec.named(name)
    found.prepare()
    counted = Counted(monkeypatch)
    values, residual = np.ones(50, np.float32), np.zeros(50, np.float32)
    values.flags.writeable = False
    params = found.check({})
    found.decode(bytes(found.encode(values, residual, params)), 50, params)
    assert counted.ran == list(found.loops)


@pytest.mark.parametrize("name", sorted(codec.CODECS))
def test_strided_and_unaligned_arrays_are_encoded_by_numpy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = codec.named(name)
    found.prepare()
    params, values = found.check({}), floats(100, 5)
    expected = bytes(found.encode(values, np.zeros_like(values), params))
    strided = np.zeros((100, 2), np.float32)
    strided[:, 0] = values
    unaligned = np.zeros(401, np.uint8)[1:].view(np.float32)
    unaligned[...] = values
    for each in (strided[:, 0], unaligned):
        assert bytes(found.encode(each, np.zeros_like(values), params)) == expected


def test_loops_compiled_in_a_thread_are_ready_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    by_numpy(monkeypatch)
    monkeypatch.setattr(compiled, "_asked", {})
    compiled.prepare_soon(["are_finite"])
    compiled.prepare_soon(["are_finite"])
    compiled.prepare(["are_finite"])  # waits for the thread, or does its work
    assert compiled.call("are_finite", np.ones(3, np.float32), np.empty(0, np.float32)) == 1


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )


NUMPY_GOES_ON = """
import sys
{before}
import numpy as np
from distrun_runtime import kvstore
from distrun_runtime.arrays import compiled
with kvstore.create("device") as kv:
    kv.set_gradient_compression({{"type": "2bit", "min_size": 0}})
    kv.init("w", np.zeros(5, np.float32))
    out = np.empty(5, np.float32)
    kv.pushpull("w", np.full(5, 0.7, np.float32), out=out)
    print(out.tolist(), any(compiled._compiled.values()))
"""


@pytest.mark.parametrize(
    ("before", "variables"),
    [("sys.modules['numba'] = None", {}), ("", {"NUMBA_DISABLE_JIT": "1"})],
    ids=["numba is not installed", "numba is switched off"],
)
def test_compression_goes_on_with_numpy_if(before: str, variables: dict[str, str]) -> None:
    result = run(NUMPY_GOES_ON.format(before=before), **variables)
    assert (result.stdout, result.stderr) == ("[0.5, 0.5, 0.5, 0.5, 0.5] False\n", "")


def test_choosing_a_codec_compiles_its_loops() -> None:
    pytest.importorskip("numba")
    assert run(NUMPY_GOES_ON.format(before="")).stdout == "[0.5, 0.5, 0.5, 0.5, 0.5] True\n"


def test_numba_that_cannot_be_imported_is_told_once_and_numpy_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.3 or less. Got NumPy 2.9.')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    by_numpy(monkeypatch)
    with pytest.warns(RuntimeWarning, match=r"ImportError: Numba needs NumPy 2.3.*fix: pip install"):
        codec.named("2bit").prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codec.named("fp16").prepare()
    assert codec.named("2bit").encode(np.ones(4, np.float32), None, {"threshold": 0.5}) == b"\xff\0\0\0"
