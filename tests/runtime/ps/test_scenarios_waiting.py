"""Jobs on every path: rules that fail, and pushes that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distrun_runtime.errors import KVError, RuleError

pytestmark = pytest.mark.usefixtures("engine", "server_device")

Run = Callable[..., list[Any]]

USERS = ("rules_of_users",)
FUSSY = "rules_of_users:Fussy"
"""w -= g; fails for a gradient that begins with 13."""
WIDE = 60
BOUND = 10
"""Elements from which a value is cut over all servers here."""


def full(value: float, count: int = 4) -> Any:
    return np.full(count, value, np.float32)


def pulled(kv: Any, key: str, count: int = 4) -> list[float]:
    out = full(-1, count)
    kv.pull(key, out)
    return out.tolist()


def test_a_rule_that_fails_is_the_error_of_its_round_and_of_that_key_alone(run: Run) -> None:
    def script(kv: Any) -> None:
        kv.init(["a", "b"], [full(0), full(0)])
        kv.set_optimizer(FUSSY)
        kv.push(["a", "b"], [full(6.5), full(1)])
        with pytest.raises(RuleError, match=r"the rule failed on server-\d for key 'a': a thirteen") as caught:
            pulled(kv, "a")
        assert "rules_of_users.py" in caught.value.server_traceback
        assert pulled(kv, "b") == [-2] * 4
        kv.push(["a", "b"], [full(1), full(1)])
        assert pulled(kv, "a") == [-2] * 4, "the next round is another matter, and the value as it was"
        assert pulled(kv, "b") == [-4] * 4

    run(script, imports=USERS)


@pytest.mark.parametrize("is_listed", [True, False])
def test_pushes_that_servers_refuse_change_nothing_and_later_ones_count(run: Run, is_listed: bool) -> None:
    """Asynchronous, and no rule is set yet."""

    def script(kv: Any) -> None:
        kv.init(["a", "w"], [full(0), full(0, WIDE)])
        pending = [
            kv.push(["a", "w"], [full(1), full(1, WIDE)], wait=False)
            if is_listed
            else kv.push("w", full(1, WIDE), wait=False)
        ]
        with pytest.raises(KVError, match="dist_async needs a rule on the servers"):
            pending[0].wait()
        assert pulled(kv, "w", WIDE) == [0] * WIDE
        kv.barrier()
        kv.set_optimizer("test")
        kv.barrier()
        kv.push(["w", "a"], [full(1, WIDE), full(1)])
        kv.barrier()
        assert pulled(kv, "w", WIDE) == [2] * WIDE
        assert pulled(kv, "a") == [2] * 4

    run(script, bigarray_bound=BOUND, type_name="dist_async")
