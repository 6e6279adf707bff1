"""Calls that failed, or that were left waiting, can be made again, with the other workers waiting or trying again too.

A script in a notebook is run cell by cell: what fails there must not cost the process its place in the job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cluster import DEADLINE_S, Cluster, open_store

from distrun_runtime.errors import KVError, PeerLost, StoreClosed, TimedOut
from distrun_runtime.kvstore import KVStore
from distrun_runtime.ps.session import NodeSession
from distrun_runtime.store.link import CollectiveCall, StoreLink
from distrun_runtime.store.reducer import DeviceReducer, Reducer

SHORT_S = 0.2


def ones(*shape: int) -> Any:
    return np.ones(shape or (2,), np.float32)


def trained(kv: KVStore, key: str = "w") -> float:
    out = ones()
    kv.push(key, ones())
    kv.pull(key, out=out)
    return float(out[0])


def run(script: Callable[[NodeSession], Any], workers: int = 2) -> list[Any]:
    with Cluster(workers, 1, over="inproc") as job:
        return job.run_sessions(script)


def times_out(session: NodeSession, call: Callable[[], object]) -> None:
    """Make a call that the others do not make meanwhile: it is left waiting."""
    usual, session.config = session.config, replace(session.config, op_timeout_s=SHORT_S)
    try:
        with pytest.raises(TimedOut):
            call()
    finally:
        session.config = usual


def gathered(job: Cluster, store: int, number: int, rank: int = 0) -> Mapping[str, Any]:
    """Return what a worker has said in a call that waits for others."""
    stores = job.scheduler._calls._stores
    gathering = stores[store].gatherings.get(number) if store in stores else None
    call = gathering.calls.get(rank) if gathering is not None else None
    return call.message.body if call is not None else {}


def filling(job: Cluster, store: int) -> object:
    """Return the calls whose values worker 0 is to send."""
    return job.scheduler._calls._stores[store].filling


def refused(job: Cluster, store: int) -> object:
    """Return the calls of a store that failed and that some worker is still to hear of."""
    stores = job.scheduler._calls._stores
    return stores[store].refused if store in stores else None


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


class Turn:
    """Lets the other workers wait until worker 0 has done its part."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def done(self) -> None:
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(DEADLINE_S)


# --- calls that were left waiting


