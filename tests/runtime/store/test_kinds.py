from __future__ import annotations

from distrun_runtime.store import kinds


def test_each_kind_means_one_of_three_things_to_servers_and_other_workers() -> None:
    assert {name: kinds.canonical(name) for name in kinds.TYPES} == {
        "local": "local",
        "device": "local",
        "dist": "dist_sync",
        "dist_sync": "dist_sync",
        "dist_device_sync": "dist_sync",
        "dist_sync_device": "dist_sync",
        "dist_async": "dist_async",
        "dist_device_async": "dist_async",
        "dist_async_device": "dist_async",
    }


def test_a_kind_says_where_values_are_when_pushes_count_and_who_sums_devices() -> None:
    assert [name for name in kinds.TYPES if not kinds.is_dist(name)] == ["local", "device"]
    assert [name for name in kinds.TYPES if kinds.is_async(name)] == [
        *("dist_async", "dist_device_async", "dist_async_device")
    ]
    assert [name for name in kinds.TYPES if not kinds.on_devices(name)] == ["local", "dist", "dist_sync", "dist_async"]
