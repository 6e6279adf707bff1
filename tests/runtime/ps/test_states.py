"""What servers write of their slots is what others get back, however the values are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrun_runtime.arrays import dtypes
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops import partition
from distrun_runtime.ps import states
from distrun_runtime.ps.shelf import Shelf
from distrun_runtime.ps.work import SlotId

Shelves = dict[SlotId, Shelf]

SIZES = {0: 1000, 1: 7, 2: 64}
"""Elements of each key."""


def cut(servers: int, values: dict[int, Any], bound: int = 50) -> list[Shelves]:
    """Return the shelves of each server that holds its part of the values."""
    shelves: list[Shelves] = [{} for _ in range(servers)]
    for number, value in values.items():
        found = partition.shards(number, value.size, servers, bound)
        for piece in partition.pieces(found, value.itemsize, 400):
            part = value[piece.offset : piece.end].copy()
            shelves[piece.server][SlotId(1, number, piece.offset)] = Shelf(part)
    return shelves


def values(dtype: Any = np.float32) -> dict[int, Any]:
    generator = np.random.default_rng(5)
    found = {number: generator.standard_normal(size).astype(np.float32) for number, size in SIZES.items()}
    return {number: dtypes.narrow(value, dtype) for number, value in found.items()}


def trained(shelves: list[Shelves], rule: rules.Rule, steps: int = 3) -> None:
    """Update each slot some times with a gradient that is its own weight."""
    for shelf in (shelf for each in shelves for shelf in each.values()):
        shelf.state = rule.new_state(shelf.weight)
        for _ in range(steps):
            rule.step(shelf.weight, shelf.weight.copy(), shelf.state)


def save(folder: Path, shelves: list[Shelves], part: str = "data-1") -> dict[str, Any]:
    """Have every server write its file; return the manifest."""
    files = {}
    for rank, each in enumerate(shelves):
        names = [[number, "key %d" % number] for number in SIZES]
        body = {"folder": str(folder), "part": part, "names": names, "file": "server-%d.npz" % rank, "host": "d1"}
        facts = states.save(body, each)
        files[facts["file"]] = facts["holds"]
    return {"data": part, "files": files}


def stage(folder: Path, shelves: Shelves, manifest: dict[str, Any], rule: rules.Rule | None = None) -> None:
    numbers = [[number, number, "key %d" % number] for number in SIZES]
    states.stage({"folder": str(folder), "manifest": manifest, "host": "d2", "numbers": numbers}, shelves, rule)


def load(folder: Path, shelves: list[Shelves], manifest: dict[str, Any], rule: rules.Rule | None = None) -> None:
    for each in shelves:
        stage(folder, each, manifest, rule)
    for each in shelves:
        states.commit(each)


def whole(shelves: list[Shelves], number: int, name: str = "") -> Any:
    """Return a key's value, or its state `name`, put together."""
    pieces = sorted((slot.offset, shelf) for each in shelves for slot, shelf in each.items() if slot.key == number)
    return np.concatenate([(shelf.state or {})[name] if name else shelf.weight for _, shelf in pieces])


def test_a_save_of_two_servers_is_loaded_by_any_number(tmp_path: Path) -> None:
    rule = rules.make("adam", {})
    source = cut(2, values())
    trained(source, rule)
    manifest = save(tmp_path, source)
    for servers in (1, 2, 3, 5):
        target = cut(servers, {number: np.zeros(size, np.float32) for number, size in SIZES.items()})
        load(tmp_path, target, manifest, rule)
        for number in SIZES:
            assert np.array_equal(whole(target, number), whole(source, number))
            arrays = [name for name, value in next(iter(source[0].values())).state.items() if hasattr(value, "shape")]
            assert len(arrays) >= 2
            for name in arrays:
                assert np.array_equal(whole(target, number, name), whole(source, number, name)), (servers, name)


@pytest.mark.parametrize("name", sorted(set(rules.RULES) - {"lamb", "lars"}))
def test_training_goes_on_as_if_nothing_had_been_saved(tmp_path: Path, name: str) -> None:
    """Counters go on too: adam's correction of its means depends on its count."""
    rule = rules.make(name, {"momentum": 0.9} if name in ("sgd", "nag", "dcasgd") else {})
    source = cut(2, values())
    trained(source, rule)
    manifest = save(tmp_path, source)
    target = cut(3, values())
    load(tmp_path, target, manifest, rule)
    for slot, shelf in (pair for each in [*source, *target] for pair in each.items()):
        knobs = rules.Knobs(key=shelf.key, offset=slot.offset)
        rule.step(shelf.weight, np.ones_like(shelf.weight), shelf.state or {}, knobs)
    for number in SIZES:
        assert np.array_equal(whole(target, number), whole(source, number))


