"""The trainer on one machine."""

from __future__ import annotations

import numpy as np
import pytest
from linear import RATE, Linear, examples, trained

from distrun_runtime import kvstore
from distrun_runtime.arrays.dtypes import BFLOAT16, narrow, widen
from distrun_runtime.data import split_input_slice
from distrun_runtime.errors import ContractError, KVError, StoreClosed
from distrun_runtime.kvstore import KVStoreBase
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.schedules import Factor
from distrun_runtime.store.values import RowSparse
from distrun_runtime.trainer import Parameter, Trainer

SHAPE = (10,)
HALF = {"learning_rate": 1.0, "momentum": 0.5}


class TestStore(KVStoreBase):
    """The least that a store is: sums over devices, in numpy."""

    __test__ = False
    type, rank, num_workers = "teststore", 0, 1

    def broadcast(self, key, value, out, priority=0):
        for one in out:
            one[...] = value

    def pushpull(self, key, value, out=None, priority=0):
        total = sum(value)
        for one in out:
            one[...] = total

    def is_capable(self, capability: str) -> bool:
        return False


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def zeros_on(devices: int, grads: float = 1.0) -> Parameter:
    return Parameter(
        [np.zeros(SHAPE, np.float32) for _ in range(devices)],
        [np.full(SHAPE, grads, np.float32) for _ in range(devices)],
        name="x",
    )


# --- rows of MXNet's tests/python/unittest/test_gluon_trainer.py


def test_two_devices_make_one_update_with_the_sum_of_their_gradients() -> None:
    """Row: two-device SGD arithmetic; then with a multiplier that changed meanwhile."""
    one = zeros_on(2)
    trainer = Trainer([one], "sgd", HALF, kvstore="device")
    assert trainer.update_on_kvstore
    trainer.step(1)
    assert (one.list_data()[1] == -2).all()
    one.lr_mult = 0.5
    trainer.step(1)
    assert (one.list_data()[1] == -4).all()


@pytest.mark.parametrize("kind", [None, "local", "device"])
def test_one_device_makes_no_store(kind: str | None) -> None:
    """Row: a single context creates no kvstore."""
    trainer = Trainer([zeros_on(1)], "sgd", HALF, kvstore=kind)
    assert trainer.kvstore is None
    assert not trainer.update_on_kvstore


def test_a_store_of_another_maker_sums_and_the_trainer_updates() -> None:
    """Row: teststore: update_on_kvstore is False; True is a ValueError."""
    one = zeros_on(2)
    trainer = Trainer([one], "sgd", HALF, kvstore=TestStore())
    assert not trainer.update_on_kvstore
    trainer.step(2)
    assert (one.list_data()[1] == -1).all()
    with pytest.raises(ValueError, match="please set update_on_kvstore=False when training with 'teststore'"):
        Trainer([zeros_on(2)], "sgd", HALF, kvstore=TestStore(), update_on_kvstore=True)


def test_what_a_store_of_another_maker_lacks_is_said() -> None:
    trainer = Trainer([zeros_on(2)], "sgd", HALF, kvstore=TestStore())
    with pytest.raises(KVError, match="store 'teststore' cannot assign weights"):
        trainer.assign()
    trainer.join()  # nobody else is there


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_saved_states_keep_learning_rate_and_momentum(tmp_path, update_on_kvstore: bool) -> None:
    """Row: save/load states keeps lr; a multiplier that is set after loading counts."""
    one = zeros_on(2)
    trainer = Trainer([one], "sgd", HALF, kvstore="local", update_on_kvstore=update_on_kvstore)
    trainer.step(1)
    one.grad = [ones(10), ones(10)]
    trainer.save_states(tmp_path / "states")
    trainer.set_learning_rate(0.25)
    trainer.step(1)
    trainer.load_states(tmp_path / "states")
    assert trainer.learning_rate == 1.0
    assert (one.data == -2).all()
    one.lr_mult = 0.5
    one.grad = [ones(10), ones(10)]
    trainer.step(1)
    assert (one.list_data()[1] == -4).all()  # momentum 0.5 * -2, and 0.5 * 2


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_a_schedule_goes_on_whoever_updates(update_on_kvstore: bool) -> None:
    """Row: LR scheduler advances on both modes."""
    one = zeros_on(2)
    rates = {"lr_scheduler": Factor(2, factor=0.1, base_lr=1.0)}
    trainer = Trainer([one], "sgd", rates, kvstore="local", update_on_kvstore=update_on_kvstore)
    expected = 0.0
    for number, rate in enumerate([1, 1, 0.1, 0.1, 0.01]):
        one.grad = ones(10)
        trainer.step(2)
        expected -= rate
        assert trainer.learning_rate == pytest.approx(rate)
        np.testing.assert_allclose(one.data, expected, rtol=1e-6, err_msg=str(number))
    with pytest.raises(KVError, match="learning rate comes from lr_scheduler"):
        trainer.set_learning_rate(0.5)


