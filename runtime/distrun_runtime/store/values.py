"""The forms in which keys and values may be given, brought to one form. Pure functions.

    one key        one array, or a list of arrays: one for each device
    list of keys   a list of as many items, each an array or such a list

A key repeated in one call is one key with all its values. Keys are int or str; numpy's integers are ints.
"""

from __future__ import annotations

from typing import Any, Union

import numpy.typing as npt

Key = Union[int, str]
Array = npt.NDArray[Any]
