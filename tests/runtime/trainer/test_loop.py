"""fit: the loop around a trainer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
from cluster import Cluster
from linear import RATE, Linear, examples, trained
from peers import python_of
from slowness import scaled

from distrun_runtime import kvstore
from distrun_runtime.data import epoch_size
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.trainer import Parameter, Trainer, fit

UPDATES = pytest.mark.parametrize("update_on_kvstore", [True, False])


def cut(x: np.ndarray, y: np.ndarray, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(x[start : start + size], y[start : start + size]) for start in range(0, len(x), size)]


def test_alone_it_is_the_plain_loop_with_a_short_last_batch() -> None:
    batches = cut(*examples(50), 16)
    model = Linear()
    with fit(lambda batch: model.backward(*batch), model.params, batches, "local", "sgd", RATE, epochs=3) as trainer:
        assert trainer.kvstore is None
    for got, expected in zip(model.weights, trained(batches * 3), strict=True):
        np.testing.assert_array_equal(got, expected)


@UPDATES
def test_two_lines_more_and_it_is_the_same_training_on_many_machines(update_on_kvstore: bool) -> None:
    x, y = examples(48)

    def script(kv: KVStore) -> list[np.ndarray]:
        model = Linear(seed=3 + kv.rank)
        mine = [(bx[kv.rank :: 2], by[kv.rank :: 2]) for bx, by in cut(x, y, 16)]

        def step(batch: tuple[np.ndarray, np.ndarray]) -> None:
            model.backward(*batch)

        fit(step, model.params, mine, kv, "sgd", RATE, epochs=2, update_on_kvstore=update_on_kvstore)
        return model.weights

    with Cluster(2, over="inproc") as job:
        results = job.run(script)
    for weights in results:
        for got, expected in zip(weights, trained(cut(x, y, 16) * 2), strict=True):
            # float64; only the order of additions differs
            np.testing.assert_allclose(got, expected, rtol=1e-11)


class Counted:
    """Data of some batches that notes how often it was started, and which batches were taken."""

    def __init__(self, count: int) -> None:
        self.count, self.starts = count, 0

    def __iter__(self) -> Iterator[np.ndarray]:
        self.starts += 1
        for number in range(self.count):
            yield np.full(1, number)


def taken(data: Counted, **options: object) -> list[list[int]]:
    """Return the batches of each epoch."""
    epochs: list[list[int]] = [[]]
    one = Parameter(np.zeros(1))

    def step(batch: np.ndarray) -> None:
        epochs[-1].append(int(batch[0]))
        one.grad = np.zeros(1)

    fit(step, [one], data, after_epoch=lambda *_: epochs.append([]), **options)  # type: ignore[arg-type]
    return epochs[:-1]


def test_an_epoch_is_exactly_epoch_size_batches_and_data_starts_again_when_exhausted() -> None:
    data = Counted(3)
    assert taken(data, epochs=2, epoch_size=5) == [[0, 1, 2, 0, 1], [2, 0, 1, 2, 0]]
    assert data.starts == 4


def test_data_that_is_not_exhausted_goes_on_in_the_next_epoch() -> None:
    data = Counted(5)
    assert taken(data, epochs=3, epoch_size=2) == [[0, 1], [2, 3], [4, 0]]
    assert data.starts == 2


def test_without_epoch_size_an_epoch_is_one_iteration() -> None:
    data = Counted(3)
    assert taken(data, epochs=2) == [[0, 1, 2]] * 2


def test_data_that_cannot_start_again_is_refused_before_training() -> None:
    with pytest.raises(KVError, match="2 epochs need data that can be iterated again, not a generator"):
        taken((batch for batch in Counted(3)), epochs=2)  # type: ignore[arg-type]
    assert taken((batch for batch in Counted(3)), epochs=1) == [[0, 1, 2]]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gives no batch when it is started"):
        taken((batch for batch in Counted(3)), epochs=2, epoch_size=2)  # type: ignore[arg-type]


@UPDATES
@pytest.mark.parametrize("type_name", ["dist_sync", "dist_device_sync"])
def test_unequal_data_ends_cleanly_and_alike(type_name: str, update_on_kvstore: bool) -> None:
    """Rank r has r + 1 batches; nobody says epoch_size."""

    def script(kv: KVStore) -> tuple[float, int]:
        one = Parameter(np.zeros(1), name="x")
        steps = []

        def step(batch: np.ndarray) -> None:
            steps.append(batch)
            one.grad = np.ones(1)

        data = Counted(kv.rank + 1)
        options = {"learning_rate": 1.0, "momentum": 0.5}
        fit(step, [one], data, kv, "sgd", options, epochs=2, update_on_kvstore=update_on_kvstore)
        return float(one.data[0]), len(steps)

    with Cluster(2, over="inproc") as job:
        weights, steps = zip(*job.run(script, type_name), strict=True)
    expected = momentum = 0.0
    for grad in (1.0, 0.5, 1.0, 0.5):
        momentum = 0.5 * momentum - grad
        expected += momentum
    assert weights == (expected, expected)
    assert steps == (2, 4)


def test_workers_with_epoch_size_make_equally_many_steps() -> None:
    def script(kv: KVStore) -> int:
        one = Parameter(np.zeros(1), name="x")
        steps = []

        def step(batch: np.ndarray) -> None:
            steps.append(batch)
            one.grad = np.ones(1)

        fit(step, [one], Counted(2 + kv.rank), kv, epoch_size=epoch_size(6, 1, kv.num_workers), epochs=2)
        return len(steps)

    with Cluster(2, over="inproc") as job:
        assert job.run(script) == [6, 6]


def test_in_dist_async_gradients_are_divided_by_the_batch_of_one_worker() -> None:
    def script(kv: KVStore) -> float:
        one = Parameter(np.zeros(1), name="x")

        def step(batch: np.ndarray) -> None:
            one.grad = np.ones(1)

        fit(step, [one], [np.zeros(4)] * (kv.rank + 1), kv, "sgd", {"learning_rate": 1.0})
        return float(one.data[0])

    with Cluster(2, over="inproc") as job:
        assert job.run(script, "dist_async") == [-0.75, -0.75]


def test_after_every_epoch_the_callback_gets_its_number_and_the_trainer() -> None:
    seen = []
    one = Parameter(np.zeros(1), np.zeros(1))

    def note(epoch: int, trainer: Trainer) -> None:
        seen.append((epoch, trainer.learning_rate))
        trainer.set_learning_rate(trainer.learning_rate / 2)

    fit(lambda batch: None, [one], Counted(1), optimizer_params={"learning_rate": 1.0}, epochs=3, after_epoch=note)
    assert seen == [(0, 1.0), (1, 0.5), (2, 0.25)]


def test_gradients_of_the_batch_before_are_taken_away() -> None:
    one = Parameter(np.zeros(1), np.zeros(1))

    def add(batch: np.ndarray) -> None:
        one.list_grad()[0][...] += 1

    fit(add, [one], [np.zeros(1)] * 3, optimizer_params={"learning_rate": 1.0})
    assert one.data[0] == -3


def test_an_error_of_the_step_closes_the_store_that_fit_made() -> None:
    one = Parameter([np.zeros(1), np.zeros(1)])

    def step(batch: np.ndarray) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(step, [one], [np.zeros(1)], kvstore="local")
    with kvstore.create("local") as kv:
        with pytest.raises(ZeroDivisionError):
            fit(step, [one], [np.zeros(1)], kvstore=kv)
        kv.barrier()


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (np.zeros((5, 2)), 5),
        ((np.zeros((5, 2)), np.zeros(5)), 5),
        ([[np.zeros((5, 2))], 3], 5),
        ({"data": np.zeros((5, 2)), "label": 1}, 5),
        ([1, 2, 3], 3),
        ("abc", 3),
    ],
)
def test_the_size_of_a_batch_is_the_length_of_its_first_part(batch: object, size: int) -> None:
    one = Parameter(np.zeros(1), np.ones(1))

    def step(_: object) -> None:
        one.list_grad()[0][...] = 1

    fit(step, [one], [batch], optimizer_params={"learning_rate": 1.0})
    assert one.data[0] == -1 / size


def test_a_batch_without_a_length_needs_a_batch_size() -> None:
    one = Parameter(np.zeros(1), np.zeros(1))

    def step(batch: int) -> None:
        one.grad = np.ones(1)

    with pytest.raises(KVError, match="a batch of type int has no length; give batch_size"):
        fit(step, [one], [3])
    fit(step, [one], [3], batch_size=4, optimizer_params={"learning_rate": 1.0})
    assert one.data[0] == -0.25


@pytest.mark.parametrize("store", ["local", None])
def test_data_without_a_batch_is_an_error_where_nobody_else_has_one(store: str | None) -> None:
    one = Parameter(np.zeros(1), np.zeros(1))
    with pytest.raises(KVError, match="the data, a list, gave no batch in epoch 0"):
        fit(lambda batch: None, [one], [], store)
    Trainer([one], "sgd", kvstore=None)  # it belongs to no trainer


def test_a_worker_without_any_batch_ends_as_the_others_do() -> None:
    def script(kv: KVStore) -> float:
        one = Parameter(np.zeros(1), name="x")

        def step(batch: np.ndarray) -> None:
            one.grad = np.ones(1)

        fit(step, [one], [np.zeros(1)] * 2 if kv.rank else [], kv, "sgd", {"learning_rate": 1.0}, epochs=2)
        return float(one.data[0])

    with Cluster(2, over="inproc") as job:
        assert job.run(script) == [-2.0, -2.0]


def test_a_step_that_cannot_be_called_is_refused_before_anything_is_made() -> None:
    with pytest.raises(KVError, match="step is a function of a batch, not None"):
        fit(None, [Parameter(np.zeros(2))], [1])  # type: ignore[arg-type]


def test_epochs_that_are_no_number_from_0_are_refused_before_anything_is_made() -> None:
    for wrong, error, message in [
        (-1, KVError, "epochs is a number from 0, not -1"),
        ("2", TypeError, "epochs is a whole number, not '2'"),
    ]:
        with pytest.raises(error, match=message):
            fit(lambda batch: None, [Parameter(np.zeros(2))], [1], epochs=wrong)  # type: ignore[arg-type]


# --- programs of MXNet's Module and FeedForward

MODULES = """\
import json, sys
import mxnet as mx
import numpy as np