def test_a_reloaded_parameter_is_taken_up_by_a_local_store() -> None:
    """Row: reset of kv when parameters are reloaded."""
    one = zeros_on(2)
    trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore="device")
    trainer.step(1)
    one.set_data(np.full(SHAPE, 7.0))
    trainer.step(1)
    assert (one.list_data()[0] == 5).all()


def test_allreduce_makes_the_gradients_of_all_devices_equal() -> None:
    """Row: allreduce makes device grads equal; what is changed before `update` counts."""
    one = zeros_on(2)
    one.list_grad()[1][...] = 3
    trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore="device", update_on_kvstore=False)
    trainer.allreduce_grads()
    assert [(grad == 4).all() for grad in one.list_grad()] == [True, True]
    one.grad = [np.clip(grad, -1, 1) for grad in one.list_grad()]
    trainer.update(1)
    assert (one.list_data()[1] == -1).all()


@pytest.mark.parametrize("call", ["allreduce_grads", "update"])
def test_sums_are_not_to_be_had_where_the_store_updates(call: str) -> None:
    trainer = Trainer([zeros_on(2)], "sgd", HALF, kvstore="device")
    with pytest.raises(KVError, match="%s: the store updates the weights" % call):
        getattr(trainer, call)(*([1] if call == "update" else []))


def test_update_alone_takes_the_gradients_as_they_are() -> None:
    one = zeros_on(1)
    Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=None).update(2)
    assert (one.data == -0.5).all()


def test_a_shared_parameter_is_updated_once() -> None:
    """Row: shared parameters."""
    weight, grad = np.zeros(2, np.float32), ones(2)
    trainer = Trainer({"a": Parameter(weight, grad), "b": Parameter(weight, grad)}, "sgd", HALF, kvstore=None)
    trainer.step(1)
    assert list(weight) == [-1, -1]
    assert len(trainer.params) == 1


# --- P5, P6: devices


@pytest.mark.parametrize("update_on_kvstore", [True, False])
@pytest.mark.parametrize("kind", ["local", "device"])
@pytest.mark.parametrize("shares", [[1], [1, 1], [1, 1, 1, 1], [3, 1], [5, 2, 2, 1]], ids=str)
def test_any_number_of_devices_with_any_shares_trains_to_the_same_weights(
    shares: list[float], kind: str, update_on_kvstore: bool
) -> None:
    x, y = examples(70)
    model = Linear(len(shares))
    with kvstore.create(kind) as kv:
        trainer = Trainer(model.params, "sgd", RATE, kvstore=kv, update_on_kvstore=update_on_kvstore)
        batches = [slice(start, min(start + 20, 70)) for start in range(0, 70, 20)]  # the last has 10
        for batch in batches:
            size = batch.stop - batch.start
            for device, part in enumerate(split_input_slice(size, shares)):
                model.backward(x[batch][part], y[batch][part], device)
            trainer.step(size)
    reference = trained([(x[batch], y[batch]) for batch in batches])
    each = len(shares)
    for got, expected in zip(model.weights, [one for one in reference for _ in range(each)], strict=True):
        # float64; only the order of additions differs
        np.testing.assert_allclose(got, expected, rtol=1e-11)


# --- rules


