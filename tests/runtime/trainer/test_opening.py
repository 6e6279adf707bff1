"""Who updates the weights: the whole table."""

from __future__ import annotations

import pytest

from distrun_runtime.errors import KVError
from distrun_runtime.trainer.agreement import BIG, Case, decide, wants_store

NONE, SUMS, UPDATES = (False, False), (True, False), (True, True)


def resolved(**case: object) -> tuple[bool, bool] | str:
    """Return (has a store, it updates), or what is said against it."""
    try:
        made = Case(**case)  # type: ignore[arg-type]
        updates = decide(made)
    except KVError as err:
        return str(err)
    return wants_store(made), updates


@pytest.mark.parametrize("kind", [None, "local", "device"])
@pytest.mark.parametrize("asked", [None, False])
def test_one_device_of_one_machine_has_no_store(kind: str | None, asked: bool | None) -> None:
    assert resolved(kind=kind, asked=asked) == NONE


@pytest.mark.parametrize("asked", [None, False])
def test_no_store_stays_none_on_several_devices(asked: bool | None) -> None:
    assert resolved(kind=None, devices=4, asked=asked) == NONE


def test_an_update_in_no_store_is_refused() -> None:
    assert "needs a store" in str(resolved(kind=None, asked=True))


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_store_is_made_where_the_update_is_asked_to_be_there(kind: str) -> None:
    assert resolved(kind=kind, asked=True) == UPDATES


@pytest.mark.parametrize(
    ("asked", "usual", "expected"),
    [
        (None, True, UPDATES),
        (None, False, SUMS),
        (True, True, UPDATES),
        (True, False, UPDATES),
        (False, True, SUMS),
        (False, False, SUMS),
    ],
)
@pytest.mark.parametrize(
    "where",
    [
        {"kind": "local", "devices": 2},
        {"kind": "device", "devices": 2},
        {"kind": "local", "is_open": True},
        {"kind": "dist_sync"},
        {"kind": "dist"},
        {"kind": "dist_device_sync", "devices": 2},
    ],
    ids=str,
)
def test_dense_parameters_follow_the_argument_and_else_the_variable(
    where: dict[str, object], asked: bool | None, usual: bool, expected: tuple[bool, bool]
) -> None:
    """Row: gluon_type_cpu, dense; test_gluon_trainer_type ("False stays False here")."""
    assert resolved(**where, asked=asked, usual=usual) == expected


@pytest.mark.parametrize("kind", ["dist_async", "dist_device_async", "dist_async_device"])
@pytest.mark.parametrize("usual", [True, False])
def test_without_rounds_the_store_updates_or_it_is_an_error(kind: str, usual: bool) -> None:
    """Row: dist_async_kvstore.py, dense: False is a ValueError; None and True are True."""
    assert resolved(kind=kind, asked=None, usual=usual) == UPDATES
    assert resolved(kind=kind, asked=True, usual=usual) == UPDATES
    with pytest.raises(ValueError, match="please set update_on_kvstore=True when training in async mode"):
        decide(Case(kind=kind, asked=False, usual=usual))


@pytest.mark.parametrize(("largest", "expected"), [(BIG, UPDATES), (BIG + 1, SUMS)])
def test_a_local_store_does_not_update_very_large_parameters(largest: int, expected: tuple[bool, bool]) -> None:
    assert resolved(kind="local", devices=2, largest=largest) == expected
    assert resolved(kind="local", devices=2, largest=largest, asked=True) == UPDATES
    assert resolved(kind="device", devices=2, largest=largest) == UPDATES
    assert resolved(kind="local", devices=2, largest=largest, is_open=True) == UPDATES


@pytest.mark.parametrize("kind", ["local", "device", "dist_sync", "dist_async"])
@pytest.mark.parametrize("usual", [True, False])
def test_a_row_sparse_weight_is_kept_and_updated_in_a_store(kind: str, usual: bool) -> None:
    """Rows: gluon_type_cpu and dist_async, row-sparse weight: False is a ValueError; None and True are True."""
    case = {"kind": kind, "sparse_weight": True, "sparse_grad": True, "usual": usual}
    assert resolved(**case) == UPDATES
    assert resolved(**case, asked=True) == UPDATES
    assert "row-sparse weights are present" in str(resolved(**case, asked=False))


def test_a_row_sparse_weight_without_a_store_is_refused() -> None:
    assert "kept in a store" in str(resolved(kind=None, sparse_weight=True))


@pytest.mark.parametrize(
    ("where", "asked", "expected"),
    [
        ({"kind": None}, None, NONE),
        ({"kind": "local"}, None, NONE),
        ({"kind": "local", "devices": 2}, None, SUMS),
        ({"kind": "local", "devices": 2}, False, SUMS),
        ({"kind": "local", "devices": 2}, True, UPDATES),
        ({"kind": "dist_sync"}, None, UPDATES),
        ({"kind": "dist_sync"}, True, UPDATES),
        ({"kind": "dist_async"}, None, UPDATES),
    ],
)
def test_a_row_sparse_gradient_is_updated_by_the_store_if_that_is_distributed(
    where: dict[str, object], asked: bool | None, expected: tuple[bool, bool]
) -> None:
    """Row: gluon_type_cpu, dense weight with row-sparse gradient."""
    assert resolved(**where, sparse_grad=True, asked=asked) == expected


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_row_sparse_gradients_are_not_summed_by_distributed_stores(kind: str) -> None:
    with pytest.raises(ValueError, match="on store '%s' .* leave update_on_kvstore out, or use dense" % kind):
        decide(Case(kind=kind, sparse_grad=True, asked=False))


def test_a_store_that_cannot_update_only_sums() -> None:
    """Row: test_gluon_trainer.py, teststore: None is False, True a ValueError."""
    case = {"kind": "teststore", "is_third_party": True, "has_optimizer": False}
    assert resolved(**case) == SUMS
    assert resolved(**case, asked=False) == SUMS
    with pytest.raises(ValueError, match="please set update_on_kvstore=False when training with 'teststore'"):
        decide(Case(**case, asked=True))  # type: ignore[arg-type]


def test_a_store_of_another_maker_takes_no_sparse_parameters() -> None:
    case = {"kind": "teststore", "is_third_party": True, "has_optimizer": False}
    assert "takes no row-sparse gradients" in str(resolved(**case, sparse_grad=True))
    assert "it cannot update" in str(resolved(**case, sparse_weight=True, sparse_grad=True))
