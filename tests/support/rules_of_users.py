"""What a user's module may have in it: rules and functions that servers import by name."""

from __future__ import annotations

import numpy as np

from distrun_runtime.ops.optimizers import RESCALE, Array, NormRule, Param, Rates, Rule, State, learning_rate


class Sign(Rule):
    """w -= learning_rate sign(g): the smallest rule of one's own."""

    table = (learning_rate(0.5), RESCALE)

    def start(self, weight: Array) -> State:
        return {}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        weight -= rates.learning_rate * np.sign(grad)


class Free(Rule):
    """Takes any parameters."""

    def start(self, weight: Array) -> State:
        return {"last": np.zeros_like(weight)}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        state["last"] = grad.copy()
        weight += sum(self.params["steps"])  # type: ignore[arg-type]


class Normalised(NormRule):
    """w -= g / |g|."""

    table = (Param("unused", 1.0),)

    def start(self, weight: Array) -> State:
        return {}

    def direction(self, weight: Array, grad: Array, state: State, rates: Rates) -> tuple[Array, tuple[float, ...]]:
        return grad.copy(), (float((grad * grad).sum()),)

    def move(self, weight: Array, direction: Array, totals: tuple[float, ...], state: State, rates: Rates) -> None:
        weight -= direction / np.sqrt(totals[0])


class Failing(Sign):
    """Raises in every step."""

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        raise ArithmeticError("one of the user's own")


class Fussy(Rule):
    """w -= g, and what was seen last; raises for a gradient that begins with 13."""

    table = (RESCALE,)

    def start(self, weight: Array) -> State:
        return {"last": np.zeros_like(weight)}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        if grad.size and grad.reshape(-1)[0] == 13:
            raise ArithmeticError("a thirteen")
        weight -= grad
        state["last"][...] = grad


class Remembering(Rule):
    """w -= g; keeps a list, which cannot be saved."""

    table = (RESCALE,)

    def start(self, weight: Array) -> State:
        return {"history": []}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        weight -= grad
        state["history"].append(float(grad[0]))


class Choosy(Rule):
    """Takes no weights of the length `refused`."""

    refused = -1

    def start(self, weight: Array) -> State:
        if weight.size == Choosy.refused:
            raise ValueError("%d elements are too many" % weight.size)
        return {"count": np.zeros(weight.shape)}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        weight -= grad
        state["count"] += 1


class Unfinished(Rule):
    """Lacks `update`."""

    def start(self, weight: Array) -> State:
        return {}


class Outer:
    """Has a function that is a method."""

    def method(self, key: object, received: Array, stored: Array) -> None:
        stored += received


def add(key: object, received: Array, stored: Array) -> None:
    """Adds what comes, and shows that `received` is its own."""
    stored += received
    received[...] = 0


def failing(key: object, received: Array, stored: Array) -> None:
    """Raises always."""
    raise ArithmeticError("key %r is not right" % (key,))


def maker() -> object:
    """Returns a nested function."""

    def nested(key: object, received: Array, stored: Array) -> None:
        stored += received

    return nested


nothing = 3
small = lambda key, received, stored: None  # noqa: E731
another_name = add
