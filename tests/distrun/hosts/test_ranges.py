from __future__ import annotations

import pytest

from distrun.errors import HostsError
from distrun.hosts import ranges

PAIRS = [
    (["gpu%02d" % index for index in range(1, 9)] + ["x1"], "gpu[01-08],x1"),
    (["n1", "n2", "n3", "n7"], "n[1-3,7]"),
    (["n8", "n9", "n10", "n11"], "n[8-11]"),
    (["n08", "n09", "n10", "n100"], "n[100,08-10]"),
    (["n1", "n01"], "n[1,01]"),
    (["rack%dn%d" % (rack, node) for rack in (1, 2) for node in (1, 2, 3)], "rack[1-2]n[1-3]"),
    (["a", "b1", "b2"], "a,b[1-2]"),
    (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
    (["2001:db8::1", "2001:db8::2"], "2001:db8::1,2001:db8::2"),
    (["d1"], "d1"),
    ([], ""),
]


@pytest.mark.parametrize(("names", "folded"), PAIRS, ids=[folded or "none" for _, folded in PAIRS])
def test_names_are_folded_as_clustershell_does_and_back(names: list[str], folded: str) -> None:
    assert ranges.fold(names) == folded
    assert sorted(ranges.expand(folded)) == sorted(names)


def test_lists_are_expanded_in_their_order_with_steps_and_any_separator() -> None:
    assert ranges.expand("b[2-8/3],a\n x[01-02]y[1,3]\t[::1]") == [
        *("b2", "b5", "b8", "a"),
        *("x01y1", "x01y3", "x02y1", "x02y3"),
        "::1",
    ]


def test_a_thousand_racks_are_quick_and_one_host_too_many_is_refused() -> None:
    names = ranges.expand("r[001-999]n[01-64]")
    assert ranges.fold(names) == "r[001-999]n[01-64]"
    with pytest.raises(HostsError, match="E110: expands to 65537 hosts, limit 65536"):
        ranges.expand("n[1-65536],x")
    with pytest.raises(HostsError, match="E110: expands to 999999999999999999000000 hosts"):
        ranges.expand("n[1-999999999999999999]m[1-1000000]")


def test_all_errors_of_a_list_come_at_once_with_their_places() -> None:
    with pytest.raises(HostsError) as caught:
        ranges.expand("a[3-1],b\nc]")
    assert str(caught.value).splitlines() == [
        "node list:1:3: E110: range '3-1' is descending",
        "  a[3-1],b",
        "    ^",
        "node list:2:2: E109: stray ']' in 'c]'",
        "  c]",
        "   ^",
    ]
