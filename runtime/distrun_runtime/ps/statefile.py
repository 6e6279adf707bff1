"""Saved states of a store: the files of a save, and how shards are written to and read from them. docs/states.md.

    FOLDER/manifest.json          what was saved; it names the folder of data that belongs to it
    FOLDER/data-ID/server-0.npz   the shards that server 0 held
    FOLDER/data-ID/worker-0.npz   what worker 0 keeps for itself

A save makes a new data folder and replaces the manifest last, so that FOLDER is at every moment either what it was or
what it is to be. Nothing in these files is ever unpickled. bfloat16 is uint16 in them.

Reading has two phases. `stage` reads and checks all that a server's shards need, and makes the rule's states of it.
The caller keeps it beside the shards, and puts it in their places when all servers could read theirs. So a torn file,
or a user's rule that dislikes a value, changes nothing on any server.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import field
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.device import DeviceArray, is_on_host, on_host
from distrun_runtime.arrays.dtypes import BFLOAT16, Array, name_of
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops import update
from distrun_runtime.ops.optimizers import Key, RuleSpec

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the manifest and of the files that it names."""
DATA = "data-"
MARK = "save"
"""The member of each npz that says to which save it belongs."""

_OWN_PART = re.compile(DATA + "[0-9a-f]{16}")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Names from messages and manifests: one word, so that nothing outside the folder of a save is opened."""

_READING = threading.Lock()
"""Held while numpy reads an array: it parses the array's head with `ast`, and Python 3.11 before 3.11.8 may raise
SystemError when two threads do that (CPython issue 106905). Several nodes of one process are such threads."""


def new_part() -> str:
    """Return a new name for a folder of data."""
    return DATA + os.urandom(8).hex()


def server_file(rank: int) -> str:
    """Return the name of a server's file."""
    return f"server-{rank}.npz"


def worker_file(rank: int) -> str:
    """Return the name of a worker's file."""
    return f"worker-{rank}.npz"


def worker_files(manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the workers' files of a save."""
    return sorted(name for name in manifest["files"] if name.startswith("worker-"))


def write(folder: str, part: str, name: str, arrays: Mapping[str, Array], host: str) -> dict[str, Any]:
    """Write one file of a save and return what the manifest says of it: `bytes`, and `bfloat16`, names of arrays.

    Arguments:
        arrays: by name, any shape and dtype but objects.

    Raises:
        KVError: it cannot be written; names file and host.
    """
    path = _path(folder, part, name, host)
    halves = sorted(each for each, array in arrays.items() if array.dtype == BFLOAT16)
    plain = {each: array.view(np.uint16) if each in halves else array for each, array in arrays.items()}
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **{MARK: np.array(part)}, **plain)
        return {"bytes": os.path.getsize(path), "bfloat16": halves}
    except (OSError, ValueError) as err:
        raise KVError(f"states cannot be written to {path} on host {host}: {err}") from err


class StateFile:
    """One file of a save, read array by array.

    Raises:
        KVError: it is missing, torn, or belongs to another save; names file and host.
    """

    def __init__(self, folder: str, part: str, name: str, holds: Mapping[str, Any], host: str) -> None:
        self._path = _path(folder, part, name, host)
        self._host = host
        self._halves = frozenset(holds.get("bfloat16", ()))
        try:
            # numpy does so to read a file. Here, because it may fail: too many files may be open.
            import zipfile
            import zlib

            # Opened here: numpy leaves it open when it is no npz.
            self._stream = open(self._path, "rb")  # noqa: SIM115 - closed by close()
        except FileNotFoundError:
            raise self.wrong(
                "is not there: all files of a save must be in one folder that every host of the job shares"
            ) from None
        except OSError as err:
            raise self._torn(err) from err
        self._damage = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError)
        """What is raised where a file of a save is damaged or cannot be read."""
        try:
            self._file = self._opened(part, holds)
        except BaseException:
            self._stream.close()
            raise
        self._members: dict[str, list[str]] = {}
        for member in self._file.files:
            number, _, rest = member.partition(".")
            offset, _, name = rest.partition(".")
            self._members.setdefault(f"{number}.{offset}", []).append(name)

    def _opened(self, part: str, holds: Mapping[str, Any]) -> Any:
        size = os.fstat(self._stream.fileno()).st_size
        if size != holds.get("bytes", size):
            raise self.wrong(f"has {size} bytes where the manifest says {int(holds['bytes'])}")
        try:
            with _READING:
                found = np.load(self._stream, allow_pickle=False)
                mark = str(found[MARK])
        except (*self._damage, IndexError) as err:
            raise self._torn(err) from err
        if mark != part:
            raise self.wrong(f"belongs to another save, {mark!r}")
        return found

    def array(self, name: str) -> Array:
        """Return an array by its name.

        Raises:
            KVError: there is none, or its bytes are not what was written.
        """
        try:
            with _READING:
                found: Array = self._file[name]
        except self._damage as err:
            raise self._torn(err) from err
        return found.view(BFLOAT16) if name in self._halves else found

    def names(self) -> list[str]:
        """Return the names of all arrays."""
        return [name for name in self._file.files if name != MARK]

    def members(self, prefix: str) -> list[str]:
        """Return the names of all arrays of a piece, without its prefix `KEY.OFFSET`."""
        return self._members.get(prefix, [])

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._stream.close()

    def wrong(self, text: str) -> KVError:
        """Return the error that says what is wrong with the file."""
        return KVError(f"{self._path} on host {self._host} {text}")

    def _torn(self, err: BaseException) -> KVError:
        return self.wrong(f"cannot be read: {type(err).__name__}: {err}")


