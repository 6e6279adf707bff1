"""Jobs on every path whose stores are shared by some of the workers: groups that overlap and end at different times."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import DEADLINE_S, Cluster, open_store

from distrun_runtime.errors import KVError, PeerLost
from distrun_runtime.ps import statefile

pytestmark = pytest.mark.usefixtures("engine", "server_device")

Job = Callable[..., Cluster]
Run = Callable[..., list[Any]]

ONE_WAY = pytest.mark.parametrize(
    ("job", "engine", "server_device"), [("inproc", "later", "cpu")], indirect=True
)  # for what servers and paths have no part in

PAIRS = {"even": [0, 2], "odd": [1, 3]}


def full(value: float, count: int = 4) -> Any:
    return np.full(count, value, np.float32)


def pulled(kv: Any, key: Any = "w", count: int = 4) -> list[float]:
    out = full(-1, count)
    kv.pull(key, out)
    return out.tolist()


def of_pair(session: Any, type_name: str = "dist_sync", **how: Any) -> Any:
    """Return the store of the pair that a worker of four is in."""
    name = ("even", "odd")[session.rank % 2]
    return open_store(type_name, session, group=name, members=PAIRS[name], **how)


def test_each_group_has_ranks_rounds_and_barriers_of_its_own(run_sessions: Run) -> None:
    """The pairs run different numbers of rounds, and neither waits for the other."""

    def script(session: Any) -> tuple[int, int, list[int], list[float]]:
        kv = of_pair(session)
        kv.init("w", full(0))
        kv.barrier()
        for number in range(2 + 5 * (session.rank % 2)):
            kv.push("w", full(number + session.rank))
            assert pulled(kv) == [2 * number + sum(kv.members)] * 4
        kv.barrier()
        return kv.rank, kv.num_workers, kv.members, pulled(kv)

    found = run_sessions(script, 4)
    assert found == [
        (0, 2, [0, 2], [4] * 4),
        (0, 2, [1, 3], [16] * 4),
        (1, 2, [0, 2], [4] * 4),
        (1, 2, [1, 3], [16] * 4),
    ]


def test_groups_overlap_and_a_store_of_all_workers_goes_on_beside_them(run_sessions: Run) -> None:
    """Each worker has the stores of two groups and that of all; the keys are the same, the values are not."""
    groups = {"low": [0, 1], "high": [2, 3], "ends": [0, 3], "middle": [1, 2]}

    def script(session: Any) -> dict[str, list[float]]:
        mine = {name: ranks for name, ranks in groups.items() if session.rank in ranks}
        stores = {name: open_store("dist_sync", session, group=name, members=ranks) for name, ranks in mine.items()}
        stores["all"] = open_store("dist_sync", session)
        for name, kv in stores.items():
            kv.init("w", full(len(name)))
        for _ in range(3):
            for kv in stores.values():
                kv.push("w", full(1 + session.rank))
        return {name: pulled(kv) for name, kv in stores.items()}

    found = run_sessions(script, 4)
    sums = {"low": 3, "high": 7, "ends": 5, "middle": 5}
    for rank, each in enumerate(found):
        own = {name: [sums[name]] * 4 for name, ranks in groups.items() if rank in ranks}
        assert each == {**own, "all": [10] * 4}


def test_groups_end_at_different_times_by_close_join_leave_and_the_end_of_their_workers(run_sessions: Run) -> None:
    """Worker 3 ends first, and worker 2 leaves; each time the others go on, among them or alone."""

    def script(session: Any) -> list[float]:
        trio = open_store("dist_sync", session, group="trio", members=[0, 1, 2]) if session.rank < 3 else None
        late = open_store("dist_sync", session, group="late", members=[1, 2, 3]) if session.rank > 0 else None
        if late is not None:
            late.init("w", full(0))
            late.push("w", full(10**session.rank))
            assert pulled(late) == [1110] * 4
            late.close()
        if trio is None:
            return []
        trio.init("w", full(0))
        trio.push("w", full(1))
        assert pulled(trio) == [3] * 4
        if trio.rank == 2:
            trio.leave()
            return []
        trio.push("w", full(1))
        assert pulled(trio) == [2] * 4
        if trio.rank == 1:
            trio.join()
        else:
            for _ in range(2):
                trio.push("w", full(5))
                assert pulled(trio) == [5] * 4
            trio.join()
        trio.push("w", full(7))
        return pulled(trio)

    assert run_sessions(script, 4) == [[14] * 4, [14] * 4, [], []]


def test_stores_of_a_group_are_numbered_in_it_and_name_its_members_only_once(run_sessions: Run) -> None:
    """One pair creates three stores, the other one; then all create theirs, closed and created again."""

    def script(session: Any) -> list[list[float]]:
        stores = [of_pair(session)]
        if session.rank % 2:
            stores += [open_store("dist_sync", session, group="odd") for _ in range(2)]
            stores[1].close()
            stores[1] = open_store("dist_sync", session, group="odd", members=[3, 1])
        stores.append(open_store("dist_sync", session))
        for place, kv in enumerate(stores):
            kv.init("w", full(0))
            kv.push("w", full(10**place))
        return [pulled(kv) for kv in stores]

    found = run_sessions(script, 4)
    assert found[0] == found[2] == [[2] * 4, [2 * 10 + 2 * 1000] * 4]
    assert found[1] == found[3] == [[2] * 4, [20] * 4, [200] * 4, [2020] * 4]


@pytest.mark.parametrize("type_name", ["dist_sync", "dist_async"])
def test_each_group_has_a_rule_and_saved_states_of_its_own(run_sessions: Run, tmp_path: Path, type_name: str) -> None:
    """What one group saved, the other takes up: it has as many workers."""

    def script(session: Any) -> tuple[list[float], list[float]]:
        kv = of_pair(session, type_name)
        kv.init("w", full(0))
        name = ("even", "odd")[session.rank % 2]
        rate = 1.0 if name == "even" else 100.0
        kv.set_optimizer("sgd", learning_rate=rate, momentum=0.5)
        kv.barrier()
        if kv.rank == 1 or type_name == "dist_sync":
            kv.push("w", full(1))
        kv.barrier()
        first = pulled(kv)
        kv.save_states(tmp_path / name)
        kv.barrier()
        if name == "even":
            return first, []
        for _ in range(600):
            if (tmp_path / "even" / "manifest.json").exists():
                break
            threading.Event().wait(0.05)
        kv.load_states(tmp_path / "even")
        return first, pulled(kv)

    found = run_sessions(script, 4)
    count = 2 if type_name == "dist_sync" else 1
    assert found[0] == found[2] == ([-count] * 4, [])
    assert found[1] == found[3] == ([-100 * count] * 4, [-count] * 4)


@ONE_WAY
@pytest.mark.parametrize(
    ("rank", "call", "function"),
    [
        (0, "save_states", "write_manifest"),
        (0, "save_states", "write"),
        (1, "save_states", "write"),
        (0, "load_states", "read_manifest"),
        (1, "load_states", "read_residuals"),
    ],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RecursionError])
def test_who_waits_for_a_worker_that_is_interrupted_at_its_file_is_told_and_all_may_call_again(
    run_sessions: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    call: str,
    function: str,
    error: type[BaseException],
) -> None:
    usual = getattr(statefile, function)
    interrupts: list[str] = []

    def interrupted(*arguments: Any) -> Any:
        is_of_another = function in ("write", "read_residuals") and arguments[2] != statefile.worker_file(rank)
        if not is_of_another and interrupts and interrupts.pop():
            raise error("too deep")
        return usual(*arguments)

    monkeypatch.setattr(statefile, function, interrupted)

    def script(session: Any) -> tuple[str, str]:
        kv = open_store("dist_sync", session)
        kv.set_gradient_compression({"type": "2bit", "threshold": 4, "min_size": 0})
        kv.init("w", full(1))
        kv.push("w", full(1))
        kv.save_states(tmp_path)
        kv.barrier()
        if session.rank == rank:
            interrupts.append(call)
        kv.barrier()
        kind, said = "", ""
        try:
            getattr(kv, call)(tmp_path)
        except (KVError, error) as err:
            kind, said = type(err).__name__, str(err)
        getattr(kv, call)(tmp_path)
        return kind, said

    found = run_sessions(script)
    assert found[rank] == (error.__name__, "too deep")
    kind, said = found[1 - rank]
    why = "it was interrupted by KeyboardInterrupt" if error is KeyboardInterrupt else "RecursionError: too deep"
    assert kind == "KVError"
    assert said.endswith(f"worker-{rank} failed at {call}: {why}")
    assert len(list(tmp_path.glob("data-*"))) == 1


@ONE_WAY
def test_an_interrupt_of_a_save_is_not_lost_when_the_job_is(
    run_sessions: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        raise PeerLost("server-1 is lost")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def script(session: Any) -> None:
        kv = open_store("dist_sync", session)
        kv.init("w", full(1))
        monkeypatch.setattr(statefile, "write_manifest", interrupted)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(kv._backend._link, "give_up", lost)
            kv.save_states(tmp_path)

    run_sessions(script, 1, 1)


def test_a_worker_that_fails_ends_the_waits_of_its_own_groups_and_the_others_go_on(job: Job) -> None:
    """Worker 3 is in a group with 0; 0 catches the error, and goes on with 1, whom this does not concern."""
    has_failed = threading.Event()

    def script(session: Any) -> list[float]:
        if session.rank in (0, 3):
            with_3 = open_store("dist_sync", session, group="ends", members=[0, 3])
            with_3.init("w", full(0))
        if session.rank == 3:
            has_failed.set()
            raise RuntimeError("my bug")
        if session.rank == 2:
            return []
        kv = open_store("dist_sync", session, group="low", members=[0, 1])
        kv.init("w", full(0))
        if session.rank == 0:
            has_failed.wait(DEADLINE_S)
            with_3.push("w", full(1))
            with pytest.raises(PeerLost, match=r"worker-3@\w+ \(pid \d+\) failed: RuntimeError: my bug"):
                pulled(with_3)
            with pytest.raises(PeerLost, match="my bug"):
                with_3.barrier()
            assert kv.num_dead_node(4) == 0
            assert with_3.num_dead_node(4) == 1
        for _ in range(3):
            kv.push("w", full(1))
            assert pulled(kv) == [2] * 4
        kv.barrier()
        return pulled(kv)

    with job(4, 2) as made, pytest.raises(RuntimeError, match="my bug"):
        made.run_sessions(script)
    assert made.codes["scheduler"] == 1


@ONE_WAY
def test_members_that_cannot_be_are_errors_that_say_what_is_wrong_and_cost_nothing(run_sessions: Run) -> None:
    def script(session: Any) -> list[float]:
        me = session.rank
        for members, text in (
            ([0, 1, 7], "group 'g' has no member worker-7: ranks of this job's workers go from 0 to 2"),
            ([rank for rank in (0, 1, 2) if rank != me][:1], f"worker-{me} is no member of group 'g'; its members are"),
            (None, f"worker-{me} creates its first store of group 'g': name its members"),
        ):
            with pytest.raises(KVError, match=text):
                open_store("dist_sync", session, group="g", members=members)
        everyone = open_store("dist_sync", session)
        if me == 1:
            everyone.barrier()
            return []
        wrong = [0, 1] if me == 0 else [0, 2]
        text = r"group 'g' has the members \[0, [12]\] for worker-[02] and \[0, [12]\] for worker-[02]; fix: all"
        with pytest.raises(KVError, match=text):
            open_store("dist_sync", session, group="g", members=wrong)
        kv = open_store("dist_sync", session, group="g", members=[2, 0])
        with pytest.raises(KVError, match=r"has the members \[0, 2\] since its first store, and not \[0, 1, 2\]"):
            open_store("dist_sync", session, group="g", members=[0, 1, 2])
        everyone.barrier()
        kv.init("w", full(0))
        kv.push("w", full(1))
        return pulled(kv)

    assert run_sessions(script, 3) == [[2] * 4, [], [2] * 4]
