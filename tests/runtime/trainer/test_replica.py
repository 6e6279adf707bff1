"""Replicas on a device that is not the host, as torch's are: through a buffer on the host."""

from __future__ import annotations

import numpy as np
import pytest

from distrun_runtime.errors import KVError
from distrun_runtime.trainer import Parameter, Trainer
from distrun_runtime.trainer.replica import ArrayReplica, replica_of


class FarTensor:
    """As much of a torch tensor on a GPU as a trainer uses: its memory is out of numpy's reach."""

    requires_grad = True
    is_sparse = False
    dtype = "torch.float32"

    def __init__(self, array: np.ndarray, device: str = "cuda:0") -> None:
        self._array, self.device, self.grad, self._version = array, device, None, 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def detach(self) -> FarTensor:
        return self

    def cpu(self) -> FarTensor:
        return self if self.device == "cpu" else FarTensor(self._array.copy(), "cpu")

    def copy_(self, other: FarTensor) -> None:
        self._array[...] = other._array
        self._version += 1

    def new_zeros(self, shape: tuple[int, ...]) -> FarTensor:
        return FarTensor(np.zeros(shape, np.float32), self.device)

    def numpy(self) -> np.ndarray:
        assert self.device == "cpu", "a GPU's memory was read as the host's"
        return self._array


def far(value: float) -> FarTensor:
    return FarTensor(np.full(3, value, np.float32))


def values(tensors: list[FarTensor]) -> list[float]:
    return [float(one._array[0]) for one in tensors]


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_weights_of_gpus_are_updated_through_the_host(update_on_kvstore: bool) -> None:
    weights = [far(1), far(5)]
    trainer = Trainer(
        [weights], "sgd", {"learning_rate": 1.0, "momentum": 0.5}, "device", update_on_kvstore=update_on_kvstore
    )
    assert values(weights) == [1, 1]
    for _ in range(2):
        for weight, value in zip(weights, (1, 3), strict=True):
            weight.grad = far(value)  # type: ignore[assignment]
        trainer.step(4)
    assert values(weights) == [-1.5, -1.5]


def test_gradients_of_gpus_are_summed_in_their_place() -> None:
    weights = [far(0), far(0)]
    trainer = Trainer([weights], "sgd", {"learning_rate": 1.0}, "device", update_on_kvstore=False)
    weights[0].grad = far(2)  # type: ignore[assignment]
    trainer.allreduce_grads(ignore_stale_grad=True)
    assert values([one.grad for one in weights]) == [2, 2]  # type: ignore[misc]
    trainer.update(1)
    assert values(weights) == [-2, -2]


def test_without_a_store_a_gpu_is_updated_too() -> None:
    weight = far(1)
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, None)
    weight.grad = far(1)  # type: ignore[assignment]
    trainer.step(1)
    assert values([weight]) == [0]
    Parameter(weight).set_data(np.full(3, 8.0))
    assert values([weight]) == [8]


def test_a_tensor_has_its_gradient_itself() -> None:
    with pytest.raises(KVError, match=r"has its gradient in \.grad"):
        replica_of(far(1), np.ones(3))


def test_a_gradient_that_cannot_be_written_is_replaced_not_written() -> None:
    grad = np.ones(3)
    grad.flags.writeable = False
    replica = ArrayReplica(np.zeros(3), grad)
    target = replica.target()
    target[...] = 5
    assert grad[0] == 1
    assert replica.gradient() is target
