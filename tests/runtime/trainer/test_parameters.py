"""Parameters: weights with gradients, on devices."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakearrays import FakeTorch, put

from distrun_runtime.arrays.dtypes import BFLOAT16, narrow
from distrun_runtime.errors import KVError
from distrun_runtime.store.values import RowSparse
from distrun_runtime.trainer import Parameter, Trainer


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def alone(one: Parameter) -> Trainer:
    """Return a trainer without a store, whose step subtracts the gradient."""
    return Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=None)


def test_devices_must_agree_on_shape_and_dtype() -> None:
    with pytest.raises(KVError, match=r"'w'.*\(2,\), \(3,\).*all must be alike"):
        Parameter([ones(2), ones(3)], name="w")
    with pytest.raises(KVError, match=r"dtypes \['float32', 'bfloat16'\]"):
        Parameter([ones(2), narrow(ones(2), BFLOAT16)])


def test_every_device_has_a_gradient_of_its_own() -> None:
    with pytest.raises(KVError, match="2 arrays and 1 gradients"):
        Parameter([ones(2), ones(2)], ones(2))
    with pytest.raises(KVError, match="'w' is an array, or a list of one for each device, not an empty list"):
        Parameter([], name="w")


def test_a_weight_that_cannot_be_written_is_refused() -> None:
    weight = ones(2)
    weight.flags.writeable = False
    with pytest.raises(KVError, match="read-only"):
        Parameter(weight)
    with pytest.raises(KVError, match="not int"):
        Parameter(3)


def test_a_storage_type_is_one_of_two() -> None:
    with pytest.raises(KVError, match="default or row_sparse, not 'csr'"):
        Parameter(ones(2, 2), stype="csr")
    assert Parameter(ones(2, 2), stype="row_sparse").grad_stype == "row_sparse"


def test_a_single_number_has_no_rows() -> None:
    for stypes in ({"stype": "row_sparse"}, {"grad_stype": "row_sparse"}):
        with pytest.raises(KVError, match="parameter 'b' is a single number and has no rows"):
            Parameter(np.zeros(()), name="b", **stypes)


@pytest.mark.parametrize("value", ["x", -1, float("nan"), float("inf"), None])
def test_a_multiplier_is_a_finite_number_of_at_least_0(value: Any) -> None:
    parameter = Parameter(ones(2), lr_mult=np.float32(2), wd_mult=0)
    assert (parameter.lr_mult, parameter.wd_mult) == (2, 0)
    for name in ("lr_mult", "wd_mult"):
        with pytest.raises(KVError, match="%s is a finite number, at least 0, not" % name):
            Parameter(ones(2), **{name: value})
        with pytest.raises(KVError, match="%s is a finite number" % name):
            setattr(parameter, name, value)


def test_an_assigned_gradient_is_good_for_one_step() -> None:
    one = Parameter(ones(2), name="w")
    trainer = alone(one)
    one.grad = np.array([1, 2], np.float32)
    trainer.step(1)
    assert list(one.data) == [0, -1]
    with pytest.raises(KVError, match="'w' has no new gradient"):
        trainer.step(1)
    assert one.grad is not None
    one.zero_grad()
    assert one.grad is None


def test_a_gradient_buffer_is_good_for_every_step_and_becomes_zero() -> None:
    grad = ones(2)
    one = Parameter(ones(2), grad)
    trainer = alone(one)
    for expected in (0, -1):
        trainer.step(1)
        assert list(one.data) == [expected] * 2
    one.zero_grad()
    assert one.grad is grad
    assert not grad.any()
    half = Parameter(narrow(ones(2), BFLOAT16), narrow(ones(2), BFLOAT16))
    half.zero_grad()
    assert not half.grad.view(np.uint16).any()


def test_one_gradient_for_all_devices_or_one_for_each() -> None:
    one = Parameter([ones(2), ones(2)])
    one.grad = [ones(2), 2 * ones(2)]
    assert [grad[0] for grad in one.list_grad()] == [1, 2]
    one.grad = ones(2)
    assert [grad[0] for grad in one.list_grad()] == [1, 1]
    with pytest.raises(KVError, match="on 2 devices, 3 gradients"):
        one.grad = [ones(2)] * 3
    with pytest.raises(KVError, match=r"on 1 devices, 2 gradients .* np.asarray"):
        Parameter(ones(2)).grad = [1.0, 2.0]


def test_a_gradient_fits_its_weight() -> None:
    one = Parameter(ones(2), name="w")
    trainer = alone(one)
    one.grad = np.ones(2)
    with pytest.raises(KVError, match=r"'w' has shape \(2,\) and dtype float32, its gradient \(2,\) and float64"):
        trainer.step(1)
    one.grad = RowSparse(ones(1, 2), [0], (3, 2))
    with pytest.raises(KVError, match=r"its gradient \(3, 2\)"):
        trainer.step(1)
    assert list(one.data) == [1, 1]


@pytest.mark.parametrize("wrong", [np.ones(3, np.float32), np.ones(2)], ids=str)
def test_a_buffer_that_does_not_fit_is_refused_when_it_is_given(wrong: Any) -> None:
    with pytest.raises(KVError, match=r"'w' has shape \(2,\) and dtype float32, its gradient"):
        Parameter(ones(2), wrong, name="w")
    with pytest.raises(KVError, match="'w' has shape"):
        Parameter([ones(2), ones(2)], [ones(2), wrong], name="w")


def test_a_buffer_is_an_array_that_can_be_written() -> None:
    """Sums are written into it, and what the user writes next must be seen."""
    grad = ones(2)
    grad.flags.writeable = False
    with pytest.raises(KVError, match=r"a gradient that is given with its weight .* assign it before each step"):
        Parameter(ones(2), grad)
    with pytest.raises(KVError, match=r"a gradient that is given with its weight .* assign it before each step"):
        Parameter(ones(3, 2), RowSparse(ones(1, 2), [0], (3, 2)))
    one = Parameter(ones(2))
    one.grad = grad
    alone(one).step(1)
    assert list(one.data) == [0, 0]


def test_new_data_is_written_into_all_devices_in_the_weights_dtype() -> None:
    devices = [ones(2), ones(2)]
    one = Parameter(devices, name="w")
    one.set_data(np.array([3.0, 4.0]))
    assert [list(device) for device in devices] == [[3, 4], [3, 4]]
    assert one.data is devices[0]
    assert one.list_data()[1] is devices[1]
    with pytest.raises(KVError, match=r"'w' has shape \(2,\), not \(3,\)"):
        one.set_data(ones(3))
    half = Parameter(narrow(ones(2), BFLOAT16))
    half.set_data(np.array([2.0, 1.0]))
    assert list(half.data.view(np.uint16)) == [0x4000, 0x3F80]


def test_a_parameter_belongs_to_one_trainer_until_that_is_closed() -> None:
    """Row: test_gluon_trainer.py, a parameter belongs to one trainer."""
    one = Parameter(ones(2), name="w")
    with Trainer([one], "sgd", kvstore=None), pytest.raises(KVError, match="'w' belongs to a trainer already"):
        Trainer([one], "sgd", kvstore=None)
    Trainer([one], "sgd", kvstore=None)


def test_masked_arrays_are_refused_as_weight_and_as_gradient() -> None:
    """numpy would have given their masked elements as numbers."""
    masked = np.ma.masked_array(np.ones(2, np.float32), [0, 1])
    one = Parameter(np.ones(2, np.float32), name="x")
    for call in (
        lambda: Parameter(masked),
        lambda: Parameter(np.ones(2, np.float32), masked),
        lambda: setattr(one, "grad", masked),
        lambda: one.set_data(masked),
    ):
        with pytest.raises(KVError, match=r"found a masked array, expected .* fix: give array.filled"):
            call()
    assert one.data.tolist() == [1, 1]
    assert one.grad is None


# --- tensors


class Tensor:
    """As much of a torch tensor as a trainer uses; numpy gets none of type bfloat16."""

    requires_grad, is_sparse, device, grad, _version = True, False, "cpu", None, 0

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self._array, self.dtype, self.shape = array, dtype, array.shape

    def detach(self) -> Tensor:
        return self

    cpu = detach

    def view(self, dtype: str) -> Tensor:
        return Tensor(self._array.view(dtype), "torch." + dtype)

    def new_zeros(self, shape: tuple[int, ...]) -> Tensor:
        return Tensor(np.zeros(shape, self._array.dtype), self.dtype)

    def numpy(self) -> np.ndarray:
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self._array


def test_what_looks_like_a_bfloat16_tensor_is_known_by_its_dtypes_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(bfloat16=object(), int16="int16"))  # type: ignore[arg-type]
    one = Parameter(Tensor(narrow(ones(3), BFLOAT16), "torch.bfloat16"))
    assert one.dtype == BFLOAT16
    assert one.shape == (3,)


def test_a_tensor_has_its_gradient_itself() -> None:
    with pytest.raises(KVError, match=r"has its gradient in \.grad"):
        Parameter(Tensor(ones(3), "torch.float32"), np.ones(3))


def test_a_device_without_a_gradient_gets_the_sum_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    torch.autograd = SimpleNamespace(graph=SimpleNamespace(increment_version=lambda tensors: None))  # type: ignore[attr-defined]
    put(monkeypatch, torch)
    weights = [Tensor(np.zeros(3, np.float32), "torch.float32") for _ in range(2)]
    trainer = Trainer([weights], "sgd", {"learning_rate": 1.0}, "device", update_on_kvstore=False)
    weights[0].grad = Tensor(np.full(3, 2, np.float32), "torch.float32")  # type: ignore[assignment]
    trainer.allreduce_grads(ignore_stale_grad=True)
    assert [one.grad.numpy().tolist() for one in weights] == [[2, 2, 2]] * 2  # type: ignore[attr-defined]


def test_a_gradient_that_cannot_be_written_is_replaced_not_written() -> None:
    grad = np.ones(3)
    grad.flags.writeable = False
    one = Parameter([np.zeros(3), np.zeros(3)])
    trainer = Trainer([one], "sgd", kvstore="local", update_on_kvstore=False)
    one.grad = grad
    trainer.allreduce_grads()
    assert grad[0] == 1
    assert [list(each) for each in one.list_grad()] == [[2, 2, 2]] * 2


def test_what_is_mxnets_is_refused_with_what_to_give() -> None:
    class Block:
        """As one of MXNet's: its module is what tells."""

        __module__ = "mxnet.gluon.parameter"

    class NDArray:
        def asnumpy(self) -> np.ndarray:
            return np.ones(2)

    fix = r"but of MXNet; fix: give the parameters of a torch network, or Parameter\(x\.asnumpy\(\), gradient\)"
    for params in (Block(), [Block()], {"x": Block()}):
        with pytest.raises(KVError, match=fix):
            Trainer(params, "sgd", kvstore=None)
    one = Parameter(np.ones(2))
    for call in (lambda: Parameter(NDArray()), lambda: setattr(one, "grad", NDArray())):
        with pytest.raises(KVError, match=r"an array of MXNet, which only MXNet can read; fix: call \.asnumpy\(\)"):
            call()
