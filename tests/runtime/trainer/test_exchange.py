"""How a trainer's parameters share calls to its store."""

from __future__ import annotations

import numpy as np
import pytest

from distrun_runtime.trainer.exchange import GROUP_BYTES, Item, finish, grouped

SMALL, BIG = GROUP_BYTES // 4, GROUP_BYTES


def item(index: int, size: int, grads: bool = True, outs: bool = True) -> Item:
    one = [np.zeros(1)]
    return Item(index, one if grads else None, one if outs else [], size)


def indices(*items: Item) -> list[list[int]]:
    return [[one.index for one in group] for group in grouped(items)]


def test_small_neighbours_share_a_call_and_big_ones_have_their_own() -> None:
    sizes = [SMALL, SMALL, BIG, SMALL, SMALL, SMALL, SMALL, SMALL, BIG]
    assert indices(*(item(*pair) for pair in enumerate(sizes))) == [[0, 1], [2], [3, 4, 5, 6], [7], [8]]
    assert indices() == []


def test_what_is_sent_differently_shares_no_call() -> None:
    items = [item(0, 1), item(1, 1, grads=False), item(2, 1, grads=False), item(3, 1, outs=False), item(4, 1)]
    assert indices(*items) == [[0], [1, 2], [3], [4]]


class Call:
    """A Pending that has failed, or not."""

    def __init__(self, error: str = "") -> None:
        self.error, self.waited, self.skipped = error, False, {}

    def wait(self) -> None:
        self.waited = True
        if self.error:
            raise ValueError(self.error)


def test_the_first_error_is_raised_when_nothing_is_lent_any_more() -> None:
    calls = [Call(), Call("first"), Call("second"), Call()]
    with pytest.raises(ValueError, match="first"):
        finish(calls)  # type: ignore[arg-type]
    assert all(call.waited for call in calls)