given = json.load(sys.stdin)
x, y, weight, bias = (np.array(given[name], "float32") for name in ("x", "y", "fc_weight", "fc_bias"))
out = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name="fc")
net = mx.sym.LinearRegressionOutput(out, mx.sym.Variable("label"), name="lin")
more = {"num_epoch": 3, "optimizer": "sgd"}
found = {}


def data():
    return mx.io.NDArrayIter(x, y, batch_size=4, label_name="label")


def first():
    return {"fc_weight": mx.nd.array(weight), "fc_bias": mx.nd.array(bias)}


for kind in ("local", None):
    one = mx.mod.Module(net, data_names=["data"], label_names=["label"])
    rule = tuple(given["rule"].items())
    one.fit(data(), arg_params=first(), optimizer_params=rule, kvstore=kind, eval_metric="mse", **more)
    found["Module, %s" % kind] = one.get_params()[0]
other = mx.model.FeedForward(net, arg_params=first(), **more, **given["rule"])
other.fit(data(), eval_metric="mse")
found["FeedForward"] = other.arg_params
lists = {how: {name: each.asnumpy().tolist() for name, each in its.items()} for how, its in found.items()}
json.dump(lists, sys.stdout)
"""

NAMES = {0: "fc_bias", 1: "fc_weight"}


@pytest.mark.peers
def test_module_and_feedforward_programs_train_as_in_mxnet_when_the_names_are_given() -> None:
    """MXNet applies no weight decay to parameters whose names do not end in _weight or _gamma."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(8, 2)).astype("f4"), random.normal(size=(8, 1)).astype("f4")
    first = {"fc_weight": np.array([[0.5, -1]], "f4"), "fc_bias": np.array([3], "f4")}
    rule = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.1}
    given = {"x": x, "y": y, **first}
    text = json.dumps({"rule": rule, **{name: value.tolist() for name, value in given.items()}})
    done = subprocess.run(
        [python_of("mxnet"), "-c", MODULES],
        input=text,
        capture_output=True,
        text=True,
        timeout=scaled(100),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout[done.stdout.index("{") :])

    for kind in ("local", None):
        params = {name: Parameter(value.copy()) for name, value in first.items()}

        def backward(batch: tuple[np.ndarray, np.ndarray], params: dict[str, Parameter] = params) -> None:
            data, label = batch
            error = data @ params["fc_weight"].data.T + params["fc_bias"].data - label
            params["fc_weight"].grad, params["fc_bias"].grad = error.T @ data, error.sum(0)

        batches = [(x[:4], y[:4]), (x[4:], y[4:])]
        fit(backward, params, batches, kind, "sgd", {**rule, "param_idx2name": NAMES}, epochs=3)
        for how, weights in theirs.items():
            for name, right in weights.items():
                np.testing.assert_allclose(params[name].data, right, rtol=1e-5, err_msg=how)


