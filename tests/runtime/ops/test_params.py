from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest

from distrun_runtime.errors import KVError
from distrun_runtime.ops.params import Param, complete

TABLE = (
    Param("rate", 0.1, low=0.0, alias="r"),
    Param("beta", 0.9, low=0.0, high=1.0, open_high=True),
    Param("clip", None, low=0.0, open_low=True),
    Param("fast", False),
)


def test_what_is_not_given_has_its_default() -> None:
    assert complete("rule 'x'", TABLE, {}) == {"rate": 0.1, "beta": 0.9, "clip": None, "fast": False}


def test_numbers_of_any_kind_become_floats_that_json_keeps() -> None:
    found = complete("rule 'x'", TABLE, {"r": 2, "beta": np.float32(0.5), "clip": np.int64(3), "fast": True})
    assert found == {"rate": 2.0, "beta": 0.5, "clip": 3.0, "fast": True}
    assert [type(value) for value in found.values()] == [float, float, float, bool]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"raet": 1}, r"rule 'x' has no parameter 'raet' \(did you mean 'rate'\?\); it has beta, clip, fast, r, rate"),
        ({"rate": 1, "r": 1}, "rate and r are one parameter; give one"),
        ({"rate": -1}, "rate=-1: expected a finite number at least 0"),
        ({"rate": float("nan")}, "expected a finite number at least 0"),
        ({"rate": float("inf")}, "expected a finite number"),
        ({"rate": "0.1"}, "rate='0.1': expected a finite number"),
        ({"rate": True}, "rate=True: expected a finite number"),
        ({"rate": None}, "rate=None: expected a finite number"),
        ({"rate": 10**400}, "expected a finite number"),
        ({"beta": 1}, "beta=1: expected a finite number at least 0 and below 1"),
        ({"clip": 0}, "clip=0: expected a finite number above 0, or None"),
        ({"fast": 1}, "fast=1: expected True or False"),
    ],
)
def test_a_wrong_parameter_says_what_would_be_right(given: Mapping[str, object], words: str) -> None:
    with pytest.raises(KVError, match=words):
        complete("rule 'x'", TABLE, given)