def read_residuals(
    folder: str, part: str, name: str, keys: Mapping[int, tuple[Key, int]], host: str
) -> dict[Key, Array]:
    """Return what compression had left out in one worker, by key: float32, of shape (size,) or (devices, size).

    Arguments:
        keys: key number in the file to the key and its elements; what the file has of others is left out.

    Raises:
        KVError: the file is missing, torn, or belongs to another save, or an array is none of its key's.
    """
    found: dict[Key, Array] = {}
    with closing(StateFile(folder, part, name, {}, host)) as file:
        there = set(file.names())
        for number, (key, size) in keys.items():
            name = f"{number}.residual"
            if name not in there:
                continue
            array = file.array(name)
            is_right = array.dtype == np.float32 and array.ndim in (1, 2) and array.shape[-1] == size
            if not is_right or not np.isfinite(array).all():
                what = f"a residual of {array.dtype} {array.shape}; expected {size} finite float32 elements"
                raise file.wrong(f"has for key {key!r} {what}")
            found[key] = array
    return found


def write_manifest(folder: str, manifest: Mapping[str, Any], host: str) -> None:
    """Put the manifest in its place, and remove the data of earlier saves: the save counts from now on.

    Raises:
        KVError: it cannot be written, or not be read again; names file and host.
    """
    path = os.path.join(folder, MANIFEST)
    if wrong := _against_manifest(manifest):
        raise KVError(f"the manifest {path} cannot be written on host {host}: {wrong}")
    try:
        with replacing(path) as file:
            file.write((json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())
    except OSError as err:
        raise KVError(f"the manifest {path} cannot be written on host {host}: {err}") from err
    with suppress(OSError):  # it need not be readable; too many files may be open for an import
        import shutil

        for other in os.listdir(folder):
            # The folder is the user's: only names that `new_part` makes are ours to remove.
            if other != manifest["data"] and _OWN_PART.fullmatch(other):
                shutil.rmtree(os.path.join(folder, other), ignore_errors=True)


def read_manifest(folder: str, host: str) -> dict[str, Any]:
    """Return the manifest of a folder.

    Raises:
        KVError: there is none, or it is not one of ours, or it says what cannot be; names file and host.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, encoding="utf-8") as file:
            manifest = json.load(file)
    except FileNotFoundError:
        raise KVError(f"no saved states in {folder} on host {host}: there is no {MANIFEST}") from None
    except (OSError, ValueError) as err:
        raise KVError(f"{path} on host {host} cannot be read: {err}") from err
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not _is_part(manifest.get("data")):
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise KVError(
            f"{path} on host {host} is not a manifest of format {FORMAT} (format {found!r}): were these"
            " states saved by another version?"
        )
    if wrong := _against_manifest(manifest):
        raise KVError(f"{path} on host {host} is malformed: {wrong}")
    return manifest


def discard(folder: str, part: str) -> None:
    """Remove the data of a save that failed, unless the manifest names it: then the save has succeeded after all."""
    with suppress(KVError):
        if read_manifest(folder, "")["data"] == part:
            return
    with suppress(OSError):  # too many files may be open for an import
        import shutil

        shutil.rmtree(os.path.join(folder, part), ignore_errors=True)


def _is_part(name: object) -> bool:
    return isinstance(name, str) and name.startswith(DATA) and bool(_NAME.fullmatch(name))


def _path(folder: str, part: str, name: str, host: str) -> str:
    """Return where a file of a save is.

    Raises:
        KVError: part or name is not one that a save has.
    """
    if not _is_part(part) or not (_NAME.fullmatch(name) and name.endswith(".npz")):
        raise KVError(f"states in {folder} on host {host}: {os.path.join(part, name)!r} is not a file of a save")
    return os.path.join(folder, part, name)


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Write a file that takes its place as a whole, and outlives a crash of the machine then.

    What a process that was killed meanwhile has left is removed by the next that writes this file.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}")
    for other in os.listdir(folder):
        if other.startswith(f".{name}.") and other[len(name) + 2 :].isdigit():
            with suppress(OSError):
                os.unlink(os.path.join(folder, other))
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Shards

_CACHE = 16
"""Arrays that are kept while adjacent shards read them."""


@dataclass(frozen=True)
class Saved:
    """One shard as it is saved; also where a value is read to."""

    key: int
    """Number of its key."""
    offset: int
    weight: DeviceArray
    """Flat."""
    state: Mapping[str, Any] | None = None
    """What the rule remembers: arrays, where the weight is, and numbers."""
    residual: DeviceArray | None = None
    """float32: what compressed answers left out so far."""

    def on_host(self) -> Saved:
        """Return it with all arrays in the host's memory."""
        if is_on_host(self.weight):
            return self
        state = self.state and update.state_on_host(self.state)
        residual = None if self.residual is None else on_host(self.residual)
        return Saved(self.key, self.offset, on_host(self.weight), state, residual)


@dataclass
class Staged:
    """What was read for one shard."""

    weight: Array
    parts: dict[str, list[tuple[slice, Array]]] = field(default_factory=dict)
    """Of the rule's arrays, by name: elements of the shard and what they have; of some it may have none."""
    counters: dict[str, Any] = field(default_factory=dict)
    residual: Array | None = None
    state: dict[str, Any] | None = None
    """What the rule makes of parts and counters, which are empty then."""


def save(body: Mapping[str, Any], shards: Iterable[Saved]) -> dict[str, Any]:
    """Write shards of one store and return what the manifest says of them.

    Arguments:
        body: folder, part, `names` ([number, key] of each key that is saved), file, host.

    Raises:
        KVError: the file cannot be written, or a rule's state has something else than arrays and numbers.
    """
    names = {int(number): key for number, key in body["names"]}
    arrays: dict[str, Array] = {}
    counters: dict[str, dict[str, Any]] = {}
    pieces = []
    for each in sorted(shards, key=lambda each: (each.key, each.offset)):
        if each.key not in names:
            continue
        shard = each.on_host()
        prefix = f"{shard.key}.{shard.offset}"
        pieces.append([shard.key, shard.offset, len(shard.weight)])
        arrays[prefix + ".weight"] = shard.weight
        if shard.residual is not None:
            arrays[prefix + ".residual"] = shard.residual
        for name, value in (shard.state or {}).items():
            if isinstance(value, np.ndarray) and value.dtype != object:
                arrays[f"{prefix}.state.{name}"] = value
            else:
                counters.setdefault(prefix, {})[name] = _counter(names[shard.key], name, value)
    facts = write(body["folder"], body["part"], body["file"], arrays, body["host"])
    return {"file": body["file"], "holds": {**facts, "pieces": pieces, "counters": counters}}


def _counter(key: object, name: str, value: object) -> object:
    plain = value.item() if isinstance(value, np.generic) else value
    if plain is None or isinstance(plain, (bool, int, float, str)):
        return plain
    raise KVError(
        f"key {key!r}: the rule's state {name!r} is of type {type(value).__name__}, which cannot be saved;"
        " arrays and numbers can"
    )


def stage(body: Mapping[str, Any], shards: Sequence[Saved], rule: rules.Rule | None = None) -> list[Staged | None]:
    """Return what was saved of some shards of one store; None for those whose key was not.

    Arguments:
        body: folder, host, manifest, and `numbers`: [number, number in the manifest, key] of each key.
        rule: the one whose states they will be.

    Raises:
        KVError: a file is missing, torn, or of another save; it does not fit the shards: names file, key and host.
    """
    numbers = {int(number): (int(saved), key) for number, saved, key in body["numbers"]}
    with ExitStack() as files:
        source = _SaveReader(body, files)
        staged = [
            source.read(*numbers[shard.key], shard.offset, shard.weight) if shard.key in numbers else None
            for shard in shards
        ]
    for shard, read in zip(shards, staged, strict=True):
        if read is not None:
            read.state = _state(read, rule, f"key {numbers[shard.key][1]!r} of the states in {body['folder']}")
            read.parts, read.counters = {}, {}
    return staged


def _state(staged: Staged, rule: rules.Rule | None, whose: str) -> dict[str, Any] | None:
    """Return what the rule makes of saved arrays and counters, which may be of another kind than it has there."""
    if rule is None or not (staged.parts or staged.counters):
        return None
    fresh = rule.new_state(staged.weight)
    state: dict[str, Any] = dict(staged.counters)
    for name, parts in staged.parts.items():
        base, like = fresh.get(name), parts[0][1]
        if isinstance(base, np.ndarray) and not np.can_cast(like.dtype, base.dtype, "same_kind"):
            raise KVError(f"{whose}: the rule's state {name!r} is {base.dtype}, saved was {like.dtype}")
        whole = np.array(base) if isinstance(base, np.ndarray) else np.zeros(len(staged.weight), like.dtype)
        for target, array in parts:
            whole.reshape(-1)[target] = array
        state[name] = whole
    for name, value in staged.counters.items():
        if isinstance(fresh.get(name), np.ndarray):
            raise KVError(f"{whose}: the rule's state {name!r} is an array, saved was {value!r}")
    return dict(rules.carry_state(rule, staged.weight, state))


class _SavedPiece(NamedTuple):
    """One saved piece of one key; pieces sort by their offsets."""

    offset: int
    length: int
    file: str
    prefix: str
    """What its arrays' names begin with."""


class _SaveReader:
    """The files of one save, opened as they are needed; `files` closes them."""

    def __init__(self, body: Mapping[str, Any], files: ExitStack) -> None:
        self._closing = files
        self._folder, self._host, manifest = str(body["folder"]), str(body["host"]), body["manifest"]
        self._part = str(manifest["data"])
        self._holds: Mapping[str, Mapping[str, Any]] = manifest["files"]
        self._pieces: dict[int, list[_SavedPiece]] = {}
        for name, holds in self._holds.items():
            for number, offset, length in holds.get("pieces", ()):
                piece = _SavedPiece(int(offset), int(length), name, f"{int(number)}.{int(offset)}")
                self._pieces.setdefault(int(number), []).append(piece)
        self._files: dict[str, StateFile] = {}
        self._cache: dict[tuple[str, str], Array] = {}

    def read(self, number: int, key: object, offset: int, weight: DeviceArray) -> Staged:
        """Return what was saved of `len(weight)` elements of a key from `offset` on, from whatever pieces have it."""
        staged = Staged(np.empty(len(weight), weight.dtype))
        at, end = offset, offset + len(weight)
        for piece in sorted(self._pieces.get(number, ())):
            if piece.offset <= at < min(end, piece.offset + piece.length):
                upto = min(end, piece.offset + piece.length)
                self._take(staged, piece, slice(at - offset, upto - offset), at - piece.offset, key)
                at = upto
        if at < end:
            raise KVError(
                f"key {key!r}: elements {at} to {end - 1} are in none of the files of"
                f" {self._folder}/{self._part} on host {self._host}"
            )
        return staged

    def _take(self, staged: Staged, piece: _SavedPiece, target: slice, begin: int, key: object) -> None:
        """Copy elements of one saved piece, from its element `begin` on, to their place in a shard."""
        source = slice(begin, begin + target.stop - target.start)
        saved = self._elements(piece, "weight", key)
        if saved.dtype != staged.weight.dtype:
            what = f"key {key!r} as {name_of(saved.dtype)}; expected {name_of(staged.weight.dtype)}"
            raise self._file(piece.file).wrong(f"has {what}")
        staged.weight[target] = saved[source]
        for member in self._file(piece.file).members(piece.prefix):
            kind, _, name = member.partition(".")
            if kind == "state":
                staged.parts.setdefault(name, []).append((target, self._elements(piece, member, key)[source]))
            elif kind == "residual":
                if staged.residual is None:
                    staged.residual = np.zeros(len(staged.weight), np.float32)
                staged.residual[target] = self._elements(piece, member, key)[source]
        for name, value in self._holds[piece.file].get("counters", {}).get(piece.prefix, {}).items():
            known = staged.counters.get(name)
            staged.counters[name] = max(known, value) if isinstance(known, (int, float)) else value

    def _elements(self, piece: _SavedPiece, member: str, key: object) -> Array:
        """Return one array of a piece, flat."""
        name = piece.file, f"{piece.prefix}.{member}"
        if name not in self._cache:
            if len(self._cache) >= _CACHE:
                self._cache.clear()
            self._cache[name] = self._file(piece.file).array(name[1])
        found = self._cache[name].reshape(-1)
        if len(found) != piece.length:
            what = f"{len(found)} elements of its {member}; expected {piece.length}"
            raise self._file(piece.file).wrong(f"has for key {key!r} {what}")
        return found

    def _file(self, name: str) -> StateFile:
        if name not in self._files:
            file = StateFile(self._folder, self._part, name, self._holds[name], self._host)
            self._files[name] = self._closing.enter_context(closing(file))
        return self._files[name]


# What a manifest may say

_MOST = 2**63 - 1
"""What a number of rounds or of elements is at most: it has to fit into a message."""
_STYPES = ("default", "row_sparse")


def _against_manifest(manifest: Mapping[str, Any]) -> str:
    """Return what is wrong with a manifest: member, what was expected, what was found; empty: nothing."""
    for member, (is_right, expected) in _MEMBERS.items():
        if member not in manifest:
            return f"it has no member {member!r}"
        if not is_right(manifest[member]):
            return f"{member}: expected {expected}, found {manifest[member]!r:.80}"
    numbers = [each["number"] for each in manifest["keys"]]
    keys = [(type(each["key"]), each["key"]) for each in manifest["keys"]]
    if len(set(numbers)) < len(numbers) or len(set(keys)) < len(keys):
        return "keys: a key or number is there twice"
    for name, holds in manifest["files"].items():
        if wrong := _against_file(holds):
            return f"files: {name}: {wrong}"
    if manifest["rule"] is not None:
        try:
            RuleSpec.from_json(manifest["rule"])
        except KVError as err:
            return f"rule: {err}"
    return ""


def _against_file(holds: Mapping[str, Any]) -> str:
    for member, (is_right, expected) in _HOLDS.items():
        if member in holds and not is_right(holds[member]):
            return f"{member}: expected {expected}, found {holds[member]!r:.80}"
    for piece, counters in holds.get("counters", {}).items():
        for name, value in counters.items():
            if name == "updates" and not _is_whole(value):
                return f"counters of {piece}: updates={value!r:.80}: expected a whole number, at least 0"
    return ""


def _is_whole(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _is_key(value: object) -> bool:
    return (
        isinstance(value, dict)
        and (isinstance(value.get("key"), str) or _is_whole(value.get("key"), -_MOST - 1))
        and _is_whole(value.get("number"))
        and _is_whole(value.get("index"), -_MOST - 1)
        and _is_list(value.get("shape"), _is_whole)
        and value.get("dtype") in dtypes.NAMES
        and value.get("stype") in _STYPES
    )


def _is_list(value: object, is_right: Callable[[Any], bool], length: int | None = None) -> bool:
    """Whether it is a list of such items; a tuple will be one in the file."""
    return isinstance(value, (list, tuple)) and (length is None or len(value) == length) and all(map(is_right, value))


def _is_dict(value: object, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) and is_right(each) for name, each in value.items())


def _lists_of(length: int) -> Callable[[object], bool]:
    return lambda value: _is_list(value, lambda each: _is_list(each, _is_whole, length))


_Form = tuple[Callable[[object], bool], str]
"""Whether a value is right, and what is, in words."""

_MEMBERS: dict[str, _Form] = {
    "type": (lambda value: isinstance(value, str), "a type of store"),
    "keys": (lambda value: _is_list(value, _is_key), "a list of keys with number, shape, dtype, stype and index"),
    "rule": (lambda value: value is None or isinstance(value, dict), "a rule or null"),
    "workers": (lambda value: _is_whole(value, 1), "a whole number, at least 1"),
    "servers": (lambda value: _is_whole(value, 1), "a whole number, at least 1"),
    "rounds": (_lists_of(2), "pairs of whole numbers, at least 0"),
    "files": (lambda value: _is_dict(value, lambda holds: isinstance(holds, dict)), "names of files, each with facts"),
}

_HOLDS: dict[str, _Form] = {
    "bytes": (_is_whole, "a whole number, at least 0"),
    "bfloat16": (lambda value: _is_list(value, lambda name: isinstance(name, str)), "a list of names"),
    "pieces": (_lists_of(3), "lists of key number, offset and length"),
    "counters": (
        lambda value: _is_dict(value, lambda names: _is_dict(names, _is_plain)),
        "for each piece names with a number, text or null",
    ),
}
