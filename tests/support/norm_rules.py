"""Rules of a user that need norms, for servers to import."""

from __future__ import annotations

from distrun_runtime.ops.optimizers import Array, NormRule, Param, Rates, State


class Picky(NormRule):
    """w -= g, unless a slice has a weight of 7 in it, or in its second half the sum of squares is 0."""

    table = (Param("unused", 1.0),)

    def start(self, weight: Array) -> State:
        return {}

    def direction(self, weight: Array, grad: Array, state: State, rates: Rates) -> tuple[Array, tuple[float, ...]]:
        if (weight == 7).any():
            raise ArithmeticError("a seven")
        return grad.copy(), (float((grad * grad).sum()),)

    def move(self, weight: Array, direction: Array, totals: tuple[float, ...], state: State, rates: Rates) -> None:
        if not totals[0]:
            raise ArithmeticError("no gradient")
        weight -= direction
