"""States of a trainer in one file."""

from __future__ import annotations

import errno
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from linear import Linear, examples

from distrun_runtime.arrays.dtypes import BFLOAT16, narrow
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.trainer import Parameter, Trainer

X, Y = examples(60)


def train(trainer: Trainer, model: Linear, first: int, last: int) -> None:
    for start in range(first, last, 10):
        model.backward(X[start : start + 10], Y[start : start + 10])
        trainer.step(10)


@pytest.mark.parametrize("name", sorted(set(rules.RULES) - {"test"}))
def test_a_training_goes_on_in_another_process_as_if_it_had_not_stopped(tmp_path: Path, name: str) -> None:
    options = {"learning_rate": 0.01}
    whole, half, rest = Linear(), Linear(), Linear(seed=99)
    train(Trainer(whole.params, name, options, kvstore=None), whole, 0, 60)
    first = Trainer(half.params, name, options, kvstore=None)
    train(first, half, 0, 30)
    first.save_states(tmp_path / "states")
    second = Trainer(rest.params, name, {"learning_rate": 5.0}, kvstore=None)
    second.load_states(str(tmp_path / "states"))
    assert second.learning_rate == 0.01
    train(second, rest, 30, 60)
    for got, expected in zip(rest.weights, whole.weights, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_every_device_gets_the_weights_and_devices_may_be_more(tmp_path: Path) -> None:
    one, two = Linear(1), Linear(2)
    Trainer(one.params, "sgd", kvstore=None).save_states(tmp_path / "states")
    Trainer(two.params, "sgd", kvstore="local", update_on_kvstore=False).load_states(tmp_path / "states")
    assert [list(x.ravel()) for x in two.weights] == [list(x.ravel()) for x in one.weights for _ in range(2)]


def test_devices_that_train_alone_have_states_of_their_own(tmp_path: Path) -> None:
    def parameter() -> Parameter:
        return Parameter([np.zeros(2), np.zeros(2)], [np.ones(2), 2 * np.ones(2)], name="x")

    options = {"learning_rate": 1.0, "momentum": 0.5}
    saved, loaded = parameter(), parameter()
    first = Trainer([saved], "sgd", options, kvstore=None)
    first.step(1)
    first.save_states(tmp_path / "states")
    first.step(1)
    second = Trainer([loaded], "sgd", options, kvstore=None)
    second.load_states(tmp_path / "states")
    second.step(1)
    assert [list(x) for x in loaded.list_data()] == [list(x) for x in saved.list_data()] == [[-2.5] * 2, [-5] * 2]


def test_bfloat16_weights_and_their_masters_are_kept(tmp_path: Path) -> None:
    half = Parameter(narrow(np.ones(2, np.float32), BFLOAT16), name="x")
    first = Trainer([half], "sgd", {"learning_rate": 1e-3, "multi_precision": True}, kvstore=None)
    for _ in range(3):
        half.grad = narrow(np.ones(2, np.float32), BFLOAT16)
        first.step(1)
    first.save_states(tmp_path / "states")
    with np.load(tmp_path / "states", allow_pickle=False) as file:
        assert file["0.0.weight"].dtype == np.uint16
        np.testing.assert_allclose(file["0.0.state.master"], 0.997, rtol=1e-6)
    other = Parameter(narrow(np.zeros(2, np.float32), BFLOAT16), name="x")
    Trainer([other], "sgd", kvstore=None).load_states(tmp_path / "states")
    assert (other.data == half.data).all()


def test_the_file_is_numpys_with_a_manifest_in_json(tmp_path: Path) -> None:
    one = Parameter(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32), name="w")
    trainer = Trainer([one], "sgd", {"learning_rate": 0.5, "momentum": 0.9}, kvstore=None)
    trainer.step(1)
    trainer.save_states(tmp_path / "states")
    with np.load(tmp_path / "states", allow_pickle=False) as file:
        manifest = json.loads(file["manifest"].tobytes())
        assert sorted(file.files) == ["0.0.state.momentum", "0.0.weight", "manifest"]
    assert manifest["format"] == 1
    assert manifest["steps"] == 1
    assert manifest["rule"]["params"]["learning_rate"] == 0.5
    assert manifest["parameters"] == [
        {"name": "w", "shape": [2, 3], "dtype": "float32", "devices": [{"updates": 1}]},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["states"]


def test_states_of_other_parameters_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    Trainer([Parameter(np.zeros(2), name="w")], "sgd", {"learning_rate": 9.0}, kvstore=None).save_states(tmp_path / "s")
    for params, said in (
        ([Parameter(np.ones(2), name="v")], "parameter 'v' has there .*'w'.*, here .*'v'"),
        ([Parameter(np.ones(3), name="w")], r"there .*\[2\].*, here .*\[3\]"),
        ([Parameter(np.ones(2, np.float32), name="w")], "there .*float64.*, here .*float32"),
        ([Parameter(np.ones(2), name="w"), Parameter(np.ones(2), name="v")], "of 1 parameters, the trainer has 2"),
    ):
        trainer = Trainer(params, "sgd", kvstore=None)
        with pytest.raises(KVError, match=said):
            trainer.load_states(tmp_path / "s")
        assert (params[0].data == 1).all()
        assert trainer.learning_rate == 0.01


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\x03\x04 cut off"])
def test_what_is_no_states_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(KVError, match="does not hold complete states of a trainer") as caught:
        Trainer([Parameter(np.zeros(2))], "sgd", kvstore=None).load_states(tmp_path / "s")
    assert "pickle" not in str(caught.value), "numpy's advice"


def test_a_file_of_a_later_format_is_refused(tmp_path: Path) -> None:
    text = np.frombuffer(json.dumps({"format": 2, "parameters": []}).encode(), np.uint8)
    np.savez(tmp_path / "s.npz", manifest=text)
    with pytest.raises(KVError, match="has format 2, this version reads 1"):
        Trainer([Parameter(np.zeros(2))], "sgd", kvstore=None).load_states(tmp_path / "s.npz")


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trainer([Parameter(np.zeros(2))], "sgd", kvstore=None).load_states(tmp_path / "s")


def test_states_of_another_rule_are_refused_as_a_store_does(tmp_path: Path) -> None:
    Trainer([Parameter(np.zeros(2), name="w")], "sgd", kvstore=None).save_states(tmp_path / "s")
    trainer = Trainer([Parameter(np.ones(2), name="w")], "adam", kvstore=None)
    with pytest.raises(KVError, match="were saved under the rule 'sgd', the trainer has 'adam'"):
        trainer.load_states(tmp_path / "s")
    assert trainer.optimizer == "adam"
    assert (trainer.params[0].data == 1).all()


def test_a_folder_is_of_a_trainer_whose_store_updates_and_a_file_is_not(tmp_path: Path) -> None:
    def trainer(updates: bool) -> Trainer:
        return Trainer([Parameter(np.zeros(2), name="w")], "sgd", kvstore="local", update_on_kvstore=updates)

    trainer(True).save_states(tmp_path / "folder")
    trainer(False).save_states(tmp_path / "file")
    with pytest.raises(KVError, match=r"folder is a folder, .* this trainer updates by itself"):
        trainer(False).load_states(tmp_path / "folder")
    with pytest.raises(KVError, match=r"folder is a folder, .* this trainer updates by itself"):
        trainer(False).save_states(tmp_path / "folder")
    with pytest.raises(KVError, match=r"file is a file, .* the store of this trainer updates"):
        trainer(True).load_states(tmp_path / "file")
    with pytest.raises(KVError, match=r"file is a file, .* the store of this trainer updates"):
        trainer(True).save_states(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_place_that_is_not_there_is_named_as_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "states"
    with pytest.raises(FileNotFoundError) as caught:
        Trainer([Parameter(np.zeros(2))], "sgd", kvstore=None).save_states(path)
    assert caught.value.filename == str(path)


def test_workers_of_one_host_may_save_into_one_file_at_the_same_time(tmp_path: Path) -> None:
    trainers = [Trainer([Parameter(np.zeros(1000), np.ones(1000))], "sgd", kvstore=None) for _ in range(4)]
    path = tmp_path / "states.npz"

    def save(trainer: Trainer) -> None:
        for _ in range(20):
            trainer.save_states(path)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, trainers))
    trainers[0].load_states(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = Trainer([Parameter(np.zeros(2), np.ones(2))], "sgd", kvstore=None)
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match=r"No space left on device: .*states"):
        trainer.save_states(tmp_path / "states")
    assert list(tmp_path.iterdir()) == []


def test_a_file_whose_rule_or_weights_are_none_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    data = np.zeros(2)
    trainer = Trainer([Parameter(data, np.ones(2), name="w")], "sgd", kvstore=None)
    path = tmp_path / "states.npz"
    trainer.save_states(path)
    with np.load(path) as file:
        saved = dict(file)
    manifest = json.loads(saved["manifest"].tobytes())
    manifest["rule"]["name"] = "nothing"
    no_rule = {**saved, "manifest": np.frombuffer(json.dumps(manifest).encode(), np.uint8), "0.0.weight": np.ones(2)}
    for wrong in (no_rule, {**saved, "0.0.weight": np.ones(1)}, {**saved, "0.0.weight": np.ones(2, np.float32)}):
        np.savez(path, **wrong)
        with pytest.raises(KVError):
            trainer.load_states(path)
        assert not data.any()
