"""Reads the JSON files of a job's folder, and checks them: a damaged file is an error that names file and member.

A folder is written by one version of distrun and read by others, after crashes, full disks and people. What a reader
needs must be there and of its type; other members are ignored.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, List, Mapping, NamedTuple, Union

from distrun_runtime.contract import facts
from distrun_runtime.contract.dataclass import seconds
from distrun_runtime.errors import JobStoreError

SIZE_LIMIT = 256 * 1024 * 1024
"""Bytes of a file that is read; ten thousand tasks need a hundredth of it."""
_NUMBER_LIMIT = 1e15


class MemberType(NamedTuple):
    """What a member has to be."""

    words: str
    fits: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode("utf-8", "surrogateescape")  # as paths and words of a command are printed
    except UnicodeEncodeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _NUMBER_LIMIT


def _is_time(value: Any) -> bool:
    try:
        return _is_text(value) and seconds(value) >= 0
    except ValueError:
        return False


def optional(kind: MemberType) -> MemberType:
    """Return the kind that may also be null."""
    return MemberType(kind.words + " or null", lambda value: value is None or kind.fits(value))


def one_of(*words: str) -> MemberType:
    """Return the kind of a word among `words`."""
    return MemberType(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words)


TEXT = MemberType("a text", _is_text)
WORDS = MemberType("a text", lambda value: isinstance(value, str))
"""What a program said: it may have any characters."""
COUNT = MemberType("a whole number", lambda value: isinstance(value, int) and _is_number(value))
NUMBER = MemberType("a number", _is_number)
TIME = MemberType("a time (RFC 3339)", _is_time)
FLAG = MemberType("true or false", lambda value: isinstance(value, bool))
TEXTS = MemberType("a list, each a text", lambda value: isinstance(value, list) and all(map(_is_text, value)))
PAIRS = MemberType(
    "an object of texts",
    lambda value: isinstance(value, dict) and all(_is_text(each) for pair in value.items() for each in pair),
)
NAME = MemberType(
    "the name of a task",
    lambda value: isinstance(value, str) and bool(re.fullmatch(r"scheduler|[a-z]+-\d{1,9}", value)),
)

Members = Mapping[str, Union[MemberType, "Members", List["Members"]]]
"""What the members of an object have to be: of a type, an object or null, or a list of objects."""

REQUEST: Members = {
    **{"id": TEXT, "time": TIME, "name": TEXT, "labels": TEXTS, "launcher": TEXT, "command": TEXTS, "cwd": TEXT}
}
ALLOCATION: Members = {"id": TEXT, "time": TIME}
HANDLE = MemberType(
    "an object with engine, id and more",
    lambda value: (
        isinstance(value, dict)
        and all(map(_is_text, (value.get("engine"), value.get("id"))))
        and isinstance(value.get("more"), dict)  # the engine's own
    ),
)
ENGINE: Members = {"id": TEXT, "time": TIME, "marker": TEXT, "handle": optional(HANDLE)}
LAUNCHER: Members = {"pid": COUNT, "start": TEXT, "host": TEXT, "boot": TEXT}
CONTROL: Members = {**LAUNCHER, "path": TEXT}
TASK: Members = {
    "name": NAME,
    "role": one_of(*facts.ROLES),
    "rank": COUNT,
    "host": TEXT,
    "state": one_of(*facts.TASK_STATES),
    "pid": optional(COUNT),
    "code": optional(COUNT),
    "signal": optional(TEXT),
    "started": optional(TIME),
    "ended": optional(TIME),
    "reason": WORDS,
    "own_failure": WORDS,
    "lost_peer": WORDS,
    "max_rss_kb": COUNT,
    "cpu_s": NUMBER,
}
STATE: Members = {
    "id": TEXT,
    "name": TEXT,
    "labels": TEXTS,
    "state": one_of(*facts.JOB_STATES),
    "command": TEXTS,
    "hosts": TEXTS,
    "created": TIME,
    "updated": TIME,
    "finished": optional(TIME),
    "exit_code": optional(COUNT),
    "reason": optional(one_of(*facts.REASONS)),
    "message": optional(WORDS),
    "tasks": [TASK],
}
CULPRIT: Members = {
    **{"task": TEXT, "host": TEXT, "code": optional(COUNT), "signal": optional(TEXT), "time": TIME, "reason": WORDS},
    **{"consequence": FLAG, "lost_peer": WORDS, "missing": FLAG, "log": optional(TEXT)},
}
PROBLEM: Members = {"host": TEXT, "kind": TEXT, "text": WORDS, "fix": WORDS}
SURVIVOR: Members = {"what": WORDS, "host": TEXT}
OUTCOME: Members = {
    **{"id": TEXT, "exit_code": COUNT, "reason": one_of(*facts.REASONS), "message": WORDS},
    **{"culprit": CULPRIT, "tasks": [TASK], "problems": [PROBLEM], "survivors": [SURVIVOR]},
}
PLAN_HOST: Members = {"name": TEXT, "address": TEXT, "ports": TEXTS, "reach": PAIRS, "interface": TEXT}
PLAN_TASK: Members = {
    **{"name": NAME, "role": one_of(*facts.ROLES), "rank": COUNT, "host": TEXT, "argv": TEXTS, "cwd": TEXT},
    **{"env": PAIRS, "refs": PAIRS, "secret_env": TEXTS, "needs": TEXTS},
}
PLAN_SYNC: Members = {"source": TEXT, "size": COUNT, "files": COUNT, "delete": FLAG, "identity": TEXT}
LIMITS = MemberType(
    "numbers from 0",
    lambda value: (
        isinstance(value, dict) and all(each is None or (_is_number(each) and each >= 0) for each in value.values())
    ),
)
PLAN: Members = {
    **dict.fromkeys(("job", "name", "backend", "cwd", "on_eof", "interface", "subnet", "activate"), TEXT),
    **{"command": TEXTS, "unset": TEXTS, "hosts": [PLAN_HOST], "tasks": [PLAN_TASK], "limits": LIMITS},
    "sync": PLAN_SYNC,
}
"""As far as a reader relies on it."""


def damaged(path: Path, what: str) -> JobStoreError:
    """Return the error that says that a file of a job's folder is damaged."""
    return JobStoreError(f"{path} is damaged: {what}")