@pytest.mark.parametrize("update_on_kvstore", [True, False])
@pytest.mark.parametrize("name", sorted(set(rules.RULES) - {"test"}))
def test_every_rule_updates_alike_in_the_store_and_in_the_trainer(name: str, update_on_kvstore: bool) -> None:
    x, y = examples(40)
    results = []
    for options in ({"kvstore": None}, {"kvstore": "local", "update_on_kvstore": update_on_kvstore}):
        model = Linear(1 if options["kvstore"] is None else 2)
        trainer = Trainer(model.params, name, {"learning_rate": 0.01, "wd": 0.01}, **options)
        for start in range(0, 40, 10):
            halves = [(0, 10)] if options["kvstore"] is None else [(0, 5), (5, 10)]
            for device, (first, last) in enumerate(halves):
                model.backward(x[start + first : start + last], y[start + first : start + last], device)
            trainer.step(10)
        results.append([model.params[word].data for word in ("weight", "bias")])
    for got, expected in zip(*results, strict=True):
        # The scale multiplies the gradient before or after the sum: float64 rounding, grown by four steps.
        np.testing.assert_allclose(got, expected, rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", [None, "local"])
def test_small_steps_of_half_precision_are_not_lost_with_multi_precision(dtype: str, kind: str | None) -> None:
    """Twenty steps of 1e-4 from 1.0; the spacing of float16 there is 1e-3, of bfloat16 8e-3."""
    kept = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    devices = 1 if kind is None else 2
    one = Parameter([narrow(ones(4), kept) for _ in range(devices)])
    step = {"learning_rate": 1e-3 if dtype == "bfloat16" else 1e-4, "multi_precision": True}
    trainer = Trainer([one], "sgd", step, kvstore=kind)
    for _ in range(20):
        one.grad = [narrow(ones(4), kept) for _ in range(devices)]
        trainer.step(devices)
    expected = narrow(np.full(4, 1 - 20 * step["learning_rate"], np.float32), kept)
    assert (widen(one.data) == widen(expected)).all()


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_torchs_names_of_parameters_are_taken(update_on_kvstore: bool) -> None:
    options = {"lr": 0.5, "betas": (0.5, 0.25), "eps": 1e-3, "weight_decay": 0.1}
    trainer = Trainer([zeros_on(2)], "adam", options, kvstore="local", update_on_kvstore=update_on_kvstore)
    trainer.set_optimizer_params(betas=(0.5, 0.75))
    found = trainer.optimizer_params
    assert [found[name] for name in ("learning_rate", "beta1", "beta2", "epsilon", "wd")] == [0.5, 0.5, 0.75, 1e-3, 0.1]
    trainer.step(1)


def test_a_rule_that_does_not_fit_is_refused_with_the_parameter() -> None:
    with pytest.raises(KVError, match="parameter 'w': rule 'sgd' updates float weights, not int32"):
        Trainer([Parameter(np.ones(2, np.int32), name="w")], "sgd", kvstore=None)
    with pytest.raises(KVError, match="unknown rule 'sgdd'"):
        Trainer([zeros_on(1)], "sgdd", kvstore=None)
    with pytest.raises(KVError, match="no parameter 'learning_rat'"):
        Trainer([zeros_on(1)], "sgd", {"learning_rat": 1}, kvstore=None)


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_parameters_of_the_rule_change_between_steps(update_on_kvstore: bool) -> None:
    one = zeros_on(2)
    trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore="local", update_on_kvstore=update_on_kvstore)
    trainer.step(2)
    trainer.set_optimizer_params(learning_rate=0.5, momentum=0.5)
    assert trainer.learning_rate == 0.5
    assert trainer.optimizer_params["momentum"] == 0.5
    one.grad = ones(10)
    trainer.step(2)
    assert (one.data == -1.5).all()
    with pytest.raises(KVError, match="learning_rate"):
        trainer.set_learning_rate(-1)
    assert trainer.learning_rate == 0.5


def test_a_rule_without_a_learning_rate_says_so() -> None:
    trainer = Trainer([zeros_on(1)], "test", kvstore=None)
    trainer.step(1)
    with pytest.raises(KVError, match="rule 'test' has no learning_rate"):
        _ = trainer.learning_rate


# --- gradients that are missing


@pytest.mark.parametrize(("kind", "devices"), [(None, 1), ("local", 2)])
@pytest.mark.parametrize("update_on_kvstore", [None, False])
def test_a_parameter_without_a_gradient_is_named_and_nothing_is_done(
    kind: str | None, devices: int, update_on_kvstore: bool | None
) -> None:
    used = zeros_on(devices)
    unused = Parameter([ones(2) for _ in range(devices)], name="unused")
    trainer = Trainer([used, unused], "sgd", HALF, kvstore=kind, update_on_kvstore=update_on_kvstore)
    with pytest.raises(KVError, match="parameter 'unused' has no new gradient since the last step"):
        trainer.step(1)
    assert not used.data.any()
    trainer.step(devices, ignore_stale_grad=True)
    assert (used.data == -1).all()
    assert (unused.data == 1).all()


