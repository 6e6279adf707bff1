"""What a trainer takes as parameters."""

from __future__ import annotations

import numpy as np
import pytest

from distrun_runtime.errors import KVError
from distrun_runtime.trainer import Parameter, Trainer


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


class Tensor:
    """As much of a torch tensor as is looked at before a step."""

    requires_grad = True
    grad = None
    dtype = "torch.float32"

    def __init__(self, *shape: int) -> None:
        self.array = ones(*shape)

    def detach(self) -> Tensor:
        return self

    cpu = detach

    def numpy(self) -> np.ndarray:
        return self.array


def collect(params: object) -> list[Parameter]:
    """Return the parameters of a trainer of these."""
    with Trainer(params, "sgd", kvstore=None) as trainer:
        return trainer.params


def names(params: object) -> list[str]:
    return [parameter.name for parameter in collect(params)]


def test_a_dict_is_taken_in_the_order_of_its_names() -> None:
    """Row: test_gluon_trainer.py, parameters sorted."""
    assert names({"b": Parameter(ones(1)), "a": Parameter(ones(2)), "c": Tensor(3)}) == ["a", "b", "c"]


def test_a_list_keeps_its_order_and_names_what_has_no_name() -> None:
    assert names([Parameter(ones(1), name="b"), Tensor(1), Parameter(ones(1), name="a")]) == ["b", "1", "a"]


def test_pairs_bring_their_names() -> None:
    assert names(("w%d" % i, Tensor(i)) for i in (2, 1)) == ["w2", "w1"]


def test_what_has_named_parameters_is_asked_for_them() -> None:
    class Net:
        weight, table = Tensor(1), Tensor(2, 3)

        class Layer:
            sparse = True

        def modules(self) -> list[object]:
            self.Layer.weight = self.table  # type: ignore[attr-defined]
            return [self, self.Layer]

        def named_parameters(self) -> list[tuple[str, Tensor]]:
            return [("weight", self.weight), ("table", self.table)]

    first, second = collect(Net())
    assert (first.name, first.grad_stype) == ("weight", "default")
    assert (second.name, second.grad_stype) == ("table", "row_sparse")


def test_a_list_in_the_list_is_one_parameter_on_several_devices() -> None:
    (one,) = collect([("w", [Tensor(2), Tensor(2)])])
    assert len(one.list_data()) == 2
    assert one.shape == (2,)


def test_a_shared_parameter_counts_once() -> None:
    """Row: test_gluon_trainer.py, shared parameters."""
    tensor, weight = Tensor(2), ones(2)
    assert names([("a", tensor), ("b", tensor), Parameter(weight, name="c"), Parameter(weight, name="d")]) == ["a", "c"]


def test_weights_in_the_same_memory_are_refused() -> None:
    """Each would be a key of its own, and the one that is read last would undo the other."""
    weight = ones(3)
    with pytest.raises(KVError, match=r"parameters 'a' and 'b' are in the same memory; give one of them"):
        collect({"a": Parameter(weight), "b": Parameter(weight[:2])})
    with pytest.raises(KVError, match="two devices of parameter 'a' are in the same memory"):
        collect({"a": Parameter([weight, weight])})
    collect({"a": Parameter(ones(0)), "b": Parameter(ones(0)), "c": Parameter(weight[:2]), "d": Parameter(weight[2:])})


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ([], "without parameters"),
        ({}, "without parameters"),
        (3, "a list or dict of Parameter or torch tensors, not int"),
        ("weights", "not str"),
        (ones(2), "not ndarray"),
        (Tensor(2), "not Tensor"),
        ([ones(2)], "parameter '0': a numpy array has no gradient"),
        ([Tensor(2), {"params": []}], "parameter '1' is a dict, neither"),
        ([("w", "x")], "parameter 'w' is a str"),
        ([Parameter(ones(2), name="a"), Parameter(ones(2), name="a")], "two parameters have the name 'a'"),
        ([Parameter([ones(2)] * 2, name="a"), Parameter(ones(2), name="b")], "'a' is on 2, 'b' on 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_parameter_is_refused(params: object, said: str) -> None:
    with pytest.raises(KVError, match=said):
        collect(params)