@pytest.mark.parametrize("dtype", [np.float16, dtypes.BFLOAT16])
def test_16_bit_weights_and_their_masters_come_back_bit_by_bit(tmp_path: Path, dtype: Any) -> None:
    rule = rules.make("sgd", {"momentum": 0.9, "multi_precision": True})
    source = cut(2, values(dtype))
    trained(source, rule)
    manifest = save(tmp_path, source)
    target = cut(3, {number: np.zeros(size, dtype) for number, size in SIZES.items()})
    load(tmp_path, target, manifest, rule)
    for number in SIZES:
        assert whole(target, number).tobytes() == whole(source, number).tobytes()
        assert whole(target, number).dtype == dtype
        assert np.array_equal(whole(target, number, "master"), whole(source, number, "master"))


def test_what_was_never_updated_has_no_state_afterwards(tmp_path: Path) -> None:
    rule = rules.make("sgd", {"momentum": 0.9})
    manifest = save(tmp_path, cut(2, values()))
    target = cut(3, values())
    trained(target, rule)
    load(tmp_path, target, manifest, rule)
    assert all(shelf.state is None for each in target for shelf in each.values())


def test_a_slot_of_updated_and_never_updated_pieces_starts_anew_where_nothing_was(tmp_path: Path) -> None:
    rule = rules.make("sgd", {"momentum": 0.9, "multi_precision": True})
    source = cut(2, values(np.float16))
    trained(source[:1], rule)
    manifest = save(tmp_path, source)
    target: list[Shelves] = [{SlotId(1, 0, 0): Shelf(np.zeros(1000, np.float16))}]
    load(tmp_path, target, manifest, rule)
    master = whole(target, 0, "master")
    assert np.array_equal(master.astype(np.float16), whole(target, 0)), "the master of new elements is their weight"
    assert whole(target, 0, "momentum").any()


def test_a_rule_that_knows_less_takes_what_it_knows(tmp_path: Path) -> None:
    source = cut(2, values())
    trained(source, rules.make("sgd", {"momentum": 0.9}))
    manifest = save(tmp_path, source)
    target = cut(2, values())
    load(tmp_path, target, manifest, rules.make("sgd", {}))
    assert "momentum" not in (next(iter(target[0].values())).state or {})


def test_residuals_of_answers_come_back(tmp_path: Path) -> None:
    source = cut(2, values())
    for shelf in source[0].values():
        shelf.residual = np.full(len(shelf.weight), 0.25, np.float32)
    target = cut(1, values())
    load(tmp_path, target, save(tmp_path, source))
    whole_residual = np.concatenate([s.residual for _, s in sorted(target[0].items()) if s.residual is not None])
    assert set(np.unique(whole_residual)) == {0.0, 0.25}


def test_slots_of_keys_that_nobody_knows_any_more_are_neither_saved_nor_loaded(tmp_path: Path) -> None:
    """An init that failed halfway leaves such slots."""
    source = cut(1, values())
    source[0][SlotId(1, 9, 0)] = Shelf(np.ones(3, np.float32))
    manifest = save(tmp_path, source)
    assert not any(number == 9 for number, _, _ in manifest["files"]["server-0.npz"]["pieces"])
    load(tmp_path, source, manifest)
    assert source[0][SlotId(1, 9, 0)].weight.sum() == 3


def test_what_is_lent_to_a_reply_is_not_written(tmp_path: Path) -> None:
    source = cut(1, values())
    manifest = save(tmp_path, source)
    target = cut(1, {number: np.zeros(size, np.float32) for number, size in SIZES.items()})
    lent = target[0][SlotId(1, 1, 0)].weight
    load(tmp_path, target, manifest)
    assert not lent.any()


def test_a_server_without_slots_writes_a_file_that_says_so(tmp_path: Path) -> None:
    manifest = save(tmp_path, [{}])
    assert manifest["files"]["server-0.npz"]["pieces"] == []
    assert (tmp_path / "data-1" / "server-0.npz").exists()


# What goes wrong


def before(shelves: Shelves) -> dict[SlotId, bytes]:
    return {slot: shelf.weight.tobytes() for slot, shelf in shelves.items()}


