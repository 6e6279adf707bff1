"""A user's rule that takes as long as the test wants, and ends as it wants."""

from __future__ import annotations

import threading

from slowness import scaled

from distrun_runtime.ops.optimizers import Array, Rates, Rule, State

LIMIT_S = scaled(60.0)


class Gate:
    """Where each update waits. Only one test uses it at a time."""

    entered = threading.Event()
    leave = threading.Event()
    updates = 0
    """How many have begun."""
    error: BaseException | None = None

    @classmethod
    def close(cls, error: BaseException | None = None) -> None:
        """Let updates wait from now on; `error` is what they raise in the end."""
        cls.entered, cls.leave, cls.updates, cls.error = threading.Event(), threading.Event(), 0, error


class Gated(Rule):
    """w += g, once `Gate.leave` is set."""

    table = ()

    def start(self, weight: Array) -> State:
        return {}

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        Gate.updates += 1
        Gate.entered.set()
        assert Gate.leave.wait(LIMIT_S)
        if Gate.error is not None:
            raise Gate.error
        weight += grad
