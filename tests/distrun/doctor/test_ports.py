from __future__ import annotations

import itertools

import pytest

from distrun.doctor import examine
from distrun.doctor.checks import BAD, OK, CheckRow, Ways, folded
from distrun_runtime.contract.plan import Host

NONCES = {("a", "b"): "n1", ("b", "a"): "n2", ("c", "b"): "n3"}
PLACES = {"a": "10.0.0.1:1", "b": "10.0.0.2:2"}


@pytest.mark.parametrize("count", range(17))
def test_few_hosts_are_tried_each_with_each(count: int) -> None:
    names = ["h%d" % n for n in range(count)]
    found = examine.pairs(names)
    assert len(found) == len(set(found)) == count * max(0, count - 1)
    assert all(one != other for one, other in found)


@pytest.mark.parametrize("count", [17, 64, 1000])
def test_many_hosts_are_tried_in_a_ring_and_with_the_first(count: int) -> None:
    names = ["h%d" % n for n in range(count)]
    found = examine.pairs(names)
    assert len(found) == len(set(found)) <= 3 * count
    assert {to for _, to in found} == {source for source, _ in found} == set(names)
    assert all((names[0], name) in found and (name, names[0]) in found for name in names[1:])
    assert all((one, other) in found for one, other in itertools.pairwise(names))


def test_a_host_is_reached_when_every_nonce_arrived() -> None:
    results = dict.fromkeys(NONCES, "")
    rows = examine.port_rows(NONCES, results, {"a": ["n2"], "b": ["n3", "n1"]}, PLACES)
    assert rows == [
        CheckRow("a", "data ports", OK, "reached by its peer"),
        CheckRow("b", "data ports", OK, "reached by all 2 asked"),
    ]


def test_who_cannot_reach_whom_is_said_with_the_reason() -> None:
    results = {("a", "b"): "Connection refused", ("b", "a"): "", ("c", "b"): "Connection refused"}
    good, bad = examine.port_rows(NONCES, results, {"a": ["n2"], "b": []}, PLACES)
    assert (bad.mark, good.mark) == (BAD, OK)
    assert bad.text == "a,c cannot reach 10.0.0.2:2: Connection refused"
    assert "firewall" in bad.fix


def test_a_connection_that_somebody_else_took_is_a_fault() -> None:
    results = dict.fromkeys(NONCES, "")
    _, bad = examine.port_rows(NONCES, results, {"a": ["n2"], "b": ["n1"]}, PLACES)
    assert bad.text == "c cannot reach 10.0.0.2:2: something else answered there"


def test_pairs_that_were_not_tried_say_nothing() -> None:
    assert examine.port_rows(NONCES, {}, {}, PLACES) == []


def test_rows_that_say_the_same_are_folded_in_the_order_of_the_checks() -> None:
    rows = [
        CheckRow("a", "one", OK, "x"),
        CheckRow("a", "two", OK, "y"),
        CheckRow("b", "one", OK, "x"),
        CheckRow("b", "two", BAD, "z", "f"),
    ]
    assert [(row.check, row.text, names) for row, names in folded(rows)] == [
        ("one", "x", ["a", "b"]),
        ("two", "y", ["a"]),
        ("two", "z", ["b"]),
    ]


def test_several_hosts_are_fixed_by_one_line() -> None:
    row = CheckRow("h1", "one", BAD, "x", "look: {on}", "df -h")
    assert row.fix_text(Ways()) == "look: ssh h1 'df -h'"
    assert row.fix_text(Ways(), ["h1", "h2"]) == "look: distrun exec --hosts 'h[1-2]' 'df -h'"


def test_hosts_are_fixed_over_the_connection_that_was_examined() -> None:
    hosts = {name: Host(name, login="ssh -F my/config -p 2222 %s" % name) for name in ("h1", "h2", "h3")}
    ways = Ways(hosts, "distrun exec -H hosts --ssh-config my/config")
    row = CheckRow("h1", "one", BAD, "x", "{on}", "df -h")
    assert row.fix_text(ways) == "ssh -F my/config -p 2222 h1 'df -h'"
    assert row.fix_text(ways, ["h1", "h2", "h3"]) == "distrun exec -H hosts --ssh-config my/config 'df -h'"
    assert row.fix_text(ways, ["h1", "h2"]) == (
        "ssh -F my/config -p 2222 h1 'df -h'; ssh -F my/config -p 2222 h2 'df -h'"
    )


def test_what_may_ask_for_a_password_gets_a_terminal() -> None:
    row = CheckRow("h1", "one", BAD, "x", "{on}", "sudo reboot")
    assert row.fix_text(Ways()) == "ssh -t h1 'sudo reboot'"
    assert row.fix_text(Ways(), ["h1", "h2"]) == "for host in h1 h2; do ssh -t $host 'sudo reboot'; done"


def test_this_machine_is_fixed_without_ssh() -> None:
    ways = Ways({"here": Host("here")})
    assert CheckRow("here", "one", BAD, "x", "{on}", "sudo df").fix_text(ways) == "sudo df"
