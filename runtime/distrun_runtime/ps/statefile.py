"""Files of saved states: one npz for each server and worker, and the manifest that names them. docs/states.md.

    FOLDER/manifest.json          what was saved; it names the folder of data that belongs to it
    FOLDER/data-ID/server-0.npz   the pieces that server 0 held
    FOLDER/data-ID/worker-0.npz   what worker 0 keeps for itself

A save makes a new data folder and replaces the manifest last, so that FOLDER is at every moment either what it was or
what it is to be. Nothing in these files is ever unpickled. bfloat16 stands in them as uint16.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from distrun_runtime.arrays.dtypes import BFLOAT16, Array
from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers import Key
from distrun_runtime.ps import manifest as manifests

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the manifest and of the files that it names."""
DATA = "data-"
MARK = "save"
"""The member of each npz that says to which save it belongs."""

_OWN_PART = re.compile(DATA + "[0-9a-f]{16}")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Names from messages and manifests: one word, so that nothing outside the folder of a save is opened."""

_READ_ERRORS = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError)


def new_part() -> str:
    """Return a new name for a folder of data."""
    return DATA + os.urandom(8).hex()


def server_file(rank: int) -> str:
    """Return the name of a server's file."""
    return "server-%d.npz" % rank


def worker_file(rank: int) -> str:
    """Return the name of a worker's file."""
    return "worker-%d.npz" % rank


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
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(".%s.%d" % (name, os.getpid()))
        with open(temporary, "wb") as file:
            np.savez(file, allow_pickle=False, **{MARK: np.array(part)}, **plain)
            _settle(file)
        os.replace(temporary, path)
        _settle_folder(path.parent)
        return {"bytes": path.stat().st_size, "bfloat16": halves}
    except (OSError, ValueError) as err:
        raise KVError("states cannot be written to %s on host %s: %s" % (path, host, err)) from err


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
            # Opened here: numpy leaves it open when it is no npz.
            self._stream = open(self._path, "rb")  # noqa: SIM115 - closed by close()
        except FileNotFoundError:
            raise self.wrong(
                "is not there: all files of a save must be in one folder that every host of the job shares"
            ) from None
        except OSError as err:
            raise self._torn(err) from err
        try:
            self._file, mark = self._opened(holds)
        except BaseException:
            self._stream.close()
            raise
        if mark != part:
            self.close()
            raise self.wrong("belongs to another save, %r" % mark)
        self._members: dict[str, list[str]] = {}
        for member in self._file.files:
            number, _, rest = member.partition(".")
            offset, _, name = rest.partition(".")
            self._members.setdefault("%s.%s" % (number, offset), []).append(name)

    def _opened(self, holds: Mapping[str, Any]) -> tuple[Any, str]:
        size = os.fstat(self._stream.fileno()).st_size
        if size != holds.get("bytes", size):
            raise self.wrong("has %d bytes where the manifest says %d" % (size, holds["bytes"]))
        try:
            found = np.load(self._stream, allow_pickle=False)
            return found, str(found[MARK])
        except (*_READ_ERRORS, IndexError) as err:
            raise self._torn(err) from err

    def array(self, name: str) -> Array:
        """Return an array by its name.

        Raises:
            KVError: there is none, or its bytes are not what was written.
        """
        try:
            found: Array = self._file[name]
        except _READ_ERRORS as err:
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
        return KVError("%s on host %s %s" % (self._path, self._host, text))

    def _torn(self, err: BaseException) -> KVError:
        return self.wrong("cannot be read: %s: %s" % (type(err).__name__, err))


def read_all(folder: str, part: str, name: str, holds: Mapping[str, Any], host: str) -> dict[str, Array]:
    """Return all arrays of one file of a save, by name.

    Raises:
        KVError: it is missing, torn, or belongs to another save; names file and host.
    """
    with closing(StateFile(folder, part, name, holds, host)) as file:
        return {each: file.array(each) for each in file.names()}


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
            name = "%d.residual" % number
            if name not in there:
                continue
            array = file.array(name)
            is_right = array.dtype == np.float32 and array.ndim in (1, 2) and array.shape[-1] == size
            if not is_right or not np.isfinite(array).all():
                words = (key, array.dtype, array.shape, size)
                raise file.wrong("has for key %r a residual of %s %s; expected %d finite float32 elements" % words)
            found[key] = array
    return found


def write_manifest(folder: str, manifest: Mapping[str, Any], host: str) -> None:
    """Put the manifest in its place, and remove the data of earlier saves: the save counts from now on.

    Raises:
        KVError: it cannot be written, or not be read again; names file and host.
    """
    path = Path(folder, MANIFEST)
    wrong = manifests.against(manifest)
    if wrong:
        raise KVError("the manifest %s cannot be written on host %s: %s" % (path, host, wrong))
    temporary = path.with_name(".%s.%d" % (MANIFEST, os.getpid()))
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1, sort_keys=True)
            file.write("\n")
            _settle(file)
        os.replace(temporary, path)
        _settle_folder(path.parent)
    except OSError as err:
        with suppress(OSError):
            temporary.unlink()
        raise KVError("the manifest %s cannot be written on host %s: %s" % (path, host, err)) from err
    for other in path.parent.glob(DATA + "*"):
        # The folder is the user's: only names that `new_part` makes are ours to remove.
        if other.name != manifest["data"] and _OWN_PART.fullmatch(other.name):
            shutil.rmtree(other, ignore_errors=True)


def read_manifest(folder: str, host: str) -> dict[str, Any]:
    """Return the manifest of a folder.

    Raises:
        KVError: there is none, or it is not one of ours, or it says what cannot be; names file and host.
    """
    path = Path(folder, MANIFEST)
    try:
        with open(path, encoding="utf-8") as file:
            manifest = json.load(file)
    except FileNotFoundError:
        raise KVError("no saved states in %s on host %s: there is no %s" % (folder, host, MANIFEST)) from None
    except (OSError, ValueError) as err:
        raise KVError("%s on host %s cannot be read: %s" % (path, host, err)) from err
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not _is_part(manifest.get("data")):
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise KVError(
            "%s on host %s is not a manifest of format %d (format %r): were these states saved by another version?"
            % (path, host, FORMAT, found)
        )
    wrong = manifests.against(manifest)
    if wrong:
        raise KVError("%s on host %s is malformed: %s" % (path, host, wrong))
    return manifest


def discard(folder: str, part: str) -> None:
    """Remove the data of a save that failed, unless the manifest names it: then the save has succeeded after all."""
    with suppress(KVError):
        if read_manifest(folder, "")["data"] == part:
            return
    shutil.rmtree(Path(folder, part), ignore_errors=True)


def _is_part(name: object) -> bool:
    return isinstance(name, str) and name.startswith(DATA) and bool(_NAME.fullmatch(name))


def _path(folder: str, part: str, name: str, host: str) -> Path:
    """Return where a file of a save is.

    Raises:
        KVError: part or name is not one that a save has.
    """
    if not _is_part(part) or not (_NAME.fullmatch(name) and name.endswith(".npz")):
        text = "states in %s on host %s: %r is not a file of a save"
        raise KVError(text % (folder, host, os.path.join(part, name)))
    return Path(folder, part, name)


def _settle(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _settle_folder(folder: Path) -> None:
    """See to it that names in a folder outlive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
