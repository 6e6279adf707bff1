"""The calls that a trainer makes to its store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError
from distrun_runtime.store.values import RowSparse
from distrun_runtime.trainer import Parameter, Trainer


class Pending:
    """What a call returns that has failed, or not."""

    def __init__(self, error: str = "") -> None:
        self.error, self.waited, self.skipped = error, False, {}

    def wait(self) -> None:
        self.waited = True
        if self.error:
            raise ValueError(self.error)


def parameter(size_bytes: int, **options: Any) -> Parameter:
    return Parameter(np.zeros((size_bytes // 4, 1), np.float32), **options)


def calls_of_a_step(params: list[Parameter], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """Return the calls of one step, each with its keys, in a local store that updates."""
    made: list[tuple[str, list[int]]] = []

    def noting(name: str, call: Any) -> Any:
        def noted(keys: Any, *rest: Any, **options: Any) -> Any:
            made.append((name, list(keys)))
            return call(keys, *rest, **options)

        return noted

    with kvstore.create("local") as kv, Trainer(params, "sgd", kvstore=kv) as trainer:
        for name in ("push", "pull", "pushpull"):
            monkeypatch.setattr(kv, name, noting(name, getattr(kv, name)))
        trainer.step(1, ignore_stale_grad=True)
    return made


def test_all_that_is_sent_alike_is_one_call_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [parameter(size) for size in (256, 1 << 22, 4, 1 << 20)]
    for one in params:
        one.grad = np.ones_like(one.data)
    assert calls_of_a_step(params, monkeypatch) == [("pushpull", [0, 1, 2, 3])]


def test_what_is_sent_differently_shares_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters 1 and 2 have no gradient, the weight of 3 stays in the store."""
    params = [parameter(16, stype="row_sparse" if index == 3 else "default") for index in range(5)]
    for index in (0, 4):
        params[index].grad = np.ones_like(params[index].data)
    params[3].grad = RowSparse(np.ones((1, 1), np.float32), [2], (4, 1))
    expected = [("pushpull", [0]), ("pull", [1, 2]), ("push", [3]), ("pushpull", [4])]
    assert calls_of_a_step(params, monkeypatch) == expected


def alternating() -> list[Parameter]:
    """Return parameters each of which has a call of its own: pushpull, push, pushpull."""
    params = [parameter(16, stype="row_sparse" if index == 1 else "default") for index in range(3)]
    for one in params:
        one.grad = np.ones_like(one.data)
    return params


def test_the_first_error_is_raised_when_nothing_is_lent_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with kvstore.create("local") as kv, Trainer(alternating(), "sgd", kvstore=kv) as trainer:
        pending = [Pending("first"), Pending("second"), Pending()]
        made = iter(pending)
        for name in ("push", "pushpull"):
            monkeypatch.setattr(kv, name, lambda *_, **__: next(made))
        with pytest.raises(ValueError, match="first"):
            trainer.step(1)
        assert all(each.waited for each in pending)


def test_an_error_of_the_last_call_is_raised_when_the_others_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """That call waits itself."""
    with kvstore.create("local") as kv, Trainer(alternating(), "sgd", kvstore=kv) as trainer:
        pending = [Pending(), Pending("another")]
        made = iter(pending)

        def pushpull(*_: Any, wait: bool, **__: Any) -> Pending:
            if wait:
                raise KVError("the last")
            return next(made)

        monkeypatch.setattr(kv, "pushpull", pushpull)
        monkeypatch.setattr(kv, "push", lambda *_, **__: next(made))
        with pytest.raises(KVError, match="the last"):
            trainer.step(1)
        assert all(each.waited for each in pending)
