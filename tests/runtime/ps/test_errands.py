"""Errands: what servers have against one is told as one text."""

from __future__ import annotations

import pytest

from distrun_runtime.ps.errands import folded


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        (["server-1: no: not so", "server-0: no: not so"], "server-0, server-1: no: not so"),
        (["server-2: no", "server-0: no", "server-1: full"], "server-0, server-2: no; server-1: full"),
        (["a text of nobody"], "a text of nobody"),
        (["RULE is malformed: KeyError: 'spec'"], "RULE is malformed: KeyError: 'spec'"),
    ],
)
def test_a_reason_that_several_servers_give_is_told_once(errors: list[str], text: str) -> None:
    assert folded(errors) == text