def opened(path: Path) -> BinaryIO:
    """Open a file of a job's folder for reading; never waits, as opening a pipe would.

    Raises:
        FileNotFoundError: there is none.
        JobStoreError: it cannot be opened, or is a folder, a pipe, a device.
    """
    try:
        descriptor = os.open(str(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as err:
        raise JobStoreError(f"cannot read {path}: {err.strerror or err}") from err
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise damaged(path, "it is not a file")


def load(path: Path, version: int) -> Dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        JobStoreError: it cannot be read, or holds no object of that version.
    """
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > SIZE_LIMIT:
                raise damaged(path, f"it has {size} bytes")
            value = json.loads(file.read().decode("utf-8"))
    except JobStoreError:
        raise
    except OSError as err:
        raise JobStoreError(f"cannot read {path}: {err.strerror or err}") from err
    except (RecursionError, ValueError) as err:
        why = "it is nested too deep" if isinstance(err, RecursionError) else f"it is not JSON: {err}"
        raise damaged(path, why) from None
    if not isinstance(value, dict):
        raise damaged(path, f"expected an object, found {reprlib.repr(value)}")
    if value.get("version") != version or isinstance(value["version"], bool):
        found = reprlib.repr(value.get("version"))
        raise JobStoreError(f"{path} has version {found}; this program knows version {version}")
    return value


def check(path: Path, value: Any, members: Members, where: str = "") -> None:
    """Check the members of an object of the file `path`; `where`: which object it is, such as `tasks[3].`.

    Raises:
        JobStoreError: one is missing, or not of its kind.
    """
    if not isinstance(value, dict):
        raise damaged(path, f"{where.rstrip('.') or 'all of it'}: expected an object, found {reprlib.repr(value)}")
    for name, kind in members.items():
        if name not in value:
            raise damaged(path, f"{where}{name} is missing")
        member, inner = value[name], where + name
        if isinstance(kind, list):
            _check_list(path, member, kind[0], inner)
        elif isinstance(kind, MemberType):
            if not kind.fits(member):
                raise damaged(path, f"{inner}: expected {kind.words}, found {reprlib.repr(member)}")
        elif isinstance(member, dict):
            check(path, member, kind, inner + ".")
        elif member is not None:
            raise damaged(path, f"{inner}: expected an object or null, found {reprlib.repr(member)}")


def _check_list(path: Path, value: Any, members: Members, where: str) -> None:
    """Check a list of objects; their names, if they have some, must differ."""
    if not isinstance(value, list):
        raise damaged(path, f"{where}: expected a list, found {reprlib.repr(value)}")
    seen = set()
    for number, each in enumerate(value):
        check(path, each, members, f"{where}[{number}].")
        if "name" in members:
            if each["name"] in seen:
                raise damaged(path, f"{where}[{number}].name: {each['name']} is there twice")
            seen.add(each["name"])