@pytest.mark.parametrize("size", [0, -1, float("inf"), float("nan"), "8", True, pytest.param(10**400, id="huge")])
def test_a_batch_size_is_a_number_above_zero(size: object) -> None:
    with pytest.raises(KVError, match="batch_size is a number"):
        Trainer([zeros_on(1)], "sgd", HALF, kvstore=None).step(size)  # type: ignore[arg-type]


# --- rows


@pytest.mark.parametrize("devices", [1, 2])
def test_a_row_sparse_gradient_of_a_dense_weight_changes_only_its_rows(devices: int) -> None:
    table = Parameter([ones(4, 2) for _ in range(devices)], name="table", grad_stype="row_sparse")
    trainer = Trainer([table], "sgd", HALF, kvstore="local")
    assert not trainer.update_on_kvstore
    for _ in range(2):
        table.grad = [RowSparse(ones(2, 2), [3, 1], (4, 2)) for _ in range(devices)]
        trainer.step(devices)
    # Momentum 0.5: steps of 1 and 1.5.
    assert [list(one[:, 0]) for one in table.list_data()] == [[1, -1.5, 1, -1.5]] * devices


def test_a_row_sparse_weight_is_pulled_by_rows() -> None:
    table = Parameter(ones(4, 2), name="table", stype="row_sparse")
    trainer = Trainer([table], "sgd", {"learning_rate": 1.0}, kvstore="local")
    assert trainer.update_on_kvstore
    table.grad = RowSparse(ones(3, 2), [3, 1, 3], (4, 2))
    trainer.step(1)
    assert (table.data == 1).all()
    trainer.pull_rows("table", np.array([[1, 0], [1, 1]]))
    assert list(table.data[:, 0]) == [1, 0, 1, 1]
    trainer.pull_rows(table)
    assert list(table.data[:, 0]) == [1, 0, 1, -1]
    with pytest.raises(KVError, match="parameter 'table': row 4"):
        trainer.pull_rows(0, [4])
    with pytest.raises(KVError, match="no parameter 'tabel'"):
        trainer.pull_rows("tabel", [1])


def test_rows_of_a_dense_weight_need_no_pull() -> None:
    with pytest.raises(KVError, match="'x' is not row-sparse: step brings all of it"):
        Trainer([zeros_on(1)], "sgd", HALF, kvstore=None).pull_rows("x", [1])


def test_a_row_sparse_gradient_that_was_not_announced_is_taken_and_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = Parameter(ones(4, 2), name="table")
    trainer = Trainer([table], "sgd", {"learning_rate": 1.0}, kvstore="local", update_on_kvstore=True)
    for _ in range(2):
        table.grad = RowSparse(ones(1, 2), [3], (4, 2))
        trainer.step(1)
    assert list(table.data[:, 0]) == [1, 1, 1, -1]
    assert len([line for line in caplog.messages if "'table': row-sparse gradients are sent as whole" in line]) == 1


# --- stores