def test_a_torn_file_changes_nothing_and_names_file_and_host(tmp_path: Path) -> None:
    manifest = save(tmp_path, cut(2, values()))
    path = tmp_path / "data-1" / "server-1.npz"
    path.write_bytes(path.read_bytes()[:-1])
    target = cut(1, {number: np.zeros(size, np.float32) for number, size in SIZES.items()})[0]
    held = before(target)
    with pytest.raises(KVError, match=r"data-1/server-1\.npz on host d2 has \d+ bytes"):
        stage(tmp_path, target, manifest)
    states.commit(target)
    assert before(target) == held


def test_what_was_staged_and_dropped_changes_nothing(tmp_path: Path) -> None:
    manifest = save(tmp_path, cut(2, values()))
    target = cut(1, {number: np.zeros(size, np.float32) for number, size in SIZES.items()})[0]
    held = before(target)
    stage(tmp_path, target, manifest)
    states.drop(target)
    states.commit(target)
    assert before(target) == held


def test_a_missing_file_of_another_server_is_named(tmp_path: Path) -> None:
    manifest = save(tmp_path, cut(2, values()))
    (tmp_path / "data-1" / "server-0.npz").unlink()
    with pytest.raises(KVError, match=r"data-1/server-0\.npz on host d2 is not there"):
        stage(tmp_path, cut(1, values())[0], manifest)


def test_elements_that_no_file_has_are_an_error_that_names_the_key(tmp_path: Path) -> None:
    manifest = save(tmp_path, cut(2, values()))
    manifest["files"].pop("server-1.npz")
    text = r"key 'key 0': elements 500 to 599 are in none of the files of .*data-1 on host d2"
    with pytest.raises(KVError, match=text):
        stage(tmp_path, cut(1, values())[0], manifest)


def test_another_type_or_size_than_the_manifest_says_is_an_error_that_names_file_key_and_host(tmp_path: Path) -> None:
    manifest = save(tmp_path, cut(1, values(np.float16)))
    with pytest.raises(KVError, match="npz on host d2 has key 'key 0' as float16; expected float32"):
        stage(tmp_path, cut(1, values())[0], manifest)
    manifest["files"]["server-0.npz"]["pieces"] = [[0, 0, 1000], [1, 0, 7], [2, 0, 64]]
    with pytest.raises(KVError, match="for key 'key 0' 200 elements of its weight; expected 1000"):
        stage(tmp_path, cut(1, values(np.float16))[0], manifest)


def test_a_users_state_that_is_neither_array_nor_number_is_an_error_that_names_key_and_state(tmp_path: Path) -> None:
    source = cut(1, values())
    source[0][SlotId(1, 1, 0)].state = {"history": [1, 2]}
    with pytest.raises(KVError, match="key 'key 1': the rule's state 'history' is of type list, which cannot be saved"):
        save(tmp_path, source)


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        ({"momentum": 5.0}, "the rule's state 'momentum' is an array, saved was 5.0"),
        ({"momentum": np.full(7, "x")}, "the rule's state 'momentum' is float32, saved was <U1"),
        ({"momentum": np.zeros(7, complex)}, "the rule's state 'momentum' is float32, saved was complex128"),
    ],
)
def test_a_saved_state_of_another_kind_than_the_rules_is_an_error_and_nothing_is_loaded(
    tmp_path: Path, saved: dict[str, Any], text: str
) -> None:
    """A number in the momentum's place was loaded, and the momentum silently gone."""
    source = cut(1, values())
    source[0][SlotId(1, 1, 0)].state = saved
    manifest = save(tmp_path, source)
    target = cut(1, values())
    with pytest.raises(KVError, match="key 'key 1' of the states in .*: " + text):
        stage(tmp_path, target[0], manifest, rules.make("sgd", {"momentum": 0.9}))
    assert all(shelf.staged is None for shelf in target[0].values())


def test_a_rule_that_dislikes_one_of_the_values_leaves_all_as_they_were(tmp_path: Path) -> None:
    class Picky(type(rules.make("sgd", {}))):  # type: ignore[misc]  # the class of a built-in rule
        def new_state(self, weight: Any) -> Any:
            if len(weight) == SIZES[2]:
                raise ValueError("not of this size")
            return super().new_state(weight)

    source = cut(1, values(), bound=10000)
    trained(source, rules.make("sgd", {"momentum": 0.9}))
    manifest = save(tmp_path, source)
    target = cut(1, {number: np.zeros(size, np.float32) for number, size in SIZES.items()}, bound=10000)
    with pytest.raises(ValueError, match="not of this size"):
        load(tmp_path, target, manifest, Picky({"momentum": 0.9}))
    assert not any(shelf.weight.any() or shelf.state or shelf.staged for shelf in target[0].values())
