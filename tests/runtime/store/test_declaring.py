"""What workers declare: whether the values of worker 0 are there is never said before they are."""

from __future__ import annotations

from typing import Any, cast

import pytest

from distrun_runtime.errors import TimedOut
from distrun_runtime.protocol.message import Kind
from distrun_runtime.store.declaring import fill
from distrun_runtime.store.link import Link


@pytest.mark.parametrize("error", [TimedOut("init: no answer for 5 s"), KeyboardInterrupt()])
def test_the_others_never_hear_that_values_are_there_which_did_not_arrive(error: BaseException) -> None:
    told: list[dict[str, Any]] = []

    class Broken:
        store, limit_s = 1, 5.0

        def send(self, what: str, packed: object) -> Broken:
            return self

        def wait(self, limit_s: float) -> None:
            raise error

        def settled(self, number: int, is_good: bool) -> None:
            assert (number, is_good) == (3, False)

        def scheduler(self, what: str, kind: Kind, body: dict[str, Any]) -> None:
            told.append(body)

    with pytest.raises(type(error)):
        fill(cast(Link, Broken()), "init", 3, [], {})
    assert told[0]["number"] == 3
    assert told[0]["error"]