def calls_of(session: NodeSession, kv: KVStore | None, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return calls that all workers make; those but `create` need a store."""
    return {
        "create": lambda: open_store("dist_sync", session),
        "barrier": lambda: kv and kv.barrier(),
        "init": lambda: kv and kv.init("v", (3 - 2 * session.rank) * ones()),
        "save_states": lambda: kv and kv.save_states(folder),
    }


@pytest.mark.parametrize("call", ["create", "barrier", "init", "save_states"])
def test_a_call_that_was_left_waiting_goes_on_when_it_is_called_again(call: str, tmp_path: Path) -> None:
    """Its first try had used up its number: the workers were never in step again."""
    turn = Turn()

    def script(session: NodeSession) -> float:
        kv = open_store("dist_sync", session) if call != "create" else None
        again = calls_of(session, kv, tmp_path)[call]
        if session.rank == 0:
            times_out(session, again)
            times_out(session, again)
            turn.done()
        else:
            turn.wait()
        found = again()
        kv = kv or found
        assert kv is not None
        if call == "init":
            kv.pull("v", out=(out := ones()))
            assert out.tolist() == [3, 3], "worker 0's values of the last try"
        kv.init("w", ones())
        kv.barrier()
        return trained(kv)

    assert run(script) == [2, 2]


@pytest.mark.parametrize("changed", [("dist_async", None), ("dist_sync", None)])
def test_another_create_takes_the_place_of_one_that_was_left_waiting(changed: tuple[str, int | None]) -> None:
    kind, bound = changed
    before = ("dist_sync", None) if kind == "dist_async" else ("dist_async", 3)

    def script(session: NodeSession) -> str:
        if session.rank == 0:
            times_out(session, lambda: open_store(before[0], session, before[1]))
        else:
            until(lambda: gathered(job, 1, 1).get("type") == kind)
        kv = open_store(kind, session, bound)
        kv.init("w", ones())
        return kv.type

    with Cluster(2, 1, over="inproc") as job:
        assert job.run_sessions(script) == [kind, kind]


def test_a_create_that_ends_as_a_worker_is_lost_takes_no_number_of_its_group() -> None:
    found: list[float] = []
    turn = Turn()

    def script(session: NodeSession) -> None:
        if session.rank == 2:
            raise RuntimeError("my bug")
        if session.rank == 0:
            with pytest.raises(PeerLost, match="my bug"):
                open_store("dist_sync", session, group="g", members=[0, 2])
            turn.done()
        turn.wait()
        kv = open_store("dist_sync", session, group="g", members=[0, 1])
        kv.init("w", ones())
        found.append(trained(kv))

    with Cluster(3, 1, over="inproc") as job, pytest.raises(RuntimeError, match="my bug"):
        job.run_sessions(script)
    assert found == [2, 2]


def test_a_create_that_was_given_up_after_it_could_not_be_taken_back_leaves_no_store_behind() -> None:
    turn = Turn()

    def script(session: NodeSession) -> float:
        if session.rank == 0:
            with mock.patch.object(StoreLink, "leave", lambda self, call: setattr(self, "held", call)):
                times_out(session, lambda: open_store("dist_async", session))
            turn.done()
        else:
            turn.wait()
            other = open_store("dist_async", session)
            with pytest.raises(KVError, match="was called instead"):
                other.init("w", ones())
            other.close()
        kv = open_store("dist_sync", session)
        until(lambda: 1 not in job.scheduler._calls._stores)
        kv.init("w", ones())
        return trained(kv)

    with Cluster(2, 1, over="inproc") as job:
        assert job.run_sessions(script) == [2, 2]


@pytest.mark.parametrize("who", [0, 1])
def test_another_init_takes_the_place_of_one_that_was_left_waiting(who: int) -> None:
    """The others notice nothing; the first one's shape was wrong."""

    def script(session: NodeSession) -> float:
        kv = open_store("dist_sync", session)
        if session.rank == who:
            times_out(session, lambda: kv.init("w", ones(3)))
        else:
            until(lambda: [2] in [record["shape"] for record in gathered(job, 1, 2, who).get("records", [])])
        kv.init("w", ones(2))
        kv.barrier()
        return trained(kv)

    with Cluster(2, 1, over="inproc") as job:
        assert job.run_sessions(script) == [2, 2]


def test_a_call_after_others_that_are_under_way_fails_the_one_that_was_left_waiting() -> None:
    """Its number cannot be given again: one worker would be out of step."""

    def script(session: NodeSession) -> float:
        kv = open_store("dist_sync", session)
        kv.init("w", ones())
        if session.rank == 0:
            before = kv._backend._link.next_call
            # As if another thread had taken a number meanwhile, for a call that it is about to make.
            kv._backend._link.next_call = lambda: before() + 0 * before()
            times_out(session, kv.barrier)
            kv._backend._link.next_call = before
        else:
            until(lambda: bool(refused(job, 1)))
            with pytest.raises(KVError, match="worker-0 failed at barrier: it was left waiting, and other calls were"):
                kv.barrier()
            kv._backend._link.next_call()
        kv.init("v", ones())
        return trained(kv, "v")

    with Cluster(2, 1, over="inproc") as job:
        assert job.run_sessions(script) == [2, 2]


class Late:
    """Lets calls be left only when the others have made them: too late to take them back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.turn = Turn(), Turn()
        leave = StoreLink.leave

        def later(link: StoreLink, call: CollectiveCall) -> None:
            self.entered.done()
            self.turn.wait()
            leave(link, call)

        monkeypatch.setattr(StoreLink, "leave", later)


@pytest.mark.parametrize("call", ["create", "barrier", "init"])
def test_a_call_that_all_have_made_when_it_is_left_has_its_result_when_it_is_made_again(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, who = Late(monkeypatch), 1 if call == "init" else 0

    def script(session: NodeSession) -> float:
        kv = open_store("dist_sync", session) if call != "create" else None
        again = calls_of(session, kv, tmp_path)[call]
        if session.rank == who:
            times_out(session, again)
            found = again()
        else:
            late.entered.wait()
            found = again()
            late.turn.done()
        kv = kv or found
        assert kv is not None
        kv.init("w", ones())
        kv.barrier()
        return trained(kv, "v" if call == "init" else "w")

    assert run(script) == [2, 2]


@pytest.mark.parametrize("first", ["dist_sync", "dist_device_sync"])
def test_a_create_that_all_have_made_is_made_again_with_the_other_kind(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Late(monkeypatch)
    (second,) = {"dist_sync", "dist_device_sync"} - {first}

    def script(session: NodeSession) -> tuple[float, bool, type]:
        if session.rank == 0:
            times_out(session, lambda: open_store(first, session))
            kv = open_store(second, session)
        else:
            late.entered.wait()
            kv = open_store("dist_sync", session)
            late.turn.done()
        kv.init("w", ones())
        kv.push("w", [ones(), ones()])
        out = ones()
        kv.pull("w", out=out)
        backend: Any = kv._backend
        return float(out[0]), bool(backend._link.told), type(backend.reducer)

    found = run(script)
    # Servers hear of the kind from rank 0, if one worker has said it.
    assert found[0] == (4, True, DeviceReducer if second == "dist_device_sync" else Reducer)
    assert found[1] == (4, first == "dist_device_sync", Reducer)


def test_worker_0_that_leaves_an_init_when_the_others_wait_for_its_values_fails_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = Late(monkeypatch)

    def script(session: NodeSession) -> float:
        kv = open_store("dist_sync", session)
        if session.rank == 0:
            times_out(session, lambda: kv.init("w", ones()))
        else:
            late.entered.wait()
            threading.Thread(target=lambda: (until(lambda: bool(filling(job, 1))), late.turn.done())).start()
            with pytest.raises(KVError, match="worker-0 has stopped waiting for init and does not send the values"):
                kv.init("w", ones())
        kv = open_store("dist_sync", session) if session.rank == 0 else kv  # The store counts as unused.
        kv.init("w", ones())
        return trained(kv)

    with Cluster(2, 1, over="inproc") as job:
        assert job.run_sessions(script) == [2, 2]


def test_a_join_that_was_left_waiting_goes_on_and_no_other_call_can_come_between() -> None:
    turn = Turn()

    def script(session: NodeSession) -> float:
        kv = open_store("dist_sync", session)
        kv.init("w", ones())
        if session.rank == 0:
            times_out(session, kv.join)
            with pytest.raises(KVError, match=r"join was left waiting and cannot be taken back.*; call join again"):
                kv.barrier()
            turn.done()
        else:
            turn.wait()
            trained(kv)
        kv.join()
        kv.barrier()
        return trained(kv)

    assert run(script) == [2, 2]


def test_an_assign_that_times_out_before_its_push_has_arrived_can_be_made_again() -> None:
    """It had a number already, and others would have waited for it."""

    def script(session: NodeSession) -> float:
        kv = open_store("dist_sync", session)
        kv.init("w", ones())
        if session.rank == 0:
            late = mock.patch.object(kv._backend, "_settle", side_effect=TimedOut("push of key 'w'"))
            with late, pytest.raises(TimedOut, match="push of key 'w'"):
                kv.assign("w", ones())
            turn.done()
        else:
            turn.wait()
        kv.assign("w", ones())
        kv.barrier()
        return trained(kv)

    turn = Turn()
    assert run(script) == [2, 2]


# --- calls that failed for all workers


def test_every_call_that_failed_for_all_workers_can_be_made_again(tmp_path: Path) -> None:
    """With what was wrong put right; nothing in between."""
    (tmp_path / "file").write_text("no folder")

    def script(session: NodeSession) -> float:
        odd = session.rank == 1
        with pytest.raises(KVError, match="creates a 'dist_async' store"):
            open_store("dist_async" if odd else "dist_sync", session)
        with pytest.raises(KVError, match="with staleness"):
            open_store("dist_async", session, 1 if odd else 2)
        kv = open_store("dist_sync", session)
        with pytest.raises(KVError, match="worker-0 has shape"):
            kv.init("w", ones(3 if odd else 2))
        kv.set_gradient_compression({"type": "2bit", "threshold": 1 + session.rank, "min_size": 0})
        with pytest.raises(KVError, match="codec 2bit"):
            kv.init("w", ones())
        kv.set_gradient_compression({"type": "none"})
        kv.init("w", ones())
        with pytest.raises(KVError, match=r"worker-. declares key '[uv]'"):
            kv.broadcast("u" if odd else "v", ones(), out=ones())
        kv.broadcast("v", ones(), out=ones())
        with pytest.raises(KVError, match="declares key"):
            kv.assign("v" if odd else "w", ones())
        kv.assign("w", ones())
        for folder in (tmp_path / "file" / "x", tmp_path / ("one" if odd else "other")):
            with pytest.raises(KVError, match="save_states"):
                kv.save_states(folder)
        kv.save_states(tmp_path / "saved")
        with pytest.raises(KVError, match="no saved states in"):
            kv.load_states(tmp_path / "missing")
        kv.load_states(tmp_path / "saved")
        kv.barrier()
        return trained(kv)

    with Cluster(2, 1, over="inproc") as job:
        assert sorted(job.run_sessions(script)) == [2, 2]


# --- calls that are refused for their arguments, by one worker


def wrong_calls(kv: KVStore) -> list[Callable[[], object]]:
    return [
        lambda: kv.set_gradient_compression({"typ": "2bit"}),
        lambda: kv.set_gradient_compression({"type": "2bit"}, keys=[1.5]),
        lambda: kv.init("w", "text"),
        lambda: kv.init(["w", 1], [ones(), ones()]),
        lambda: kv.init("w" * 5000, ones()),
        lambda: kv.broadcast("w", ones(), out=ones(3)),
        lambda: kv.push("w", ones()),
        lambda: kv.set_optimizer("sdg"),
        lambda: kv.set_optimizer("sgd", learning_rat=1),
        lambda: kv.set_optimizer("no_module:Rule"),
        lambda: kv.set_optimizer_params(lr=1),
        lambda: kv.set_multipliers(lr={"w": -1}),
        lambda: kv.set_updater(lambda key, received, stored: None),
        lambda: kv.save_states(5),  # type: ignore[arg-type]
        lambda: kv.load_states(""),
        lambda: kv.profile(5),  # type: ignore[arg-type]
        lambda: kv.num_dead_node(9),
    ]


def test_a_key_of_more_than_4096_bytes_is_refused() -> None:
    """A key of 70 MB ended the job: no message may be so long."""
    with pytest.raises(KVError, match=r"key 'ééé.* has 4098 bytes, expected at most 4096"):
        KVStore.init.__globals__["values"].key_of("é" * 2049)


# --- scripts that start over: a cell of a notebook that makes a store is run again


@pytest.mark.parametrize("who", ["one", "both"])
def test_a_cell_that_makes_a_store_and_then_fails_can_be_run_again(who: str) -> None:
    def script(session: NodeSession) -> list[float]:
        def cell(wrong: Callable[[KVStore], object]) -> float:
            kv = open_store("dist_sync", session)
            wrong(kv)
            kv.init("w", ones())
            return trained(kv)

        found = []
        for number in range(len(wrong_calls(None))):  # type: ignore[arg-type]
            if session.rank == 0 or who == "both":
                with pytest.raises(KVError):
                    cell(lambda kv, number=number: wrong_calls(kv)[number]())  # type: ignore[misc]
            found.append(cell(lambda kv: None))
        return found

    assert run(script) == [[2] * len(wrong_calls(None))] * 2  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["init", "barrier"])
def test_a_cell_that_was_left_waiting_after_its_create_can_be_run_again_whole(call: str) -> None:
    """The other worker is in the first store all the time, and comes to wait there before or after."""
    turn = Turn()

    def script(session: NodeSession) -> float:
        def cell(again: bool) -> float:
            kv = open_store("dist_sync", session)
            first = kv.barrier if call == "barrier" else lambda: kv.init("v", ones())
            if session.rank == 0 and not again:
                times_out(session, first)
                turn.done()
                return 0
            turn.wait()
            first()
            kv.init("w", ones())
            return trained(kv)

        return cell(False) or cell(True)

    assert run(script) == [2, 2]


def test_after_a_call_that_failed_for_all_one_worker_may_start_over_and_another_call_again() -> None:
    def script(session: NodeSession) -> float:
        kv = open_store("dist_sync", session)
        with pytest.raises(KVError, match="has shape"):
            kv.init("w", ones(2 + session.rank))
        if session.rank == 1:
            kv = open_store("dist_sync", session)
        kv.init("w", ones())
        return trained(kv)

    assert run(script) == [2, 2]


def test_the_store_that_a_later_create_replaced_says_so_and_the_numbers_stay_in_step() -> None:
    def script(session: NodeSession) -> list[float]:
        if session.rank == 0:
            old = open_store("dist_sync", session)
            kv = open_store("dist_sync", session)
            with pytest.raises(StoreClosed, match="was replaced by a later create, as it was not used before"):
                old.barrier()
        else:
            kv = open_store("dist_sync", session)
        kv.init("w", ones())
        other = open_store("dist_sync", session)
        other.init("w", ones())
        found = [trained(kv), trained(other)]
        kv.close()
        other.close()
        return found

    assert run(script) == [[2, 2], [2, 2]]


def test_a_store_that_was_closed_unused_is_not_taken_for_one_to_start_over_with() -> None:
    def script(session: NodeSession) -> float:
        first = open_store("dist_sync", session)
        if session.rank == 0:
            first.close()
        kv = open_store("dist_sync", session)
        kv.init("w", ones())
        return trained(kv)

    assert run(script) == [2, 2]


def test_two_stores_that_are_made_before_they_are_used_are_two() -> None:
    def script(session: NodeSession) -> list[float]:
        stores = [open_store("dist_sync", session) for _ in range(3)]
        for number, kv in enumerate(stores):
            kv.init("w", number * ones())
        out = ones()
        return [float(out[0]) for kv in stores if kv.pull("w", out=out)]

    assert run(script, workers=3) == [[0, 1, 2]] * 3


def test_a_store_that_is_given_up_unused_is_taken_by_the_next_create() -> None:
    """As a trainer does that could not be made; the others wait in it, or are given it up, too."""
    turn = Turn()

    def script(session: NodeSession) -> float:
        kv = open_store("dist_sync", session)
        if session.rank == 0:
            times_out(session, lambda: kv.init("w", ones()))
            kv.give_up(KeyboardInterrupt())
            turn.done()
            kv = open_store("dist_sync", session)
        turn.wait()
        kv.init("w", ones())
        return trained(kv)

    assert run(script) == [2, 2]


def test_a_store_that_is_given_up_fails_the_next_call_of_the_others_and_all_can_make_another() -> None:
    def script(session: NodeSession) -> float:
        kv = open_store("dist_sync", session)
        kv.init("w", ones())
        if session.rank == 0:
            kv.give_up(ValueError("no room"))
            kv.give_up(ValueError("the second time it does nothing"))
            with pytest.raises(StoreClosed):
                kv.barrier()
        else:
            with pytest.raises(KVError, match="worker-0 failed at init: ValueError: no room"):
                kv.init("v", ones())
        kv = open_store("dist_sync", session)
        kv.init("w", ones())
        return trained(kv)

    assert run(script) == [2, 2]
