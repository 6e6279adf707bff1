from __future__ import annotations

import socket

import pytest

from distrun_runtime.agent import query
from distrun_runtime.errors import ContractError


def target(host: str, port: int, nonce: str, address: str = "127.0.0.1") -> dict[str, object]:
    return {"host": host, "address": address, "port": port, "nonce": nonce}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_nonces_that_were_left_are_told_when_listening_ends(address: str) -> None:
    try:
        port = query.answer("listen", {"address": address})["port"]
    except ContractError:
        pytest.skip("no %s here" % address)
    targets = [target("a", port, "first", address), target("b", port, "second", address)]
    told = query.answer("connect", {"targets": targets, "limit_s": 60.0})
    assert told == {"results": {"a": "", "b": ""}}
    assert sorted(query.answer("close", {})["nonces"]) == ["first", "second"]
    assert query.answer("close", {}) == {"nonces": []}
    assert query.connect([target("a", port, "x", address)], 60.0) == {"a": "Connection refused"}


def test_what_answers_nothing_is_late_and_delays_no_other() -> None:
    port = query.listen("127.0.0.1")
    with socket.socket() as full:
        # A queue of one that is full: the system drops what comes then.
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        silent = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for each in fillers:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", silent))
        told = query.connect([target("a", silent, "x"), target("b", port, "y")], 3.0)
        for each in fillers:
            each.close()
    assert told == {"a": "no answer within 3 s", "b": ""}
    assert query.close() == ["y"]


def test_ports_come_from_the_range_and_an_address_of_another_host_is_refused() -> None:
    port = query.listen("127.0.0.1")
    query.close()
    assert query.answer("listen", {"address": "127.0.0.1", "port_range": "%d-%d" % (port, port)}) == {"port": port}
    with pytest.raises(ContractError, match="Address already in use"):
        query.listen("127.0.0.1", "%d-%d" % (port, port))
    query.close()
    with pytest.raises(ContractError, match=r"cannot listen on 192\.0\.2\.77"):
        query.listen("192.0.2.77")
