"""Jobs on every path: rules that fail, pushes that are refused, workers that end, and what is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import DEADLINE_S, Cluster
from rules_of_users import Choosy

from distrun_runtime.errors import KVError, PeerLost, RuleError

pytestmark = pytest.mark.usefixtures("engine", "server_device")

Job = Callable[..., Cluster]

USERS = ("rules_of_users", "norm_rules")
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


def test_a_rule_that_fails_is_the_error_of_its_round_and_of_that_key_alone(job: Job) -> None:
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

    with job(2, 2, imports=USERS) as made:
        made.run(script)


def test_a_pull_of_several_keys_fails_when_one_of_their_rounds_did(job: Job) -> None:
    def script(kv: Any) -> None:
        keys = ["a", "b", "c"]
        kv.init(keys, [full(0) for _ in keys])
        kv.set_optimizer(FUSSY)
        kv.push(keys, [full(1), full(6.5), full(1)])
        outs = [full(-1) for _ in keys]
        with pytest.raises(RuleError, match="for key 'b': a thirteen"):
            kv.pull(keys, outs)
        for step in (2, 3):
            kv.push(keys, [full(1), full(1), full(1)])
            kv.pull(keys, outs)
            assert [out[0] for out in outs] == [-2 * step, -2 * (step - 1), -2 * step]

    with job(2, 2, imports=USERS) as made:
        made.run(script)


def test_a_worker_that_pushes_on_without_a_pull_hears_of_a_failed_round_once(job: Job) -> None:
    def script(kv: Any) -> None:
        kv.init("a", full(0))
        kv.set_optimizer(FUSSY)
        for value in (6.5, 1, 1):
            kv.push("a", full(value))
        with pytest.raises(RuleError, match="a thirteen"):
            pulled(kv, "a")
        assert pulled(kv, "a") == [-4] * 4

    with job(2, 1, imports=USERS) as made:
        made.run(script)


def test_an_async_push_whose_rule_fails_is_its_pushers_error_and_the_others_do_not_wait_for_it(job: Job) -> None:
    """With a bound of 0: a push that failed counts as made."""

    def script(kv: Any) -> None:
        kv.init("a", full(0))
        kv.set_optimizer(FUSSY)
        kv.barrier()
        if kv.rank == 0:
            kv.push("a", full(1))
            assert pulled(kv, "a") == [-1] * 4
        else:
            with pytest.raises(RuleError, match="a thirteen"):
                kv.push("a", full(13)).wait()
        kv.barrier()
        assert pulled(kv, "a") == [-1] * 4

    with job(2, 1, imports=USERS) as made:
        made.run(script, "dist_async", staleness=0)


@pytest.mark.parametrize("is_listed", [True, False])
def test_pushes_that_servers_refuse_change_nothing_and_later_ones_count(job: Job, is_listed: bool) -> None:
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

    with job(2, 2, bigarray_bound=BOUND) as made:
        made.run(script, "dist_async")


def test_a_key_whose_init_one_server_refused_can_be_initialised_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server has taken its piece in already."""

    def script(kv: Any) -> None:
        kv.init("first", full(0))
        kv.set_optimizer("rules_of_users:Choosy")
        kv.barrier()
        # 11 elements are cut into 5 and 6: one server takes its piece, the other does not.
        monkeypatch.setattr(Choosy, "refused", 6)
        kv.barrier()
        with pytest.raises(KVError, match="6 elements are too many"):
            kv.init("w", full(0, 11))
        kv.barrier()
        monkeypatch.setattr(Choosy, "refused", -1)
        kv.barrier()
        kv.init("w", full(3, 11))
        kv.push("w", full(1, 11))
        assert pulled(kv, "w", 11) == [1] * 11
        with pytest.raises(KVError, match="already initialised"):
            kv.init("w", full(0, 11))

    with job(2, 2, bigarray_bound=BOUND, imports=USERS) as made:
        made.run(script)


def test_a_worker_that_ends_with_a_round_open_is_named_to_all_who_wait(job: Job) -> None:
    asked = threading.Barrier(3)

    def script(kv: Any) -> None:
        kv.init(["a", "b"], [full(0), full(0)])
        if kv.rank == 1:
            kv.push("a", full(1))
            asked.wait(DEADLINE_S)
            return
        outs = [full(-1), full(-1)]
        kv.push(["a", "b"], [full(1), full(1)])
        pending = kv.pull(["a", "b"], outs, wait=False)
        asked.wait(DEADLINE_S)
        with pytest.raises(PeerLost, match=r"worker-1.*round 1 of key 'b'.*kv\.join\(\)"):
            pending.wait()
        assert pulled(kv, "a") == [3] * 4, "its round of key a is whole"

    with job(3, 2) as made:
        made.run(script)


def test_a_workers_exception_ends_the_waits_of_the_others(job: Job) -> None:
    caught: list[str] = []

    def script(kv: Any) -> None:
        kv.init("a", full(0))
        if kv.rank == 1:
            raise ZeroDivisionError("my own mistake")
        try:
            # The push fails if the others' end is known before it.
            kv.push("a", full(1))
            pulled(kv, "a")
        except PeerLost as err:
            caught.append(str(err))
            raise

    with job(3, 2) as made, pytest.raises((ZeroDivisionError, PeerLost)):
        made.run(script)
    assert len(caught) == 2
    assert all("my own mistake" in text for text in caught)
    assert made.codes["scheduler"] == 1


def test_servers_count_bytes_updates_keys_and_rounds(job: Job) -> None:
    def script(kv: Any) -> Any:
        kv.init(["a", "w"], [full(0), full(0, WIDE)])
        before = kv.stats()
        kv.barrier()
        for _ in range(3):
            kv.pushpull(["w", "a"], [full(1, WIDE), full(1)])
        kv.barrier()
        return before, kv.stats()

    with job(2, 2, bigarray_bound=BOUND) as made:
        (before, after), (_, other) = made.run(script)
    assert after == other

    def grown(name: str) -> int:
        return sum(facts[name] for facts in after) - sum(facts[name] for facts in before)

    assert [facts["server"] for facts in after] == ["server-0", "server-1"]
    assert sum(facts["keys"] for facts in after) == 3, "w is on both servers"
    assert [facts["rounds"] for facts in after] == [3, 3]
    # With relays the part on server-1 goes from server-0 to it and back once more.
    again = 3 * (WIDE // 2) * 4 if made.has_relays else 0
    assert grown("bytes_in") == grown("bytes_out") == 3 * 2 * (WIDE + 4) * 4 + 2 * again
    assert grown("updates") == 3 * 3
    assert [facts["queue"] for facts in after] == [0, 0]


def test_norms_of_whole_values_are_the_same_for_groups_of_keys_and_single_ones(job: Job) -> None:
    """w -= g / |g|, for values on three servers and on one."""

    def script(kv: Any) -> None:
        keys, sizes = ["w", "b", "v"], [WIDE, 4, 25]
        kv.init(keys, [full(0, size) for size in sizes])
        kv.set_optimizer("rules_of_users:Normalised")
        for step in range(1, 4):
            order = [0, 1, 2] if kv.rank else [2, 1, 0]
            if kv.rank:
                for number in order:
                    kv.push(keys[number], full(1, sizes[number]))
            else:
                kv.push([keys[number] for number in order], [full(1, sizes[number]) for number in order])
            for key, size in zip(keys, sizes, strict=True):
                np.testing.assert_allclose(pulled(kv, key, size), [-step / np.sqrt(size)] * size, rtol=1e-6)

    with job(2, 3, bigarray_bound=BOUND, imports=USERS) as made:
        made.run(script)
