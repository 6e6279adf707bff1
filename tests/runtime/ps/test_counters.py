"""What a server counts."""

from __future__ import annotations

from distrun_runtime.ps.counters import Counters
from distrun_runtime.ps.work import SlotId

SLOT = SlotId(1, 0, 0)


def test_bytes_and_updates_add_up() -> None:
    counters = Counters()
    for size in (3, 4):
        counters.received(size)
        counters.sent(2 * size)
    counters.updated(SLOT)
    assert counters.to_json() == {"bytes_in": 7, "bytes_out": 14, "updates": 1, "staleness": {}}


def test_staleness_has_mean_maximum_and_count_of_each_worker() -> None:
    counters = Counters()
    for rank, staleness in ((1, 0), (1, 4), (1, 2), (0, 1)):
        counters.updated(SLOT, rank, staleness)
    assert counters.to_json()["staleness"] == {
        "0": {"mean": 1.0, "max": 1, "pushes": 1},
        "1": {"mean": 2.0, "max": 4, "pushes": 3},
    }
    assert counters.updates == 4
