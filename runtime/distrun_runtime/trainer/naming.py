"""Adds the names of parameters and buffers to what a store says of their keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from distrun_runtime.errors import RuntimeFault
from distrun_runtime.trainer.parameter import Parameter

__all__ = ["naming"]

_KEYS = re.compile(r"\bkeys? (\d+(?:, \d+)*)")


@contextmanager
def naming(params: Sequence[Parameter], buffers: Sequence[str] = ()) -> Iterator[None]:
    """Add the names of parameters and buffers to what is raised inside about their keys.

    The keys of parameters are their indices; then comes the key under which workers are counted; then those of
    buffers.
    """
    try:
        yield
    except RuntimeFault as err:
        text = str(err)
        notes = [_note(key, params, buffers, text) for key in _keys(text)]
        said = ", ".join(note for note in notes if note)
        if said and said not in text:
            # In place: the error keeps its type, what else it carries, and where it was raised.
            err.args = ("%s (%s)" % (text, said), *err.args[1:])
        raise


def _keys(text: str) -> list[int]:
    return sorted({int(key) for found in _KEYS.findall(text) for key in found.split(", ")})


def _note(key: int, params: Sequence[Parameter], buffers: Sequence[str], text: str) -> str:
    if key < len(params):
        name = params[key].name
        return "" if name == str(key) else "key %d is parameter %r" % (key, name)
    if 0 <= key - len(params) - 1 < len(buffers):
        return "key %d is buffer %r" % (key, buffers[key - len(params) - 1])
    if key > len(params) and "saved states" in text:
        return "key %d is a buffer of the module whose states were saved; make the trainer of that module" % key
    if key == len(params) and "int64" in text:
        return (
            "key %d counts the workers where trainers update by themselves: is update_on_kvstore the same on all"
            " workers?" % key
        )
    return ""