def test_a_distributed_store_without_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual store of a trainer is distributed: a job that was started wrongly does not train alone, unseen."""
    for name in ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ContractError, match="DMLC_"):
        Trainer([zeros_on(1)], "sgd", HALF)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kvstore": 3}, "name of a store, an open store or None, not int"),
        ({"kvstore": "locl", "update_on_kvstore": True}, "unknown store type 'locl'"),
        ({"kvstore": None, "update_on_kvstore": 1}, "True, False or None, not 1"),
    ],
)
def test_a_store_is_a_name_or_an_open_store(options: dict[str, object], said: str) -> None:
    with pytest.raises(KVError, match=said):
        Trainer([zeros_on(1)], "sgd", HALF, **options)  # type: ignore[arg-type]


def test_the_variable_decides_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    assert not Trainer([zeros_on(2)], "sgd", HALF, kvstore="local").update_on_kvstore
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "1")
    assert Trainer([zeros_on(2)], "sgd", HALF, kvstore="local").update_on_kvstore


def test_a_trainer_closes_the_store_that_it_made_and_no_other() -> None:
    with kvstore.create("local") as kv:
        with Trainer([zeros_on(1)], "sgd", HALF, kvstore=kv) as trainer:
            assert trainer.kvstore is kv
        kv.barrier()
        with pytest.raises(StoreClosed, match="trainer was closed"):
            trainer.step(1)
        trainer.close()
    with Trainer([zeros_on(2)], "sgd", HALF, kvstore="local") as trainer:
        own = trainer.kvstore
    with pytest.raises(StoreClosed):
        own.barrier()  # type: ignore[union-attr]


def test_a_store_that_was_made_for_a_trainer_which_failed_is_closed() -> None:
    one = zeros_on(2)
    with pytest.raises(KVError, match="compress"):
        Trainer([one], "sgd", HALF, kvstore="local", compression_params={"type": "zip"})
    Trainer([one], "sgd", HALF, kvstore="local")  # it belongs to no trainer


def test_a_trainer_says_what_it_is() -> None:
    assert repr(Trainer([zeros_on(1)], "sgd", kvstore=None)) == "<Trainer of 1 parameters by 'sgd', no store>"
    assert "store 'device'" in repr(Trainer([zeros_on(2)], "sgd", kvstore="device"))


def test_assigned_weights_reach_store_and_masters() -> None:
    for kind, devices in ((None, 1), ("local", 2)):
        one = Parameter([ones(2).astype(np.float16) for _ in range(devices)], name="w")
        trainer = Trainer([one], "sgd", {"learning_rate": 1.0, "multi_precision": True}, kvstore=kind)
        one.grad = np.ones(2, np.float16)
        trainer.step(devices)
        one.data[...] = 9
        with pytest.raises(KVError, match="has no parameter 'v'; it has 'w'"):
            trainer.assign(["v"])
        trainer.assign(["w"])
        assert (one.list_data()[-1] == 9).all()
        one.grad = np.ones(2, np.float16)
        trainer.step(devices)
        assert (one.list_data()[-1] == 8).all()


@pytest.mark.parametrize("options", [{"kvstore": None}, {"kvstore": "local", "update_on_kvstore": True}], ids=str)
def test_a_rule_of_ones_own_comes_from_any_module_of_this_process(options: dict[str, object]) -> None:
    one = Parameter(np.zeros(2), np.array([3.0, -3.0]), name="x")
    trainer = Trainer([one], "rules_of_users:Sign", {"learning_rate": 0.5}, **options)  # type: ignore[arg-type]
    trainer.step(1)
    assert list(one.data) == [-0.5, 0.5]


def test_an_update_of_gradients_that_were_not_summed_is_refused() -> None:
    """There each device, and each worker, went its own way without a word."""
    one = zeros_on(2)
    trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore="device", update_on_kvstore=False)
    with pytest.raises(KVError, match="not summed yet; call allreduce_grads first"):
        trainer.update(1)
    assert not one.data.any()


@pytest.mark.parametrize("store", [None, "local", "device"])
def test_wrong_compression_is_refused_also_where_nothing_is_sent(store: str | None) -> None:
    weight = Parameter(np.zeros(2), np.zeros(2))
    with pytest.raises(KVError, match="unknown compression type '3bit'"):
        Trainer([weight], "sgd", kvstore=store, compression_params={"type": "3bit"})
    Trainer([weight], "sgd", kvstore=store, compression_params={"type": "2bit"}).close()


def test_parameters_of_the_rule_that_are_no_dictionary_are_refused() -> None:
    for wrong in ([("learning_rate", 0.1)], {0.1: "learning_rate"}):
        with pytest.raises(KVError, match="optimizer_params is a dictionary such as"):
            Trainer([zeros_on(1)], "sgd", wrong, kvstore=None)  # type: ignore[arg-type]


def test_a_step_of_parameters_that_are_all_frozen_is_refused() -> None:
    class Frozen:
        requires_grad, grad, dtype = False, None, "torch.float32"

        def __init__(self) -> None:
            self.array = ones(2)

        def detach(self) -> Frozen:
            return self

        cpu = detach

        def numpy(self) -> np.ndarray:
            return self.array

    with pytest.raises(KVError, match="none of the 1 parameters is trained: requires_grad is False"):
        Trainer([Frozen()], "sgd", kvstore=None).step(1)


def test_sums_are_not_written_into_one_array_for_two_parameters() -> None:
    first, second = (Parameter([ones(2), ones(2)], name=name) for name in "ab")
    trainer = Trainer([first, second], "sgd", kvstore="local", update_on_kvstore=False)
    grads = [ones(2), ones(2)]
    first.grad, second.grad = grads, [ones(2), grads[1]]
    with pytest.raises(KVError, match="parameters 'a' and 'b' have the same array for their gradients"):
        trainer.step(1)
    first.grad, second.grad = ones(2), ones(2)  # one for all devices is right
    trainer.step(2)


def test_parameters_to_assign_are_a_list() -> None:
    trainer = Trainer([zeros_on(1)], "sgd", kvstore=None)
    for wrong in ("x", trainer.params[0], 0):
        with pytest.raises(KVError, match="assign takes a list of parameters, such as"):
            trainer.assign(wrong)  # type: ignore[arg-type]


def test_a_store_has_one_trainer() -> None:
    """Its keys are the parameters' indices: another trainer's would be the same."""
    with kvstore.create("local") as kv:
        first = Trainer([zeros_on(1)], "sgd", HALF, kvstore=kv)
        for _ in range(2):
            with pytest.raises(KVError, match=r"has the parameters of another trainer already.* make another store"):
                Trainer([zeros_on(1)], "adam", kvstore=kv)
            first.close()


@pytest.mark.parametrize(("name", "said"), [("x", r" \(key 0 is parameter 'x'\)$"), ("", "key off$")])
def test_an_error_about_keys_names_the_parameters(name: str, said: str) -> None:
    one = zeros_on(2)
    one.name = name
    compression = {"type": "2bit", "threshold": 0.5, "min_size": 0}
    trainer = Trainer([one], "sgd", kvstore="device", compression_params=compression)
    one.grad = np.full(SHAPE, np.nan, np.float32)
    with pytest.raises(KVError, match="key 0: .*element 0 is nan.*" + said):
        trainer.step(1)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_key_of_ones_own_is_refused_in_a_store_whose_rule_updates_weights(order: str) -> None:
    """A metric that was pushed there became a gradient: 1 + 2 read -0.3."""
    with kvstore.create("local") as kv:
        if order == "before":
            metric = np.zeros(1)
            kv.init(100, metric)
            with pytest.raises(KVError, match=r"key 100: .* would update it; fix: .*kvstore.create\('local'\)"):
                Trainer([zeros_on(1)], "sgd", HALF, kvstore=kv)
            kv.pushpull(100, np.full(1, 3.0), out=metric)
            assert metric == [3], "no rule is in place"
            return
        trainer = Trainer([zeros_on(1)], "sgd", HALF, kvstore=kv, update_on_kvstore=True)
        for _ in range(2):
            with pytest.raises(KVError, match=r"key 100: .* would update it; fix: .*kvstore.create\('local'\)"):
                kv.init(100, np.zeros(1))
            trainer.close()


def test_a_store_whose_trainer_could_not_be_made_takes_keys() -> None:
    with kvstore.create("local") as kv:
        kv.set_optimizer("test")
        with pytest.raises(KVError, match="not sgd"):
            Trainer([zeros_on(1)], "sgd", HALF, kvstore=kv, update_on_kvstore=True)
        kv.init(100, np.zeros(1))
        kv.init(101, np.zeros(1))


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_torch_sgd_under_a_changing_rate_gives_what_torch_gives(update_on_kvstore: bool) -> None:
    """`sgd` is MXNet's: its momentum keeps the old rate, so that the two differ after a change."""
    found = {}
    for rule in ("torch_sgd", "sgd"):
        one = Parameter(np.zeros(1), np.ones(1))
        with kvstore.create("local") as kv:
            trainer = Trainer([one], rule, {"momentum": 0.9}, kvstore=kv, update_on_kvstore=update_on_kvstore)
            for rate in (1.0, 1.0, 0.1, 0.1):
                trainer.set_learning_rate(rate)
                trainer.step(1)
            found[rule] = float(one.data[0])
    w = v = 0.0
    for rate in (1.0, 1.0, 0.1, 0.1):
        v = 0.9 * v + 1
        w -= rate * v
    assert found["torch_sgd"] == pytest.approx(w, rel=1e-12)
    assert found["sgd"] < w - 1


def test_gradients_of_whole_numbers_are_not_divided() -> None:
    whole = Parameter([np.zeros(SHAPE, np.int64)], [np.ones(SHAPE, np.int64)], name="count")
    with (
        Trainer([whole], "test", kvstore=None) as trainer,
        pytest.raises(KVError, match=r"parameter 'count': int64 gradients are taken with scale 1, not 0\.25"),
    ):
        trainer.step(4)
