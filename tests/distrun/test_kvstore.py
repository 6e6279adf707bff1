from __future__ import annotations


def test_the_store_has_two_names() -> None:
    from distrun import kvstore
    from distrun_runtime import kvstore as runtime

    assert kvstore.create is runtime.create
    assert set(runtime.__all__) <= set(dir(kvstore))
