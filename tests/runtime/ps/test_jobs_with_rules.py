"""Rules, keys and counters in whole jobs, in threads of one process."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
from cluster import run_job

from distrun_runtime.errors import RuleError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.ops.optimizers import Rule


class Picky(Rule):
    """Subtracts the gradient; its state fails for weights that begin with 2."""

    name = "picky"
    table = ()

    def start(self, weight: Any) -> Any:
        if weight[0] == 2:
            raise ZeroDivisionError("not this one")
        return {"seen": np.zeros_like(weight)}

    def update(self, weight: Any, grad: Any, state: Any, rates: Any) -> None:
        weight -= grad


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    found = types.ModuleType("rules_of_a_user")
    found.Picky = Picky  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rules_of_a_user", found)
    return "rules_of_a_user"


def test_a_rule_that_fails_on_one_server_is_on_none_and_the_states_of_the_one_before_go_on(module: str) -> None:
    def script(kv: KVStore) -> Any:
        # Key 0 and key 1 live on different servers.
        kv.init([0, 1], [np.full(2, 1, np.float32), np.full(2, 2, np.float32)])
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        out = np.empty(2, np.float32)
        grad = np.zeros(2, np.float32)
        kv.push([0, 1], [grad + 1, grad])
        kv.pull(0, out=out)
        kv.barrier()
        with pytest.raises(RuleError, match=r"server-\d: ZeroDivisionError: not this one") as caught:
            kv.set_optimizer("%s:Picky" % module, replace=True)
        assert "new_state" in caught.value.server_traceback
        kv.barrier()
        kv.push([0, 1], [grad, grad])
        kv.pull(0, out=out)
        return out.tolist()

    assert run_job(script, 1, 2, imports=(module,)) == [[-0.5, -0.5]]
