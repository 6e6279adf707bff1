"""Ranges of ports."""

from __future__ import annotations

import pytest

from distrun_runtime.contract import ports
from distrun_runtime.errors import ContractError


@pytest.mark.parametrize("text", ["x", "0-5", "9-8", "1-65536", "1-2-3"])
def test_malformed_range_is_refused(text: str) -> None:
    with pytest.raises(ContractError, match="expected A-B"):
        ports.ports_to_try(text)


def test_every_port_of_a_range_is_tried_once() -> None:
    assert sorted(ports.ports_to_try("100-110")) == list(range(100, 111))
    assert ports.ports_to_try("7") == [7]
    assert ports.ports_to_try("") == [0]