@pytest.mark.parametrize("kind", ["local", None])
def test_names_of_parameters_decide_on_weight_decay_as_mxnets_do(kind: str | None) -> None:
    names = ["fc_weight", "fc_bias", "bn_gamma", "bn_beta", "other"]
    params = [Parameter(np.ones(1), np.zeros(1), name=name) for name in names]
    params[3].wd_mult = 0.5  # a multiplier that was set counts, as __wd_mult__ does
    rule = {"learning_rate": 1.0, "wd": 0.5, "param_idx2name": dict(enumerate(names))}
    fit(lambda batch: None, params, [np.ones(1)], kind, "sgd", rule, ignore_stale_grad=True).close()
    assert [float(one.data[0]) for one in params] == [0.5, 1, 0.5, 0.75, 1]


def test_parameters_without_names_have_those_of_their_positions() -> None:
    params = [Parameter(np.ones(1), np.zeros(1)) for _ in range(2)]
    rule = {"learning_rate": 1.0, "wd": 0.5, "param_idx2name": {0: "fc_bias", 1: "fc_weight"}}
    fit(lambda batch: None, params, [np.ones(1)], None, "sgd", rule).close()
    assert [float(one.data[0]) for one in params] == [1, 0.5]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({0: "x_bias", 7: "y_bias"}, "param_idx2name: the trainer has no parameter 7, nor one with the name 'y_bias'"),
        ({0: 5}, "param_idx2name is a dictionary from keys to names"),
        (["x_bias"], "param_idx2name is a dictionary from keys to names"),
    ],
)
def test_names_that_no_parameter_has_are_refused(given: object, said: str) -> None:
    with pytest.raises(KVError, match=said):
        Trainer([Parameter(np.ones(1))], "sgd", {"wd": 0.5, "param_idx2name": given}, kvstore=None)
