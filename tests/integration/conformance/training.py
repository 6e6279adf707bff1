"""Rows of the trainer: who updates, one step of SGD by dense and by row-sparse gradients, no reset of one worker."""

from __future__ import annotations

import numpy as np

from distrun_runtime import kvstore
from distrun_runtime.kvstore import KVStore, RowSparse
from distrun_runtime.trainer import Parameter, Trainer

SGD = ("sgd", {"learning_rate": 1.0})
STYPES = (("default", "default"), ("default", "row_sparse"), ("row_sparse", "row_sparse"))


def after_one_step(kv: KVStore) -> float:
    """Return 1 minus the sum of rank + 1 over the workers."""
    return 1 - kv.num_workers * (kv.num_workers + 1) / 2


def parameter(stype: str = "default", grad_stype: str = "default", shape: tuple[int, ...] = (10, 1)) -> Parameter:
    """Return a parameter of ones without a gradient."""
    return Parameter(np.ones(shape, "float32"), name="x", stype=stype, grad_stype=grad_stype)


def types_of(kind: str) -> KVStore:
    """Ask for each way to update, for each kind of parameter."""
    for stype, grad_stype in STYPES:
        for asked in (None, True, False):
            kv = kvstore.create(kind)
            refused = asked is False and ("async" in kind or grad_stype == "row_sparse")
            try:
                one = Trainer([parameter(stype, grad_stype)], *SGD, kvstore=kv, update_on_kvstore=asked)
            except ValueError:
                assert refused, (kind, stype, grad_stype, asked)
            else:
                assert not refused, (kind, stype, grad_stype)
                assert one.update_on_kvstore is (asked is not False)
    return kv


def gluon_type_cpu() -> KVStore:
    """dist_sync_kvstore.py: None and True are True; False is False for dense parameters, else a ValueError."""
    return types_of("dist_sync")


def async_trainer() -> KVStore:
    """dist_async_kvstore.py: None and True are True, False is a ValueError, for every kind of parameter."""
    return types_of("dist_async")


def gluon_trainer_type() -> KVStore:
    """dist_device_sync_kvstore.py: as dist_sync."""
    return types_of("dist_device_sync")


def gluon_step_cpu() -> KVStore:
    """One step with rate 1 and gradients of rank + 1, by the servers and by the workers."""
    for update_on_kvstore in (True, False):
        kv = kvstore.create("dist_sync")
        one = parameter()
        trainer = Trainer([one], *SGD, kvstore=kv, update_on_kvstore=update_on_kvstore)
        one.grad = np.full((10, 1), kv.rank + 1, "float32")
        trainer.step(1)
        assert (one.data == after_one_step(kv)).all(), one.data
    return kv


def gluon_sparse_step_cpu() -> KVStore:
    """The same through a row-sparse weight, whose rows are pulled."""
    kv = kvstore.create("dist_sync")
    one = parameter("row_sparse", "row_sparse", (3, 4))
    trainer = Trainer([one], *SGD, kvstore=kv)
    one.grad = RowSparse(np.full((1, 4), kv.rank + 1, "float32"), [1], (3, 4))
    trainer.step(1)
    trainer.pull_rows("x", [1, 2])
    assert list(one.data[:, 0]) == [1, after_one_step(kv), 1], one.data
    return kv


def trainer_reset() -> KVStore:
    """invalid_cpu: one worker cannot give a weight of the servers another value; together they can."""
    kv = kvstore.create("dist_sync")
    one = parameter(shape=(2,))
    trainer = Trainer([one], *SGD, kvstore=kv, update_on_kvstore=True)
    try:
        one.set_data(np.zeros(2))
    except RuntimeError:
        assert (one.data == 1).all()
    else:
        raise AssertionError("it was not refused")
    one.data[...] = 10 * (kv.rank + 1)
    trainer.assign()
    assert (one.data == 10).all(), one.data
    return kv


PARTS = {
    "gluon_type_cpu": gluon_type_cpu,
    "async_trainer": async_trainer,
    "gluon_trainer_type": gluon_trainer_type,
    "gluon_step_cpu": gluon_step_cpu,
    "gluon_sparse_step_cpu": gluon_sparse_step_cpu,
    "trainer_reset": trainer_reset,
}
