from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.ops.partition import Shard, shards


def lengths(size: int, servers: int, bound: int = 1_000_000) -> list[int]:
    return [shard.length for shard in shards(0, size, servers, bound)]


@pytest.mark.parametrize(
    ("servers", "order"),
    [(4, [0, 1, 2, 3, 0, 1, 2, 3]), (7, [0, 5, 3, 1, 6, 4, 2]), (1, [0, 0, 0]), (2, [0, 1, 0, 1])],
)
def test_small_values_rotate_over_the_servers(servers: int, order: list[int]) -> None:
    assert [shards(index, 5, servers, 1_000_000)[0].server for index in range(len(order))] == order


@pytest.mark.parametrize(
    ("size", "servers", "expected"),
    [
        (1_000_003, 3, [333334, 333335, 333334]),
        (1_440_000, 7, [205714, 205715, 205714, 205714, 205714, 205715, 205714]),
        (1_000_000, 3, [333333, 333334, 333333]),
        (1_000_001, 2, [500001, 500000]),
    ],
)
def test_big_values_are_cut_as_mxnet_cuts_them(size: int, servers: int, expected: list[int]) -> None:
    assert lengths(size, servers) == expected


def test_a_value_of_exactly_the_bound_is_cut_and_one_element_less_is_not() -> None:
    assert len(shards(3, 1_000_000, 2, 1_000_000)) == 2
    assert shards(3, 999_999, 2, 1_000_000) == (Shard(server=1, offset=0, length=999_999),)


@pytest.mark.parametrize("index", [215_330, 2**31, 2**40 + 1, -1, -7])
def test_large_and_negative_indices_place_without_overflow(index: int) -> None:
    assert shards(index, 1, 7, 10)[0].server == (index * 9973) % 7
    assert 0 <= shards(index, 1, 7, 10)[0].server < 7


def test_a_value_of_no_elements_has_one_empty_shard() -> None:
    assert shards(1, 0, 4, 1) == (Shard(server=1, offset=0, length=0),)


@pytest.mark.parametrize(("size", "servers", "bound"), [(-1, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_impossible_numbers_are_an_error(size: int, servers: int, bound: int) -> None:
    with pytest.raises(ValueError, match="expected size >= 0, servers >= 1 and bound >= 1"):
        shards(0, size, servers, bound)


@given(
    index=st.integers(),
    size=st.one_of(st.integers(0, 50), st.integers(0, 2**50)),
    servers=st.integers(1, 64),
    bound=st.integers(1, 2_000_000),
)
def test_shards_cover_a_value_once_in_order_without_gap(index: int, size: int, servers: int, bound: int) -> None:
    found = shards(index, size, servers, bound)
    end = 0
    for shard in found:
        assert shard.offset == end
        assert 0 <= shard.server < servers
        end = shard.end
    assert end == size
    assert all(shard.length > 0 for shard in found) or found == (Shard(found[0].server, 0, 0),)
    assert [shard.server for shard in found] == sorted({shard.server for shard in found})


@given(size=st.integers(1, 10**9), servers=st.integers(1, 64))
def test_every_slice_is_within_one_element_of_the_mean(size: int, servers: int) -> None:
    for shard in shards(0, size, servers, 1):
        assert abs(shard.length - Fraction(size, servers)) <= 1 + Fraction(1, 1000)


@pytest.mark.parametrize(
    ("size", "servers", "factor", "expected"),
    [
        (1_466_521, 3, 16, [488848, 488832, 488841]),
        (1_466_521, 2, 16, [733264, 733257]),
        (1_000_000, 1, 32, [1_000_000]),
    ],
)
def test_compressed_values_are_cut_by_words_as_mxnet_cuts_them(
    size: int, servers: int, factor: int, expected: list[int]
) -> None:
    found = shards(3, size, servers, 1_000_000, factor)
    assert [shard.length for shard in found] == expected
    assert [shard.server for shard in found] == list(range(servers))


def test_small_compressed_values_live_where_uncompressed_ones_do() -> None:
    assert shards(3, 999_999, 2, 1_000_000, 16) == shards(3, 999_999, 2, 1_000_000)


@given(size=st.integers(0, 3000), servers=st.integers(1, 9), factor=st.sampled_from([1, 16, 32]))
def test_compressed_shards_cover_a_value_once_and_begin_at_words(size: int, servers: int, factor: int) -> None:
    end = 0
    for shard in shards(5, size, servers, 100, factor):
        assert shard.offset == end
        assert size < 100 or (shard.offset % factor == 0 and shard.length > 0)
        end = shard.end
    assert end == size


def test_rows_are_dealt_over_the_servers_as_mxnet_deals_them() -> None:
    found = shards(0, 1200 * 1200, 3, 1_000_000, 1200)
    assert [shard.length // 1200 for shard in found] == [400, 400, 400]
    assert [shard.length // 3 for shard in shards(0, 1000 * 3, 3, 3000, 3)] == [333, 334, 333]
    assert shards(3, 1000 * 3, 3, 3001, 3) == shards(3, 3000, 3, 3001)


@given(rows=st.integers(0, 300), row_size=st.integers(1, 40), servers=st.integers(1, 9))
def test_no_shard_cuts_a_row(rows: int, row_size: int, servers: int) -> None:
    end = 0
    for shard in shards(2, rows * row_size, servers, 500, row_size):
        assert shard.offset == end
        assert shard.offset % row_size == 0
        assert shard.length % row_size == 0
        end = shard.end
    assert end == rows * row_size
