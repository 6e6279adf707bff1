"""Stores that are not ours: by class, registered in this process, or by entry point of an installed distribution."""

from __future__ import annotations

import threading
from importlib import metadata
from typing import Any

from distrun_runtime.errors import KVError
from distrun_runtime.store.kinds import TYPES

__all__ = ["GROUP", "add", "find", "names"]

GROUP = "distrun.kvstores"
"""The group of entry points: name of the kind to `module:Class`."""

_classes: dict[str, type[Any]] = {}
_lock = threading.Lock()


def add(kind: type[Any]) -> None:
    """Make a class known by its name in lower case. The same class, defined again, takes its own place.

    Raises:
        KVError: the name is a built-in kind's or another class's.
    """
    name = kind.__name__.lower()
    if name in TYPES:
        raise KVError("store type %r is built in; give class %s another name" % (name, kind.__qualname__))
    with _lock:
        there = _classes.setdefault(name, kind)
        if (there.__module__, there.__qualname__) != (kind.__module__, kind.__qualname__):
            raise KVError(
                "store type %r is %s.%s already; give %s.%s another name"
                % (name, there.__module__, there.__qualname__, kind.__module__, kind.__qualname__)
            )
        _classes[name] = kind


def find(name: str) -> type[Any] | None:
    """Return the class of a kind that is not built in, loaded; None if there is none.

    Raises:
        KVError: it cannot be loaded, several distributions have that name, or one claims a built-in name.
    """
    with _lock:
        if name in _classes:
            return _classes[name]
    found = _points().get(name, [])
    if not found:
        return None
    if len({point.value for point in found}) > 1:
        raise KVError("store type %r is registered more than once: %s" % (name, " and ".join(map(_origin, found))))
    try:
        kind: type[Any] = found[0].load()
    # Whatever an import raises: it is another package's.
    except Exception as err:
        raise KVError("store type %r (%s) cannot be loaded: %s" % (name, _origin(found[0]), err)) from err
    return kind


def names() -> list[str]:
    """Return the names of all kinds that are not built in, sorted.

    Raises:
        KVError: a distribution claims a built-in name.
    """
    with _lock:
        return sorted({*_classes, *_points()})


def _points() -> dict[str, list[metadata.EntryPoint]]:
    """Return the entry points of our group by name in lower case."""
    result: dict[str, list[metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=GROUP):
        name = point.name.lower()
        if name in TYPES:
            raise KVError("store type %r is built in, but %s claims it too; remove that" % (name, _origin(point)))
        result.setdefault(name, []).append(point)
    return result


def _origin(point: metadata.EntryPoint) -> str:
    where = point.dist.name if point.dist is not None else "an unnamed distribution"
    return "%s of %s" % (point.value, where)
